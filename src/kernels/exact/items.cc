#include "kernels/exact/items.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::kernels {
namespace {

void check_shape(const char* op, const TensorView<const std::int32_t, 1>& index, const char* name,
                 std::int64_t items, std::int64_t rows) {
  if (index.empty()) {
    if (items > rows) {
      throw Error(cat({op, ": ", items, " items, but only ", rows, " rows to go ", name}));
    }
    return;
  }
  if (index.shape[0] != items || (index.stride[0] != 1 && items > 1)) {
    throw Error(cat({op, ": ", name, " has ", index.shape[0],
                     " entries, must be contiguous and one an item: ", items}));
  }
}

void check_range(const char* op, const TensorView<const std::int32_t, 1>& index, const char* name,
                 std::int64_t items, std::int64_t rows) {
  if (index.empty()) return;
  for (std::int64_t i = 0; i < items; ++i) {
    if (index.data[i] < 0 || index.data[i] >= rows) {
      throw Error(
          cat({op, ": ", name, "[", i, "] is ", index.data[i], ", must be in [0, ", rows, ")"}));
    }
  }
}

}  // namespace

std::int64_t count_items(const Items& items, std::int64_t rows) {
  if (!items.from.empty()) return items.from.shape[0];
  if (!items.to.empty()) return items.to.shape[0];
  return rows;
}

void check_item_shapes(const char* op, const Items& items, std::int64_t count, std::int32_t experts,
                       std::int64_t rows_in, std::int64_t rows_out) {
  check_shape(op, items.from, "from", count, rows_in);
  check_shape(op, items.to, "to", count, rows_out);
  if (items.offsets.empty()) return;
  if (items.offsets.shape[0] != experts + 1 || items.offsets.stride[0] != 1) {
    throw Error(cat({op, ": offsets has ", items.offsets.shape[0],
                     " entries, must be contiguous and ", experts + 1, ", the experts and one"}));
  }
}

void check_items(const char* op, const Items& items, std::int64_t count, std::int32_t experts,
                 std::int64_t rows_in, std::int64_t rows_out) {
  check_item_shapes(op, items, count, experts, rows_in, rows_out);
  check_range(op, items.from, "from", count, rows_in);
  check_range(op, items.to, "to", count, rows_out);
  if (items.offsets.empty()) return;
  const auto& offsets = items.offsets;
  if (offsets.data[0] != 0 || offsets.data[experts] != count) {
    throw Error(cat({op, ": offsets run from ", offsets.data[0], " to ", offsets.data[experts],
                     ", must run from 0 to the ", count, " items"}));
  }
  for (std::int32_t e = 0; e < experts; ++e) {
    if (offsets.data[e] > offsets.data[e + 1]) {
      throw Error(cat({op, ": offsets of expert ", e, " decrease from ", offsets.data[e], " to ",
                       offsets.data[e + 1]}));
    }
  }
}

}  // namespace lockstep::kernels
