/// The end of a block of a layer and the beginning of the next, as one op.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dense/elementwise.h"

namespace lockstep::kernels {

/// Of so few rows the sum over slots is a launch of its own on a CUDA device: its many blocks of
/// threads have a row's outputs sooner than the one that has the norm.
inline constexpr std::int64_t kSlotSumRows = 128;

struct AddNormArgs {
  TensorView<Bf16, 2> x;        // [rows, cols]; what is left in it is not said
  TensorView<Bf16, 2> h;        // [rows, cols] in place
  std::int32_t* bad = nullptr;  // of residual_add()

  // Of combine(), which makes x first; empty: x is there.
  TensorView<const float, 2> outputs{};  // [rows * K, cols]
  TensorView<const float, 2> gates{};    // [rows, K]

  // Of drift_noise(): what is added to x first; sigma 0: nothing.
  float sigma = 0.0f;
  std::uint64_t seed = 0;
  std::span<const std::uint64_t> streams{};
  std::span<const std::int32_t> positions{};
  std::uint32_t site = 0;

  // Of rms_norm() of h afterwards; an empty weight: none.
  std::span<const Bf16> weight{};  // [cols]
  float eps = 1e-6f;
  TensorView<Bf16, 2> y{};        // [rows, cols]
  std::int32_t* bad_y = nullptr;  // of first_nonfinite() of y; nullptr: nobody asks
};

/// combine() into x, drift_noise() of it, residual_add() of it to h, rms_norm() of h and
/// first_nonfinite() of that: the same bits everywhere. On a CUDA device one launch where rows are
/// even and lie at words; with combine() one of more than kSlotSumRows rows that lie at 16 bytes
/// and do not drift, else two. Throws Error naming what is wrong.
void add_norm(const AddNormArgs& args, Stream stream);

}  // namespace lockstep::kernels
