/// What happens between the products: rows are added, weighted, looked at.
#pragma once

#include <cstdint>
#include <span>

#include "device/view.h"

namespace lockstep::kernels {

/// h = bf16(h + x). Returns the first row that is not finite afterwards, -1 if there is none.
std::int64_t residual_add(TensorView<const Bf16, 2> x, TensorView<Bf16, 2> h);

/// The first row of x that holds a NaN or Inf, -1 if there is none.
std::int64_t first_nonfinite(TensorView<const Bf16, 2> x);

/// The two above, for work that is not waited for: *bad, which lies where x does, becomes the first
/// such row where that is lower than what it holds. Both of the above want x on the CPU.
inline constexpr std::int32_t kNoRow = 0x7FFFFFFF;
void residual_add(TensorView<const Bf16, 2> x, TensorView<Bf16, 2> h, std::int32_t* bad,
                  Stream stream);
void first_nonfinite(TensorView<const Bf16, 2> x, std::int32_t* bad, Stream stream);
void first_nonfinite(TensorView<const float, 2> x, std::int32_t* bad, Stream stream);

struct CombineArgs {
  TensorView<const float, 2> y;      // [rows * K, cols] outputs of the experts, a row's K together
  TensorView<const float, 2> gates;  // [rows, K]
  TensorView<Bf16, 2> out;           // [rows, cols]
};

/// out = sum of gate * y in the order of the slots, in FP32, rounded once.
void combine(const CombineArgs& args, Stream stream);

/// to row i = from row index[i], which lies where they do.
void gather_rows(TensorView<const Bf16, 2> from, std::span<const std::int32_t> index,
                 TensorView<Bf16, 2> to, Stream stream = {});
void gather_rows(TensorView<const std::uint8_t, 2> from, std::span<const std::int32_t> index,
                 TensorView<std::uint8_t, 2> to, Stream stream = {});

struct GatherArgs {
  TensorView<const std::uint8_t, 2> from;
  TensorView<std::uint8_t, 2> to;
};

/// Up to kMostGathers of one index, in one launch.
inline constexpr std::size_t kMostGathers = 48;
void gather_rows(std::span<const GatherArgs> all, std::span<const std::int32_t> index,
                 Stream stream);

struct DriftNoiseArgs {
  TensorView<Bf16, 2> x;  // [rows, cols] in place
  float sigma = 0.0f;
  std::uint64_t seed = 0;
  std::span<const std::uint64_t> streams;   // [rows] with `positions`, what names a row
  std::span<const std::int32_t> positions;  // [rows]
  std::uint32_t site = 0;                   // below 2^16
};

/// x = bf16(x + sigma / sqrt(2) * (rms(x) * e1 + x * e2)): the declared drift of a study. e1 and e2
/// are Gaussian, by Box-Muller from Philox4x32-10 with `seed` as key and counter (stream, position,
/// site * 2^16 + element / 2): words 0 and 1 for the even element, 2 and 3 for the odd one. A row's
/// noise depends on its name alone, and is the same bits on every device. Throws Error naming what
/// is wrong.
void drift_noise(const DriftNoiseArgs& args, Stream stream);

}  // namespace lockstep::kernels
