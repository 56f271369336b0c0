/// The records of one span in memory: a column of rows for each place and encoding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "contract/site.h"
#include "numerics/row.h"

namespace lockstep::store {

/// Where a row begins among rows of `row_bytes`; in 64 bits, for a column may pass 2 GiB.
constexpr std::size_t row_offset(std::int64_t row, std::int32_t row_bytes) {
  return static_cast<std::size_t>(row) * static_cast<std::size_t>(row_bytes);
}

/// Consecutive positions whose rows lie side by side, the first at index `row`.
struct Run {
  std::int32_t position = 0;
  std::int32_t count = 0;
  std::int64_t row = 0;
};

/// Copies what `runs` (ascending) hold of positions [position, position + present.size()) and sets
/// present; where they hold nothing, nothing is touched. `copy(row, count, at)` copies rows from
/// index `row` on to where the asked row `at` goes. Returns how many were there.
template <typename Copy>
std::size_t copy_rows(std::span<const Run> runs, std::int32_t position,
                      std::span<std::uint8_t> present, const Copy& copy) {
  const std::int64_t end = position + static_cast<std::int64_t>(present.size());
  auto run = std::partition_point(runs.begin(), runs.end(), [position](const Run& r) {
    return std::int64_t{r.position} + r.count <= position;
  });
  std::size_t found = 0;
  for (; run != runs.end() && run->position < end; ++run) {
    const std::int64_t first = std::max(run->position, position);
    const std::int64_t last = std::min(std::int64_t{run->position} + run->count, end);
    const auto count = static_cast<std::size_t>(last - first);
    copy(run->row + first - run->position, last - first, first - position);
    std::memset(present.data() + (first - position), 1, count);
    found += count;
  }
  return found;
}

/// Rows of one place under one encoding, in ascending order of position. Audit rows leave gaps.
/// They lie in pieces, each asked for when the last is full, so that none is copied to grow.
class alignas(64) Column {
 public:
  Column() = default;
  /// `stagger`, any number: columns that differ in it ask for memory at different rows.
  Column(Place place, RowLayout layout, std::size_t stagger = 0)
      : row_bytes_(layout.bytes()),
        first_rows_(1 + static_cast<std::int32_t>(stagger % kLeastPiece)),
        place_(place),
        layout_(layout) {}

  Place place() const { return place_; }
  const RowLayout& layout() const { return layout_; }
  std::int32_t row_bytes() const { return row_bytes_; }
  bool made() const { return row_bytes_ > 0; }
  std::int64_t rows() const { return rows_; }
  std::int32_t end() const { return end_; }  // past the last position, 0 when empty
  std::int64_t bytes() const { return rows_ * row_bytes_; }
  std::int64_t capacity_bytes() const { return (rows_ + left_) * row_bytes_; }

  /// Makes room for `count` rows of consecutive positions, which the caller fills before anybody
  /// reads: put(to, first, n) tells where n of them go, from the first-th on. Requires
  /// position >= end(). What it takes of memory stays within an eighth, and 8 rows, of what the
  /// rows need. Where memory is not to be had, or put() throws, the rows before that stay.
  template <typename Put>
  void extend(std::int32_t position, std::int32_t count, const Put& put) {
    for (std::int32_t first = 0; first < count;) {
      if (left_ == 0) add_piece(count - first);
      const std::int32_t n = std::min(left_, count - first);
      put(next_, first, n);
      if (first == 0 && (position != end_ || rows_ == 0)) begin_run(position);
      next_ += row_offset(n, row_bytes_);
      left_ -= n;
      rows_ += n;
      first += n;
      end_ = position + first;
    }
  }

  /// Keeps rows: extend() and a copy.
  void append(std::int32_t position, std::int32_t count, const std::byte* rows) {
    extend(position, count, [&](std::byte* to, std::int32_t first, std::int32_t n) {
      std::memcpy(to, rows + row_offset(first, row_bytes_), row_offset(n, row_bytes_));
    });
  }

  /// Forgets rows from `position` on.
  void truncate(std::int32_t position);

  /// No row comes any more. Gives back memory that holds none, where that can be done and is more
  /// than an eighth: each such gift waits for the allocator.
  void close();

  /// Once it is closed.
  std::span<const Run> runs() const {
    return runs_.empty() ? std::span(&run_, rows_ > 0 ? 1 : 0) : std::span<const Run>(runs_);
  }
  /// Copies rows [row, row + count) to `out`.
  void copy(std::int64_t row, std::int64_t count, std::byte* out) const;

 private:
  static constexpr std::int32_t kLeastPiece = 8;
  static constexpr std::int64_t kSlack = 8;              // of so many parts one may hold no rows
  static constexpr std::int32_t kPieceBytes = 16 << 10;  // rows that come one by one

  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  using Bytes = std::unique_ptr<std::byte, Free>;
  struct Piece {
    std::int64_t row = 0;  // index of its first
    Bytes bytes;
  };

  void forget_memory();
  void begin_run(std::int32_t position);
  void end_run();
  void add_piece(std::int64_t wanted);
  std::int64_t last_piece() const { return pieces_.empty() ? 0 : pieces_.back().row; }
  Bytes& last_bytes() { return pieces_.empty() ? first_ : pieces_.back().bytes; }

  // What a one-row append touches comes first. Most columns have one run, and many one piece.
  std::byte* next_ = nullptr;  // where the next row goes
  std::int64_t rows_ = 0;
  std::int32_t left_ = 0;  // rows that the last piece still takes; those before it are full
  std::int32_t end_ = 0;
  std::int32_t row_bytes_ = 0;
  std::int32_t first_rows_ = 0;  // that the first piece takes
  Place place_{};
  RowLayout layout_{};
  Run run_;                // the last; its count is known when another begins, or at the end
  std::vector<Run> runs_;  // those before it, and itself once the column is closed; none: it alone
  Bytes first_;            // the first piece
  std::vector<Piece> pieces_;  // the others
};
static_assert(sizeof(void*) != 8 || sizeof(Column) == 128);

/// Numbers the columns of a store densely, so that a hot path finds one without a search.
class Schema {
 public:
  static constexpr std::int32_t kMaxLayers = 4096;

  /// The number of a column, a new one on first sight. Throws where the layer is out of range.
  std::size_t id(Place place, Encoding encoding);
  /// Its number, or -1.
  std::int32_t find(Place place, Encoding encoding) const;
  std::size_t size() const { return count_; }

 private:
  std::vector<std::int32_t> ids_;  // by (layer, site, encoding); -1: none yet
  std::size_t count_ = 0;
};

/// All columns of a span, by their schema's numbers. Not changed any more once sealed.
struct Body {
  std::vector<Column> columns;

  /// What it takes of memory, and what its rows amount to.
  std::int64_t capacity_bytes() const;
  std::int64_t bytes() const;
  std::int64_t rows() const;
  /// Past the last position recorded anywhere, 0 when nothing was.
  std::int32_t end() const;
};

}  // namespace lockstep::store
