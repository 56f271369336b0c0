/// Residual compensation (QUADS): the rollout multiplies Q(X) - Q'(Q(X) - X), where Q' quantizes
/// the residual of chosen channels. methods.md's Eq. 20 and 21: the error is quantized minus true,
/// so it is subtracted; w4a4() does that in one sum.
#pragma once

#include <vector>

#include "device/view.h"
#include "kernels/exact/isa.h"

namespace lockstep::kernels {

/// How the channels are chosen, as groups of 16 that share a scale.
enum class ResidualChoice : std::uint8_t {
  kPerToken,  // each row its own: batch-invariant
  kBatch,     // one choice for all rows of the call, by the sum of their scores: the paper's
  kStatic,    // `chosen`, from a calibration batch: part of the contract's id
};

struct ResidualArgs {
  TensorView<const Bf16, 2> x{};       // [rows, cols]
  PackedView<const std::uint8_t> q{};  // of x, NVFP4 under a power-of-two scale a row
  ResidualChoice choice = ResidualChoice::kPerToken;
  std::int32_t per_mille = 500;                // of the groups that are compensated, rounded up
  TensorView<const std::uint8_t, 1> chosen{};  // kStatic: [cols / 16], 0 or 1
  // Codes and scales of the residual under 2^(n - 2), n the row's; zeros in groups not chosen.
  // `global` may be empty.
  PackedView<std::uint8_t> out{};
};

/// Quantizes the residuals. A group's score is the sum over its elements, in their order, of
/// (r * 2^-n)^2, every step rounded to FP32; the largest ceil(per_mille * groups / 1000) are
/// chosen, ties to the lower index. Rows that hold NaN or Inf have no residual. Bit-exact. Throws
/// Error naming the argument.
void residual(const ResidualArgs& args, Stream stream = {});
void residual_on(const ResidualArgs& args, Isa isa);

/// The choice that kBatch makes for these rows, for kStatic to keep: 1 where a group is chosen.
std::vector<std::uint8_t> residual_groups(const ResidualArgs& args);

}  // namespace lockstep::kernels
