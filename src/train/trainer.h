/// The QAT trainer. libtorch stays behind this header: who includes it compiles without torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/metrics.h"
#include "device/comm.h"
#include "device/view.h"
#include "model/weights.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "record/trajectory.h"

namespace lockstep::train {

/// Which of the contract's quantizations the trainer imitates; all false is a BF16 trainer.
struct Qat {
  bool weights = false;
  bool activations = false;
  bool k = false;
  bool v = false;
  // The rollout's dense second pass as well, at these sites: x becomes Q(x) + alpha Q(x - Q(x)),
  // rounded to BF16. 0: not imitated.
  float residual_alpha = 0.0f;
  SiteSet residual_sites{};
  /// The forward of the routed experts is the rollout's own exact product of NVFP4 or MXFP4 codes
  /// (QaRL), not a product of their values; the backward is that of the values either way.
  bool real_product = false;
};

enum class Decay : std::uint8_t { kConstant, kLinear, kCosine };

struct Options {
  bool bf16 = true;  // compute; masters and optimizer are FP32 either way
  double lr = 1e-6;
  std::int64_t warmup_updates = 0;
  Decay decay = Decay::kConstant;
  std::int64_t decay_updates = 0;  // at the end of which lr is lr * min_lr_fraction
  double min_lr_fraction = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-15;
  double weight_decay = 0.0;
  double max_grad_norm = 1.0;
  std::int64_t memory_bytes = 0;  // of a CUDA device, all that training takes; 0: what there is
  std::int32_t tokens_per_pass = 8192;  // whole trajectories are packed up to this many
  bool recompute = false;               // activations, in backward; reads the same records
  /// Of records that are on a CUDA device before the pass gets there.
  std::int64_t read_ahead_bytes = std::int64_t{1} << 30;
};

/// The loss of trajectory i as a function of its log-probs, those of its top tokens included where
/// it lists any. Writes dlogp[t] = d loss / d logp[t]. All that the trainer knows of reinforcement
/// learning, or of fine-tuning. A loss of the own tokens alone may take plain spans.
using TokenLoss = std::function<double(std::size_t i, const LogProbs& logp, const Slopes& dlogp)>;

/// The experts that a pass of the trainer's own chose, for another pass to follow (R2).
/// [trajectories][(T - 1) * L * K] by position, layer and slot; an empty row: none.
using Routes = std::vector<std::vector<std::uint16_t>>;

/// Throws Error, one line with the remedy, where `device` has no trainer for that: before anything
/// long starts. Makes torch ready for it otherwise (ops/device.h).
void require_runs(Device device);

class Trainer {
 public:
  /// Throws Error where options.memory_bytes is less than weights, gradients and moments take. What
  /// is left of it is the limit of all that torch takes in this process.
  Trainer(const Agreement& agreement, const Qat& qat, const Options& options, Device device,
          Comm& comm);
  ~Trainer();

  /// log p(tokens[t]) at the trajectory's temperature, in FP32, where response_mask is 1.
  /// Guided by `trace`; nullptr for a reference policy or an evaluation. `chosen` gets the experts.
  PerToken logprobs(std::span<const Trajectory> batch, const TraceSource* trace,
                    Routes* chosen = nullptr) const;

  /// The same, and every token's w13_in, k and v in BF16, from before they are rounded, and its
  /// experts go to `dump` (Encoding::kBf16, kExperts16), where the spans of the paths are open.
  PerToken reveal(std::span<const Trajectory> batch, const TraceSource* trace,
                  TraceSink& dump) const;

  /// Forward and backward of the summed loss; gradients add up until update(). The same forward
  /// as logprobs: with unchanged weights it gives `loss` the same bits. `routes`: the experts that
  /// it takes instead of its own or recorded ones; nullptr, or an empty row: none.
  double accumulate(std::span<const Trajectory> batch, const TraceSource* trace,
                    const TokenLoss& loss, const Routes* routes = nullptr);

  /// Sums gradients over ranks, clips, steps AdamW, clears. Collective.
  void update();

  /// The updates since the last call: mean and largest norm of the gradient, the last learning
  /// rate, and what guidance did in all their passes. Collective.
  Metrics metrics();

  /// Another stage's turn on the device: what torch keeps for later goes back where memory is
  /// short, beside `wanted` bytes of that stage's.
  void rest(std::int64_t wanted = 0);
  /// Bytes of a GPU that options.memory_bytes lets this process take beside what torch keeps now;
  /// -1 without that limit.
  std::int64_t may_take() const;

  const WeightSource& weights() const;  // masters, FP32
  WeightSink& initial_weights();

  /// Weights, optimizer and schedule: all that a step leaves to the next. Collective.
  void save(const std::filesystem::path& folder) const;
  void load(const std::filesystem::path& folder);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::train
