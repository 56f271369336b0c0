/// Residual compensation (QUADS): the rollout multiplies Q(X) - Q'(Q(X) - X), where Q' quantizes
/// the residual of chosen channels. The error is quantized minus true (docs/methods.md, QUADS),
/// so it is subtracted; w4a4() does that in one sum.
#pragma once

#include <vector>

#include "device/view.h"
#include "kernels/exact/isa.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

/// How the channels are chosen, as groups of 16 that share a scale.
enum class ResidualChoice : std::uint8_t {
  kPerToken,  // each row its own: batch-invariant
  kBatch,     // one choice for all rows of the call, by the sum of their scores: the paper's
  kStatic,    // `chosen`, from a calibration batch: part of the contract's id
};

/// What can be chosen, and kept of a quantized residual.
enum class ResidualPattern : std::uint8_t {
  kChannels,   // groups of 16 channels, which share a scale
  kBlocks,     // 64 channels of a row; of 32 rows under kBatch
  kTwoOfFour,  // of every four elements the two with the larger residuals, ties to the lower index;
               // `choice` and `per_mille` are not read
};

struct ResidualArgs {
  TensorView<const Bf16, 2> x{};       // [rows, cols]
  PackedView<const std::uint8_t> q{};  // of x, NVFP4 under a power-of-two scale a row
  ResidualPattern pattern = ResidualPattern::kChannels;
  ResidualChoice choice = ResidualChoice::kPerToken;
  std::int32_t per_mille = 500;                // of the groups or blocks, rounded up
  TensorView<const std::uint8_t, 1> chosen{};  // kStatic: [cols / 16], 0 or 1
  // Codes and scales of the residual under 2^(n - 2), n the row's; zeros in groups not chosen.
  // `global` may be empty.
  PackedView<std::uint8_t> out{};
  // [residual_workspace(args)] On a CUDA device under kBatch; where it is empty memory comes from
  // the device's pool.
  TensorView<float, 1> workspace{};
};

/// Quantizes the residuals. A group's score is the sum over its elements, in their order, of
/// (r * 2^-n)^2, every step rounded to FP32; the largest ceil(per_mille * groups / 1000) are
/// chosen, ties to the lower index. A block's score is its groups' scores added in their order,
/// over its rows in theirs. Choosing before or after quantization is the same: what shares a scale
/// is chosen together, or with its largest element. Rows that hold NaN or Inf have no residual.
/// Bit-exact. Throws Error naming the argument; that q's scales are powers of two is not looked at
/// on a CUDA device.
void residual(const ResidualArgs& args, Stream stream = {});
void residual_on(const ResidualArgs& args, Isa isa);

/// The dense second pass under another rule than NVFP4's, MXFP4 in macro blocks or not: codes of
/// x - Q(x), true minus quantized, which `rule` quantizes as it did x; `q` holds Q(x). Their values
/// are added, alpha times. `rest` [rows, cols] is room that a CUDA device needs, where macro blocks
/// are refused. Bit-exact.
void residual_of(TensorView<const Bf16, 2> x, const Quantizer& rule,
                 const PackedView<const std::uint8_t>& q, const PackedView<std::uint8_t>& out,
                 TensorView<float, 2> rest = {}, Stream stream = {});

/// out = Q(x) + alpha * Q(x - Q(x)) of such codes, in FP32, rounded to BF16. Devices as above.
void add_residual(const PackedView<const std::uint8_t>& q,
                  const PackedView<const std::uint8_t>& rest, const Quantizer& rule, float alpha,
                  TensorView<Bf16, 2> out, Stream stream = {});

/// y += alpha * x, an FP32 product and an FP32 sum: the second pass's product to the first's. Rows
/// follow each other. Bit-exact.
void add_product(TensorView<const float, 2> x, float alpha, TensorView<float, 2> y,
                 Stream stream = {});

/// Numbers of its workspace.
std::int64_t residual_workspace(const ResidualArgs& args);

/// On a CPU: the sum of the rows' scores of each group of 16, [cols / 16]; `out` is not read.
std::vector<float> residual_scores(const ResidualArgs& args);

/// The largest of such sums, for kStatic to keep: 1 where a group is chosen.
std::vector<std::uint8_t> choose_groups(const std::vector<float>& scores, ResidualPattern pattern,
                                        std::int32_t per_mille);

}  // namespace lockstep::kernels
