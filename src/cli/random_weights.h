#pragma once

#include <cstdint>

#include "model/weights.h"

namespace lockstep::cli {

/// The weights that a new model begins with: norms are one, all else is normal with `std`, the
/// outputs of blocks over the square root of their number. What each is follows from the seed and
/// the weight's id alone.
class RandomWeights : public WeightSource {
 public:
  RandomWeights(const ModelConfig& model, float std, std::uint64_t seed)
      : model_(model), std_(std), seed_(seed) {}
  void each(const std::function<void(const Weight&)>& visit) const override;

 private:
  ModelConfig model_;
  float std_;
  std::uint64_t seed_;
};

}  // namespace lockstep::cli
