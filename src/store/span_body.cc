#include "store/span_body.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::store {

void Column::begin_run(std::int32_t position) {
  if (rows_ > 0) {
    end_run();
    runs_.push_back(run_);
  }
  run_ = {position, 0, rows_};
}

void Column::end_run() { run_.count = end_ - run_.position; }

/// For `wanted` rows that come now, or for as many as may come one by one.
void Column::add_piece(std::int64_t wanted) {
  // By an eighth: what is promised to a store counts rows, what it holds counts this.
  const std::int64_t most = std::max<std::int64_t>(kPieceBytes / row_bytes_, kLeastPiece);
  const std::int64_t more =
      first_ == nullptr ? first_rows_ : std::clamp<std::int64_t>(rows_ / kSlack, kLeastPiece, most);
  const std::int64_t count = std::max(wanted, more);
  auto* const bytes = static_cast<std::byte*>(std::malloc(row_offset(count, row_bytes_)));
  if (bytes == nullptr) throw std::bad_alloc();
  Bytes piece(bytes);
  if (first_ == nullptr) {
    first_ = std::move(piece);
  } else {
    pieces_.push_back({rows_, std::move(piece)});
  }
  next_ = bytes;
  left_ = static_cast<std::int32_t>(count);
}

/// Where there is no row. A first piece may be there all the same: of rows that failed to come.
void Column::forget_memory() {
  first_.reset();
  next_ = nullptr;
  left_ = 0;
}

void Column::truncate(std::int32_t position) {
  if (rows_ == 0) return forget_memory();
  const std::int64_t capacity = rows_ + left_;
  end_run();
  while (run_.position >= position && !runs_.empty()) {
    run_ = runs_.back();
    runs_.pop_back();
  }
  run_.count = std::clamp(position - run_.position, 0, run_.count);
  rows_ = run_.row + run_.count;
  end_ = rows_ == 0 ? 0 : run_.position + run_.count;
  std::int64_t kept = capacity;  // of it, in the pieces that stay
  while (!pieces_.empty() && last_piece() >= rows_) {
    kept = last_piece();
    pieces_.pop_back();
  }
  if (rows_ == 0) {
    kept = 0;
    first_.reset();
  }
  next_ = rows_ == 0 ? nullptr : last_bytes().get() + row_offset(rows_ - last_piece(), row_bytes_);
  left_ = static_cast<std::int32_t>(kept - rows_);
}

void Column::close() {
  if (rows_ == 0) return forget_memory();
  end_run();
  if (!runs_.empty()) runs_.push_back(run_);
  if (left_ == 0) return;
  if (last_piece() == rows_) {  // its rows failed to come
    pieces_.pop_back();
  } else if (left_ <= rows_ / kSlack) {
    return;
  } else {
    Bytes& last = last_bytes();
    void* const less = std::realloc(last.get(), row_offset(rows_ - last_piece(), row_bytes_));
    if (less == nullptr) return;  // what is there is kept as it is
    static_cast<void>(last.release());
    last.reset(static_cast<std::byte*>(less));
  }
  next_ = nullptr;
  left_ = 0;
}

void Column::copy(std::int64_t row, std::int64_t count, std::byte* out) const {
  auto next = std::partition_point(pieces_.begin(), pieces_.end(),
                                   [row](const Piece& p) { return p.row <= row; });
  const std::byte* bytes = next == pieces_.begin() ? first_.get() : std::prev(next)->bytes.get();
  std::int64_t begin = next == pieces_.begin() ? 0 : std::prev(next)->row;
  while (true) {
    const std::int64_t end = next == pieces_.end() ? rows_ : next->row;
    const std::int64_t n = std::min(count, end - row);
    std::memcpy(out, bytes + row_offset(row - begin, row_bytes_), row_offset(n, row_bytes_));
    count -= n;
    if (count <= 0) return;
    out += row_offset(n, row_bytes_);
    row += n;
    begin = next->row;
    bytes = next++->bytes.get();
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
