#pragma once

#include <functional>
#include <memory>
#include <span>

#include "base/metrics.h"
#include "device/view.h"
#include "kernels/dense/paged_kv.h"
#include "model/weights.h"
#include "record/agreement.h"
#include "rollout/engine.h"
#include "rollout/pass.h"

namespace lockstep::rollout {

class Capture;
struct ExpertInputs;

/// K and V of a layer in the cache.
struct LayerKv {
  kernels::PagedKv k;
  kernels::PagedKv v;
};

/// The model as the rollout computes it: inference layers over packed weights.
class Forward {
 public:
  /// On a CUDA device all work is given to `stream`. Throws Error naming what of agreement and
  /// options the device has no kernel for.
  Forward(const Agreement& agreement, const Options& options, Device device, Stream stream = {});
  ~Forward();

  /// Writes K and V of the pass's rows into the cache, then attends; returns FP32 logits
  /// [pass.wanted, V] on the device, valid until the next call. Throws Error with layer and token
  /// where a non-finite number appears. `cache` has one entry a layer.
  ///
  /// On a CUDA device the work is given and not waited for: finish() does that, and throws what is
  /// thrown here on a CPU. Before it nothing of the pass may be believed.
  TensorView<const float, 2> run(const Pass& pass, std::span<const LayerKv> cache,
                                 Capture& capture);
  void finish();

  /// After run(), in place of finish() or behind it: the pass failed elsewhere. Waits for what was
  /// given, for its memory may be used again then; what quantization met in it is forgotten, for it
  /// will be met again. What fails in this is not told: something else did before.
  void abandon() noexcept;

  /// The last pass that finish() ended will be read again: what it met is forgotten too. Waits.
  void take_back() noexcept;

  /// Passes that were one call to the device, since the last call of this.
  std::int64_t take_replays();

  /// Codes and BF16 weights, written in place, laid out for the kernels. commit() answers with the
  /// CRC32C of each weight as it was put: codes, then scales, then global scale bytes; or BF16.
  WeightSink& weights();

  /// Shows what the experts read at every layer and site from now on: for calibration, on a CPU.
  void observe(std::function<void(const ExpertInputs&)> observer);

  /// What quantization met since the last call: fp4/scale/{zero,underflow}_frac of all blocks of
  /// activations, K and V; fp4/scale/sat_frac of those of K and V; fp4/scale/top_err
  /// (TopError) of activations; fp4/mx/act/* (kernels::MxError) of a sample of them under
  /// MXFP4. Empty where none were quantized. On a CUDA device, which it waits for, without the last
  /// two, and where the experts are one op (ForwardExperts) without the blocks of w2_in; rows that
  /// fill a pass up count.
  Metrics metrics();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::rollout
