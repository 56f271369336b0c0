#include "store/span_body.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::store {

std::size_t copy_rows(std::span<const Run> runs, const std::byte* rows, std::int32_t row_bytes,
                      std::int32_t position, std::byte* out, std::span<std::uint8_t> present) {
  const std::int64_t end = position + static_cast<std::int64_t>(present.size());
  auto run = std::partition_point(runs.begin(), runs.end(), [position](const Run& r) {
    return std::int64_t{r.position} + r.count <= position;
  });
  std::size_t found = 0;
  for (; run != runs.end() && run->position < end; ++run) {
    const std::int64_t first = std::max(run->position, position);
    const std::int64_t last = std::min(std::int64_t{run->position} + run->count, end);
    const auto at = static_cast<std::size_t>(first - position);
    const auto count = static_cast<std::size_t>(last - first);
    if (out != nullptr) {
      std::memcpy(out + row_offset(first - position, row_bytes),
                  rows + row_offset(run->row + first - run->position, row_bytes),
                  row_offset(last - first, row_bytes));
    }
    std::memset(present.data() + at, 1, count);
    found += count;
  }
  return found;
}

void Column::append(std::int32_t position, std::int32_t count, const std::byte* rows) {
  if (rows_ + count > capacity_) {
    // By an eighth: what is promised to a store counts rows, what it holds counts this.
    resize(std::max(rows_ + count, capacity_ + std::max<std::int64_t>(capacity_ / 8, 8)));
  }
  std::memcpy(bytes_.get() + row_offset(rows_, row_bytes_), rows, row_offset(count, row_bytes_));
  if (position == end_ && !runs_.empty()) {
    runs_.back().count += count;
  } else {
    runs_.push_back({position, count, rows_});
  }
  rows_ += count;
  end_ = position + count;
}

void Column::truncate(std::int32_t position) {
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
}

void Column::shrink() {
  if (rows_ < capacity_) resize(rows_);
  runs_.shrink_to_fit();
}

void Column::resize(std::int64_t rows) {
  if (rows == 0) {
    bytes_.reset();
  } else {
    void* grown = std::realloc(bytes_.get(), row_offset(rows, row_bytes_));
    if (grown == nullptr) throw std::bad_alloc();
    static_cast<void>(bytes_.release());
    bytes_.reset(static_cast<std::byte*>(grown));
  }
  capacity_ = rows;
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
