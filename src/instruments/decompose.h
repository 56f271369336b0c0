/// Where the gap comes from: one trajectory set, scored by rollout and trainer with one part of the
/// low precision switched on at a time, on both sides.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "model/weights.h"
#include "record/agreement.h"
#include "record/trajectory.h"
#include "rollout/engine.h"
#include "train/trainer.h"

namespace lockstep::instruments {

/// What is on. Whatever else the contract quantizes is BF16 in rollout and trainer; of what is on,
/// the trainer imitates and follows what its arm does. A second pass over residuals and QaRL's
/// product have codes on both sides, so they are on where weights and activations both are.
enum class Part : std::uint8_t {
  kEngine,   // nothing: two BF16 engines, with the declared drift
  kRouting,  // nothing, and the trainer routes by itself
  kWeights,
  kActivations,  // w13_in and w2_in
  kExperts,      // weights and activations
  kK,
  kV,
  kKv,
  kAll,
};
inline constexpr Part kParts[] = {Part::kEngine,      Part::kRouting, Part::kWeights,
                                  Part::kActivations, Part::kExperts, Part::kK,
                                  Part::kV,           Part::kKv,      Part::kAll};
constexpr const char* name_of(Part part) {
  switch (part) {
    case Part::kEngine: return "engine";
    case Part::kRouting: return "routing";
    case Part::kWeights: return "weights";
    case Part::kActivations: return "activations";
    case Part::kExperts: return "experts";
    case Part::kK: return "k";
    case Part::kV: return "v";
    case Part::kKv: return "kv";
    case Part::kAll: return "all";
  }
  return "";
}

/// |log-prob of the trainer - of the rollout| over chosen tokens.
struct PartGap {
  Part part{};
  std::int32_t layer = -1;  // the only one that is quantized; -1: all of the contract's
  bool there = false;       // false: `why` says why not
  double mean = 0, median = 0, p99 = 0, largest = 0;
  double tokens = 0;
  std::string why{};
};

struct DecomposeArgs {
  const Agreement& agreement;
  const train::Qat& qat;
  const rollout::Options& rollout;
  const train::Options& trainer;
  const WeightSource& weights;
  std::span<const Trajectory> batch{};  // both sides read these tokens anew
  bool by_layer = false;                // also weights, activations, k and v, a layer at a time
  Device device{};
};

/// The agreement and the trainer's arm with only `part` on, in `layers`.
struct Restricted {
  Agreement agreement;
  train::Qat qat;
  rollout::Options rollout;
};
Restricted restricted(const DecomposeArgs& args, Part part, const LayerSet& layers);

/// Every part that the contract has, then layer by layer. Calls `each` as soon as one is known.
std::vector<PartGap> decompose(const DecomposeArgs& args,
                               const std::function<void(const PartGap&)>& each);

/// fp4/decomposition/PART and fp4/decomposition_layer/PART/layer_N, the means.
Metrics metrics_of(std::span<const PartGap> gaps);

}  // namespace lockstep::instruments
