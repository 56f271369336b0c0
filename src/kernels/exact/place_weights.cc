#include "kernels/exact/place_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/crc32c_rows.h"
#include "kernels/exact/place_weights_rows.h"
#include "kernels/exact/quantize_weights_rows.h"

namespace lockstep::kernels {
namespace {

[[noreturn]] void throw_no_placer() {
  throw Error("place_weights: weights must lie on a CUDA device, for which this build has none");
}

std::int64_t units_of(const TensorView<const float, 2>& master) {
  return master.shape[0] * master.shape[1] / kUnitNumbers;
}

/// As many matrices a step as have a warp for each of their units, the largest first.
std::vector<PlaceStep> cut_into_steps(std::span<PlacedMatrix> matrices, std::int64_t most) {
  std::vector<PlaceStep> steps;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    PlacedMatrix& m = matrices[i];
    if (steps.empty() || steps.back().count == kMostOfStep || steps.back().units + m.units > most) {
      steps.push_back({.first = static_cast<std::int32_t>(i)});
    }
    m.first = steps.back().units;
    steps.back().units += m.units;
    ++steps.back().count;
  }
  return steps;
}

}  // namespace

std::int64_t WeightPlacer::most_units() const {
  if constexpr (build::has_cuda) {
    return std::min(std::int64_t{kPlacers} * place_blocks(device_), std::int64_t{1} << kUnitBits);
  }
  return 0;
}

bool WeightPlacer::takes(const Quantizer& rule, const TensorView<const float, 2>& master) const {
  return quantizes_at_once(rule, master) && master.device == device_ && master.shape[0] % 16 == 0 &&
         master.shape[1] % 64 == 0 && master.shape[0] > 0 && master.shape[1] > 0 &&
         units_of(master) <= most_units();
}

/// Tables for a shape, made once.
void WeightPlacer::prepare(std::int32_t out, std::int32_t cols) {
  if constexpr (build::has_cuda) {
    if (cols / 64 > chunks_) {
      chunks_ = cols / 64;
      bits_ = Buffer(device_, 4 * bit_words(chunks_), stream_);
      place_bits_cuda(bits_.as<std::uint32_t>(), chunks_, device_, stream_);
    }
    const auto [found, is_new] = powers_.try_emplace({out, cols});
    if (!is_new) return;
    found->second = Buffer(device_, 8 * std::int64_t{out}, stream_);
    row_powers_cuda(found->second.as<std::uint32_t>(), out, cols, device_, stream_);
  }
}

void WeightPlacer::place(std::span<const PlacedWeight> weights, const Quantizer& rule,
                         WeightSums& sums) {
  if (weights.empty()) return;
  for (const PlacedWeight& weight : weights) {
    const W4a4Weights& to = weight.place;
    if (!takes(rule, weight.master) || to.device != device_ || to.scaled ||
        weight.master.shape != std::array<std::int64_t, 2>{to.out, to.cols}) {
      throw Error(cat({"place_weights: master is [", weight.master.shape[0], ", ",
                       weight.master.shape[1], "], its place [", to.out, ", ", to.cols,
                       "]; expected the same, multiples of 16 and 64, on the placer's CUDA device, "
                       "under a rule that it takes"}));
    }
    prepare(to.out, to.cols);
  }
  if constexpr (build::has_cuda) {
    std::vector<PlacedMatrix> matrices;
    for (const PlacedWeight& weight : weights) {
      const W4a4Weights& to = weight.place;
      matrices.push_back(
          {.master = weight.master.data,
           .expert = to.expert(weight.expert),
           .flips = reinterpret_cast<unsigned long long*>(weight.flips),
           .bad = reinterpret_cast<unsigned long long*>(weight.bad),
           .sum = weight.sum,
           .powers = powers_.at({to.out, to.cols}).as<std::uint32_t>(),
           .sample = weight.sample,
           .sample_step = static_cast<std::int32_t>(weight.sample_step),
           .sample_rows = static_cast<std::int32_t>(sample_rows(to.out, weight.sample_step)),
           .chunks = to.cols / 64,
           .first = 0,
           .units = static_cast<std::int32_t>(units_of(weight.master)),
           .per_chunks = 1.0f / static_cast<float>(to.cols / 64)});
    }
    // Large ones have a step for themselves, small ones share.
    std::ranges::stable_sort(matrices, std::greater{}, &PlacedMatrix::units);
    const std::vector<PlaceStep> steps = cut_into_steps(matrices, most_units());
    const auto matrix_bytes = matrices.size() * sizeof(PlacedMatrix),
               step_bytes = steps.size() * sizeof(PlaceStep);
    std::vector<std::byte> lists(matrix_bytes + step_bytes);
    std::memcpy(lists.data(), matrices.data(), matrix_bytes);
    std::memcpy(lists.data() + matrix_bytes, steps.data(), step_bytes);
    const std::int32_t blocks = place_blocks(device_);
    const std::int64_t seen_bytes = 4 * std::ssize(matrices) * blocks;
    // What the launch before reads goes back to the pool in the order of the stream.
    lists_ = Buffer(device_, std::ssize(lists), stream_);
    seen_ = Buffer(device_, seen_bytes, stream_);
    copy_bytes(lists_.as<void>(), device_, lists.data(), {}, std::ssize(lists), stream_);
    fill_bytes(seen_.as<void>(), device_, 0, seen_bytes, stream_);
    if (sums.parts_ + blocks > kMostParts) sums.fold();
    place_weights_cuda(
        {.matrices = lists_.as<PlacedMatrix>(),
         .steps = reinterpret_cast<const PlaceStep*>(lists_.as<std::byte>() + matrix_bytes),
         .num_steps = static_cast<std::int32_t>(steps.size()),
         .blocks = blocks,
         .per_blocks = 1.0f / static_cast<float>(blocks),
         .seen = seen_.as<std::uint32_t>(),
         .code_bits = bits_.as<std::uint32_t>(),
         .scale_bits = bits_.as<std::uint32_t>() + std::int64_t{chunks_} * 256,
         .rule = rule,
         .parts = sums.sums_.as<double>() + 2 + 2 * sums.parts_},
        device_, stream_);
    sums.parts_ += blocks;
    return;
  }
  throw_no_placer();
}

}  // namespace lockstep::kernels
