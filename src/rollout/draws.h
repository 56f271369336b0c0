/// From logits to tokens and log-probs, for all rows of a pass that lead to some.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.h"
#include "kernels/dense/sample.h"
#include "rollout/sampler.h"
#include "rollout/sequence.h"
#include "rollout/upload.h"

namespace lockstep::rollout {

/// A row of logits and who waits for it.
struct Wanted {
  Sequence* sequence = nullptr;
  std::int32_t position = 0;
  std::size_t first_choice = 0;  // of one a fork, else of one
  std::size_t first_top = 0;     // of as many top tokens as its sampling asks for

  std::size_t forks() const { return static_cast<std::size_t>(std::max(sequence->forks, 1)); }
  std::size_t top() const {
    if (sequence->kind == Sequence::Kind::kScored) return 0;
    return static_cast<std::size_t>(sequence->trajectory.sampling.top_logprobs);
  }
};

/// What rows of logits lead to.
struct Drawn {
  std::vector<Choice> choices{};
  std::vector<Token> top_tokens{};
  std::vector<float> top_logp{};
};

/// On a CUDA device tokens are drawn there, the likeliest (top_k = 1) too; rows that are filtered
/// otherwise (top-p, top-k) or leave their likeliest tokens come to the host, where Distribution
/// has them.
class Draws {
 public:
  explicit Draws(Workplace& at) : at_(&at), upload_(at), results_(at), workspace_(at) {}

  /// Gives the work to the device; on a CPU there is none. `wanted` by rows of `logits`.
  void launch(std::span<const Wanted> wanted, TensorView<const float, 2> logits);

  /// The results, once what launch() gave is done.
  Drawn take(std::span<const Wanted> wanted, TensorView<const float, 2> logits);

 private:
  void prepare(std::span<const Wanted> wanted);

  Workplace* at_;
  Upload upload_;
  Room results_, workspace_;
  PinnedBuffer fetched_, rows_;  // tokens, then log-probs; rows of logits
  // Of each draw on the device.
  std::vector<std::int32_t> row_, given_;
  std::vector<float> temperatures_;
  std::vector<std::uint64_t> seeds_;
  std::vector<kernels::SampleName> names_;
  std::vector<std::size_t> choices_;
  std::vector<std::size_t> on_host_;  // of wanted
};

}  // namespace lockstep::rollout
