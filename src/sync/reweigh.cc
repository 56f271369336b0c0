#include "sync/reweigh.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/parallel.h"
#include "base/philox.h"
#include "model/names.h"
#include "model/values.h"

namespace lockstep::sync {
namespace {

using Role = WeightId::Role;

/// Sets this noise apart from other draws of a seed.
constexpr std::uint32_t kStream = 0x40000000;
constexpr std::int64_t kGrain = 1 << 14;  // pairs worth a task

Weight weight_of(const WeightId& id, const std::vector<float>& numbers, std::int64_t rows) {
  const auto cols = static_cast<std::int64_t>(numbers.size()) / rows;
  return {id, TensorView<const float, 2>{numbers.data(), {rows, cols}, {cols, 1}}};
}

/// x[i] += size e_i, two draws from four words.
void add_gaussian(std::vector<float>& x, double size, std::uint64_t seed, std::uint32_t weight,
                  WeightVersion version) {
  const auto pairs = static_cast<std::int64_t>((x.size() + 1) / 2);
  parallel_for(pairs, kGrain, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) {
      const PhiloxWords w =
          philox(seed, philox_counter(static_cast<std::uint64_t>(i), weight,
                                      kStream | static_cast<std::uint32_t>(version.value)));
      const double radius = std::sqrt(-2.0 * std::log1p(-unit(w[0], w[1])));
      const double angle = 2.0 * std::numbers::pi * unit(w[2], w[3]);
      const auto at = static_cast<std::size_t>(2 * i);
      x[at] += static_cast<float>(size * radius * std::cos(angle));
      if (at + 1 < x.size()) x[at + 1] += static_cast<float>(size * radius * std::sin(angle));
    }
  });
}

double rms(const std::vector<float>& x) {
  double sum = 0;
  for (const float value : x) sum += static_cast<double>(value) * value;
  return std::sqrt(sum / static_cast<double>(std::max<std::size_t>(x.size(), 1)));
}

bool gets_noise(NoiseOn on, Role role) {
  if (on == NoiseOn::kExperts) return of_expert(role);
  return role == Role::kAttentionNorm || role == Role::kMlpNorm || role == Role::kFinalNorm;
}

}  // namespace

double noise_sigma(const Noise& noise, std::int64_t step, std::int64_t steps) {
  if (noise.start == 0.0) return 0.0;
  const auto fall = [&](double part) {
    return noise.start * std::pow(noise.end / noise.start, part);
  };
  const std::int64_t last = std::max<std::int64_t>(steps - 1, 0);
  const std::int64_t at = std::clamp<std::int64_t>(step, 0, last);
  if (noise.stages == 0) {
    return fall(last > 0 ? static_cast<double>(at) / static_cast<double>(last) : 0.0);
  }
  const std::int64_t stage = at * noise.stages / std::max<std::int64_t>(steps, 1);
  if (stage == 0) return 0.0;
  return fall(noise.stages > 2 ? static_cast<double>(stage - 1) / (noise.stages - 2) : 0.0);
}

void Noised::each(const std::function<void(const Weight&)>& visit) const {
  std::uint32_t index = 0;
  from_.each([&](const Weight& weight) {
    const std::uint32_t own = index++;
    if (sigma_ == 0.0 || !gets_noise(on_, weight.id.role)) return visit(weight);
    std::vector<float> numbers = f32_of(weight);
    const double size = on_ == NoiseOn::kExperts ? sigma_ * rms(numbers) : sigma_;
    add_gaussian(numbers, size, seed_, own, version_);
    visit(weight_of(weight.id, numbers, rows_of(weight)));
  });
}

void Rescaled::each(const std::function<void(const Weight&)>& visit) const {
  from_.each([&](const Weight& weight) {
    const Role role = weight.id.role;
    const bool grows = role == Role::kMlpNorm;
    if (scale_ == 1.0 || (!grows && role != Role::kRouter && role != Role::kGateUp)) {
      return visit(weight);
    }
    std::vector<float> numbers = f32_of(weight);
    for (float& x : numbers) x = static_cast<float>(grows ? x * scale_ : x / scale_);
    visit(weight_of(weight.id, numbers, rows_of(weight)));
  });
}

}  // namespace lockstep::sync
