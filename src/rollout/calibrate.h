/// BF16 passes over a named calibration batch, and what they show.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "model/weights.h"
#include "record/agreement.h"
#include "rollout/forward_experts.h"

namespace lockstep::rollout {

struct CalibrationArgs {
  const ModelConfig& model;
  const WeightSource& weights;  // asked once
  std::span<const std::vector<Token>> batch;
  ExpertObserver observer{};              // sees every layer's and site's inputs, pass by pass
  std::vector<float>* kv_amax = nullptr;  // [L, 2] raised to the cache's largest magnitudes
};

/// Throws Error naming the sequence where the batch is none for this model.
void calibrate(const CalibrationArgs& args);

}  // namespace lockstep::rollout
