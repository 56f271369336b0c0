/// Products of many rows with one matrix a group, of BF16 operands with FP32 sums: the prefill of
/// the experts over BF16 copies, which hold codes times scales exactly.
#pragma once

#include <cstdint>

#include "device/view.h"

namespace lockstep::kernels {

struct GroupedProductArgs {
  TensorView<const Bf16, 2> x{};                // [items, K], the items of a group together
  TensorView<const Bf16, 3> w{};                // [groups, out, K], contiguous
  TensorView<const std::int32_t, 1> offsets{};  // [groups + 1] where each group's items begin
  TensorView<const std::int32_t, 1> to{};       // [items] rows of y, each once; empty: i itself
  TensorView<float, 2> y{};                     // [items, out]
};

/// y[to[i]] = x[i] . w[group of i]. Each sum depends on its row and its matrix alone, in one fixed
/// order over K: not on how many rows there are or where they stand. Equal to the exact sum
/// wherever sum |x w| is below 2^24 times the smallest unit of a product; else the error is at most
/// (K / 8 + 1) 2^-23 sum |x w|.
///
/// On a CUDA device offsets and to lie there and are not looked at; K is a multiple of 8, x and w
/// are aligned to 16 bytes. Throws Error naming the argument.
void grouped_product(const GroupedProductArgs& args, Stream stream = {});

}  // namespace lockstep::kernels
