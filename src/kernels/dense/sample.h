/// Tokens and their log-probs from logits on a CUDA device. On the CPU it is rollout/sampler.h,
/// whose rule this is.
#pragma once

#include <cstdint>
#include <span>

#include "device/view.h"

namespace lockstep::kernels {

/// Names the random number of a row: the counter of Philox4x32-10, a prompt's number in `a`, a
/// position in `b` and what sets samples apart in `c`.
struct SampleName {
  std::uint64_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t c = 0;
};

/// Among given tokens: the likeliest, of equal ones the lowest.
inline constexpr std::int32_t kLikeliest = -2;

struct SampleArgs {
  TensorView<const float, 2> logits;       // [rows, V]
  std::span<const std::int32_t> rows{};    // [draws] of logits, of each; empty: draw i is of row i
  std::span<const float> temperatures;     // [draws]
  std::uint64_t seed = 0;                  // key of the generator
  std::span<const std::uint64_t> seeds{};  // [draws] instead, where each has its own
  std::span<const SampleName> names{};     // [draws]
  std::span<const std::int32_t> given{};   // [draws] the token, or kLikeliest; -1: it is drawn
  std::span<std::int32_t> tokens;          // [draws]
  std::span<float> logps;                  // [draws] log softmax(logits / temperature)[token]
  std::span<std::byte> workspace;          // sample_workspace() bytes
};

std::int64_t sample_workspace(std::int64_t draws, std::int64_t vocabulary);

/// Draws tokens from softmax(logits / temperature) of the rows, in the CPU's order: exps and their
/// sums in FP32 over 16 lanes of blocks of 128, blocks summed in double one after another, and the
/// smallest token whose sum exceeds the draw. So the token is the CPU's, and the log-prob too but
/// for an ulp of a double's logarithm before its rounding. A draw depends on nothing else.
/// A row with a NaN gives token -1 and log-prob NaN. All spans lie on the logits' device, which is
/// a CUDA device, and are not looked at. Throws Error naming what is wrong.
void sample(const SampleArgs& args, Stream stream);

}  // namespace lockstep::kernels
