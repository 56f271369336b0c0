#include "rollout/weight_flips.h"

#include <cstdlib>
#include <string>

namespace lockstep::rollout {
namespace {

/// A code's place on the signed grid.
constexpr int place(std::uint32_t code) {
  const auto magnitude = static_cast<int>(code & 7u);
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

void put(Metrics& metrics, const std::string& name, std::int64_t part, std::int64_t whole) {
  if (whole > 0) metrics[name] = static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

void WeightFlips::add_codes(std::span<const std::uint8_t> before,
                            std::span<const std::uint8_t> now) {
  codes += 2 * std::ssize(now);
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (before[i] == now[i]) continue;
    for (const int shift : {0, 4}) {
      const int steps = std::abs(place(before[i] >> shift & 15u) - place(now[i] >> shift & 15u));
      flips += steps != 0;
      adjacent += steps == 1;
    }
  }
}

void WeightFlips::add_scales(std::span<const std::uint8_t> before,
                             std::span<const std::uint8_t> now) {
  blocks += std::ssize(now);
  for (std::size_t i = 0; i < now.size(); ++i) scale_flips += before[i] != now[i];
}

void WeightFlips::add_values(std::span<const std::uint16_t> before,
                             std::span<const std::uint16_t> now) {
  values += std::ssize(now);
  for (std::size_t i = 0; i < now.size(); ++i) {
    value_flips += before[i] != now[i] && ((before[i] | now[i]) & 0x7FFF) != 0;
  }
}

Metrics metrics(std::span<const WeightFlips> layers) {
  Metrics metrics;
  WeightFlips all;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const WeightFlips& layer = layers[l];
    const std::string suffix = "/layer_" + std::to_string(l);
    put(metrics, "fp4/weight/flip_frac" + suffix, layer.flips, layer.codes);
    put(metrics, "fp4/weight/value_flip_frac" + suffix, layer.value_flips, layer.values);
    all.codes += layer.codes;
    all.flips += layer.flips;
    all.adjacent += layer.adjacent;
    all.blocks += layer.blocks;
    all.scale_flips += layer.scale_flips;
    all.values += layer.values;
    all.value_flips += layer.value_flips;
  }
  put(metrics, "fp4/weight/flip_frac", all.flips, all.codes);
  put(metrics, "fp4/weight/adjacent_frac", all.adjacent, all.flips);
  put(metrics, "fp4/weight/scale_flip_frac", all.scale_flips, all.blocks);
  put(metrics, "fp4/weight/value_flip_frac", all.value_flips, all.values);
  return metrics;
}

}  // namespace lockstep::rollout
