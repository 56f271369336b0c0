/// Products of many rows with one matrix a group, of BF16 operands with FP32 sums: the prefill of
/// the experts over BF16 copies, which hold codes times scales exactly.
#pragma once

#include <cstdint>

#include "device/view.h"

namespace lockstep::kernels {

struct GroupedProductArgs {
  TensorView<const Bf16, 2> x{};                // [items, K], the items of a group together
  TensorView<const Bf16, 3> w{};                // [groups, out, K], contiguous
  bool turned = false;                          // w is [groups, K, out]
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
/// are aligned to 16 bytes, and so are rows of a turned w, of which, where K is no multiple of 64,
/// the next group's first rows are multiplied by zero: one that is not finite may spoil these sums.
/// Throws Error naming the argument.
void grouped_product(const GroupedProductArgs& args, Stream stream = {});

struct GroupedSumsArgs {
  TensorView<const Bf16, 2> a{};                // [items, rows], the items of a group together
  TensorView<const Bf16, 2> b{};                // [items, cols]
  TensorView<const std::int32_t, 1> offsets{};  // [groups + 1]
  TensorView<float, 3> sum{};                   // [groups, rows, cols], contiguous
};

/// sum[g] += a[i]^T b[i] over the items i of g: the gradient of w. What is added is summed in FP32
/// in the order of the items, with the bound above for as many items as K, and added once.
///
/// On a CUDA device rows and cols are multiples of 8, a and b aligned to 16 bytes; numbers of
/// other groups' items are multiplied by zero, so that one which is not finite may spoil several
/// groups. Throws Error naming the argument.
void grouped_sums(const GroupedSumsArgs& args, Stream stream = {});

}  // namespace lockstep::kernels
