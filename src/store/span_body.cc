#include "store/span_body.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::store {

void Column::begin_run(std::int32_t position) {
  end_run();
  runs_.push_back({position, 0, rows_});
}

void Column::end_run() {
  if (!runs_.empty()) runs_.back().count = end_ - runs_.back().position;
}

/// For `wanted` rows that come now, or for as many as may come one by one.
void Column::add_piece(std::int64_t wanted) {
  // By an eighth: what is promised to a store counts rows, what it holds counts this.
  const std::int64_t most = std::max<std::int64_t>(kPieceBytes / row_bytes_, kLeastPiece);
  const std::int64_t more =
      pieces_.empty() ? first_piece_ : std::clamp<std::int64_t>(rows_ / 8, kLeastPiece, most);
  const std::int64_t count = std::max(wanted, more);
  auto* const bytes = static_cast<std::byte*>(std::malloc(row_offset(count, row_bytes_)));
  if (bytes == nullptr) throw std::bad_alloc();
  pieces_.push_back({rows_, {bytes, {}}});
  next_ = bytes;
  left_ = static_cast<std::int32_t>(count);
  capacity_ += count;
}

void Column::truncate(std::int32_t position) {
  end_run();
  while (!runs_.empty() && runs_.back().position >= position) {
    rows_ -= runs_.back().count;
    runs_.pop_back();
  }
  if (!runs_.empty()) {
    Run& last = runs_.back();
    const std::int32_t kept = std::min(last.count, position - last.position);
    rows_ -= last.count - kept;
    last.count = kept;
  }
  end_ = runs_.empty() ? 0 : runs_.back().position + runs_.back().count;
  while (!pieces_.empty() && pieces_.back().row >= rows_) {
    capacity_ = pieces_.back().row;  // full pieces come before the last
    pieces_.pop_back();
  }
  const std::int64_t in_last = pieces_.empty() ? 0 : rows_ - pieces_.back().row;
  next_ = pieces_.empty() ? nullptr : pieces_.back().bytes.get() + row_offset(in_last, row_bytes_);
  left_ = static_cast<std::int32_t>(capacity_ - rows_);
}

void Column::close() {
  end_run();
  if (left_ > 0) {
    Piece& last = pieces_.back();
    void* const less = std::realloc(last.bytes.get(), row_offset(rows_ - last.row, row_bytes_));
    if (less == nullptr) throw std::bad_alloc();
    static_cast<void>(last.bytes.release());
    last.bytes.reset(static_cast<std::byte*>(less));
    next_ = nullptr;
    left_ = 0;
    capacity_ = rows_;
  }
  runs_.shrink_to_fit();
}

void Column::copy(std::int64_t row, std::int64_t count, std::byte* out) const {
  auto piece = std::prev(std::partition_point(pieces_.begin(), pieces_.end(),
                                              [row](const Piece& p) { return p.row <= row; }));
  while (count > 0) {
    const auto next = std::next(piece);
    const std::int64_t end = next == pieces_.end() ? rows_ : next->row;
    const std::int64_t n = std::min(count, end - row);
    std::memcpy(out, piece->bytes.get() + row_offset(row - piece->row, row_bytes_),
                row_offset(n, row_bytes_));
    out += row_offset(n, row_bytes_);
    row += n;
    count -= n;
    piece = next;
  }
}

namespace {

constexpr std::size_t slot(Place place, Encoding encoding) {
  return static_cast<std::size_t>(place.layer.value) << 7 |
         static_cast<std::size_t>(place.site) << 4 | static_cast<std::size_t>(encoding);
}
static_assert(static_cast<int>(Site::kRouter) < 8 && static_cast<int>(Encoding::kCodes8) < 16);

}  // namespace

std::size_t Schema::id(Place place, Encoding encoding) {
  if (place.layer.value < 0 || place.layer.value >= kMaxLayers) {
    throw Error(cat(
        {"record of layer ", place.layer.value, ": a store knows layers 0 to ", kMaxLayers - 1}));
  }
  const std::size_t index = slot(place, encoding);
  if (index >= ids_.size()) ids_.resize(index + 1, -1);
  if (ids_[index] < 0) ids_[index] = static_cast<std::int32_t>(count_++);
  return static_cast<std::size_t>(ids_[index]);
}

std::int32_t Schema::find(Place place, Encoding encoding) const {
  if (place.layer.value < 0 || place.layer.value >= kMaxLayers) return -1;
  const std::size_t index = slot(place, encoding);
  return index < ids_.size() ? ids_[index] : -1;
}

std::int64_t Body::capacity_bytes() const {
  std::int64_t sum = 0;
  for (const Column& column : columns) sum += column.capacity_bytes();
  return sum;
}

std::int64_t Body::bytes() const {
  std::int64_t sum = 0;
  for (const Column& column : columns) sum += column.bytes();
  return sum;
}

std::int64_t Body::rows() const {
  std::int64_t sum = 0;
  for (const Column& column : columns) sum += column.rows();
  return sum;
}

std::int32_t Body::end() const {
  std::int32_t end = 0;
  for (const Column& column : columns) end = std::max(end, column.end());
  return end;
}

}  // namespace lockstep::store
