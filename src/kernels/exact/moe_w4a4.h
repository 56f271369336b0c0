/// The routed experts of a layer in one op: W13, SwiGLU, quantization, W2 and combination.
#pragma once

#include <cstdint>

#include "device/memory.h"
#include "device/view.h"
#include "kernels/exact/w4a4.h"

namespace lockstep::kernels {

struct MoeW4a4Args {
  PackedView<const std::uint8_t> a;             // [rows, D] codes, under one power of two a token
  W4a4Weights gate_up;                          // experts of [2F, D], gate over up
  W4a4Weights down;                             // experts of [D, F]
  TensorView<const std::int32_t, 1> offsets{};  // [experts + 1] where each expert's items begin
  TensorView<const std::int32_t, 1> rows_of{};  // [rows * K] the row of each item
  TensorView<const std::int32_t, 1>
      slots_of{};                      // [rows * K] row * K + slot of each item, each once
  TensorView<const float, 2> gates{};  // [rows, K]
  TensorView<float, 2> up{};           // [rows * K, 2F] outputs of W13, by slot
  // [rows * K, F] codes of W2's operand, by slot: what a record of it is made of.
  PackedView<std::uint8_t> w2_in{};
  TensorView<float, 2> y{};   // [rows * K, D] outputs of W2, by slot
  TensorView<Bf16, 2> out{};  // [rows, D]; empty: whoever reads y adds the slots up (add_norm())
  // Becomes the first row with an operand of W2 that is not finite, where that is lower than what
  // it holds; nullptr: nobody asks.
  std::int32_t* bad = nullptr;
  // offsets, rows_of and slots_of were written before the launch that precedes this op, which waits
  // for them: they may be read while that one runs.
  bool settled = false;
};

/// up, w2_in, y and out as w4a4(), swiglu(), quantize() under one power of two a slot, w4a4() and
/// combine() give them one after another, in every bit. Of a slot that is not finite codes and
/// scale bytes are 0. On a CUDA device four launches, or three, none of which depends on how many
/// rows there are or where they stand; F at most kMoeMostWidth. Throws Error naming the argument;
/// weights must not be `scaled`.
void moe_w4a4(const MoeW4a4Args& args, Stream stream = {});

inline constexpr std::int64_t kMoeMostWidth = 4096;

}  // namespace lockstep::kernels
