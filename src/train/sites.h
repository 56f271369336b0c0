/// What a pass does at the places where rollout and trainer must agree: it rounds as the arm says,
/// toward the records where they are followed, and routes as the rollout routed.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/experts.h"
#include "ops/torch.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "train/pack.h"
#include "train/tally.h"
#include "train/trainer.h"

namespace lockstep::train {

/// One pass. Reads each place's records once a call; the calls of a recomputation read the same.
class Sites {
 public:
  /// `trace` may be nullptr: nothing is followed. `tally` may be nullptr: nothing is counted.
  Sites(const Agreement& agreement, const Qat& qat, const Pack& pack, const TraceSource* trace,
        Tally* tally);

  /// The routed experts' shared input.   [T, D]
  at::Tensor w13_in(Layer layer, const at::Tensor& x) const;

  /// What the experts of a layer do to the inputs of their down projections; empty: nothing.
  ops::SlotRounding w2_in(Layer layer) const;

  /// K after norm and rotation, or V.   [T, N * C]
  at::Tensor kv(Place place, const at::Tensor& x) const;

  /// The experts of each token, in their order: the recorded ones, or those that the trainer's own
  /// router prefers.   p [T, E] -> int64 [T, K]
  at::Tensor experts(Layer layer, const at::Tensor& p) const;

 private:
  struct Read {
    RowLayout layout;
    std::vector<std::uint8_t> bytes;    // [rows, layout.bytes()]
    std::vector<std::uint8_t> present;  // [rows]
  };
  Read read(Place place, Encoding encoding) const;

  const Agreement& agreement_;
  const Qat& qat_;
  const Pack& pack_;
  const TraceSource* trace_;
  Tally* tally_;
};

}  // namespace lockstep::train
