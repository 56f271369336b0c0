/// From a layer's normed rows to the items of its experts.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dense/linear.h"

namespace lockstep::kernels {

struct RouteArgs {
  TensorView<const Bf16, 2> x;  // [rows, in]
  PackedMatrix weight;          // [E, in]
  bool split_k = false;         // of linear_bf16()
  bool settled = false;         // of linear_bf16()
  bool normalize = true;        // of router()
  // [rows, E] scratch: what is left in it is not said.
  TensorView<float, 2> logits;
  TensorView<std::int32_t, 2> experts;  // [rows, K]
  TensorView<float, 2> gates;           // [rows, K]
  std::span<std::int32_t> offsets;      // [E + 1]
  std::span<std::int32_t> row_of;       // [rows * K]
  std::span<std::int32_t> slot_of;      // [rows * K]
};

/// linear_bf16(), router() and dispatch(): the same bits. On Hopper one launch for up to 64 rows of
/// up to 128 experts, 16 of them a token, where `in` is a multiple of 256 and a cluster of eight
/// blocks has room. Throws Error naming what is wrong.
void route(const RouteArgs& args, Stream stream);

}  // namespace lockstep::kernels
