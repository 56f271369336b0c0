/// The records of one span in memory: a column of rows for each place and encoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
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

/// Copies what `runs` (ascending) hold of positions [position, position + present.size()) from
/// `rows` to `out`, and sets present; where they hold nothing, neither is touched. A null `out`
/// asks for presence alone. Returns how many were there.
std::size_t copy_rows(std::span<const Run> runs, const std::byte* rows, std::int32_t row_bytes,
                      std::int32_t position, std::byte* out, std::span<std::uint8_t> present);

/// Rows of one place under one encoding, in ascending order of position. Audit rows leave gaps.
class Column {
 public:
  Column() = default;
  Column(Place place, RowLayout layout)
      : row_bytes_(layout.bytes()), place_(place), layout_(layout) {}

  Place place() const { return place_; }
  const RowLayout& layout() const { return layout_; }
  std::int32_t row_bytes() const { return row_bytes_; }
  bool made() const { return row_bytes_ > 0; }
  std::span<const Run> runs() const { return runs_; }
  std::int64_t rows() const { return rows_; }
  std::int32_t end() const { return end_; }  // past the last position, 0 when empty
  const std::byte* data() const { return bytes_.get(); }
  std::int64_t bytes() const { return rows_ * row_bytes_; }
  std::int64_t capacity_bytes() const { return capacity_ * row_bytes_; }

  /// Keeps `count` rows of consecutive positions. Requires position >= end(). What it takes of
  /// memory stays within an eighth, and 8 rows, of what the rows need.
  void append(std::int32_t position, std::int32_t count, const std::byte* rows);

  /// Forgets rows from `position` on.
  void truncate(std::int32_t position);

  /// Gives back memory that holds no row.
  void shrink();

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  void resize(std::int64_t rows);

  // What a one-row append touches comes first.
  std::unique_ptr<std::byte, Free> bytes_;  // malloc's, so that it grows and shrinks in place
  std::int64_t rows_ = 0;
  std::int64_t capacity_ = 0;  // in rows
  std::int32_t end_ = 0;
  std::int32_t row_bytes_ = 0;
  std::vector<Run> runs_;
  Place place_{};
  RowLayout layout_{};
};

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
