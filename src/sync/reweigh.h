/// Weights that are changed on their way. Each wraps a source, which keeps its own numbers: what is
/// added once is not there the next time.
#pragma once

#include <cstdint>
#include <vector>

#include "model/weights.h"
#include "sync/options.h"

namespace lockstep::sync {

/// Sigma of the weights with which step `step` of `steps` rolls out.
double noise_sigma(const Noise& noise, std::int64_t step, std::int64_t steps);

/// `from` with Gaussian noise that follows from (seed, version, weight, element) alone.
/// Yields FP32. each() throws Error where `from` yields codes.
class Noised final : public WeightSource {
 public:
  Noised(const WeightSource& from, NoiseOn on, double sigma, std::uint64_t seed,
         WeightVersion version)
      : from_(from), on_(on), sigma_(sigma), seed_(seed), version_(version) {}
  void each(const std::function<void(const Weight&)>& visit) const override;

 private:
  const WeightSource& from_;
  NoiseOn on_;
  double sigma_;
  std::uint64_t seed_;
  WeightVersion version_;
};

/// `from` with gate, up and router divided by `scale` and the norm that feeds them multiplied by
/// it. Yields FP32 for these, so that masters keep the function to FP32's precision. each() throws
/// Error where `from` yields codes.
class Rescaled final : public WeightSource {
 public:
  Rescaled(const WeightSource& from, double scale) : from_(from), scale_(scale) {}
  void each(const std::function<void(const Weight&)>& visit) const override;

 private:
  const WeightSource& from_;
  double scale_;
};

}  // namespace lockstep::sync
