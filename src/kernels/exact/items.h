/// The items of a grouped product: which row meets which expert. Inside kernels/exact/ only.
#pragma once

#include <cstdint>

#include "device/view.h"

namespace lockstep::kernels {

/// See W4a4Args.
struct Items {
  TensorView<const std::int32_t, 1> offsets;
  TensorView<const std::int32_t, 1> from;
  TensorView<const std::int32_t, 1> to;

  std::int64_t from_row(std::int64_t item) const { return from.empty() ? item : from.data[item]; }
  std::int64_t to_row(std::int64_t item) const { return to.empty() ? item : to.data[item]; }
};

std::int64_t count_items(const Items& items, std::int64_t rows);

/// Throws Error in the name of `op` unless the indices have the shapes they must have.
void check_item_shapes(const char* op, const Items& items, std::int64_t count, std::int32_t experts,
                       std::int64_t rows_in, std::int64_t rows_out);

/// The same, and unless every index lies in its range; indices on the host.
void check_items(const char* op, const Items& items, std::int64_t count, std::int32_t experts,
                 std::int64_t rows_in, std::int64_t rows_out);

}  // namespace lockstep::kernels
