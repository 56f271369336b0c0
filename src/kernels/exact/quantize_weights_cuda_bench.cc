#include <vector>

#include "device/cuda/bench.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/crc32c.h"
#include "kernels/exact/quantize_weights.h"

namespace lockstep {
namespace {

using cuda::Bench;
using namespace kernels;

struct Shape {
  std::int32_t out, cols;
};
constexpr Shape kShapes[] = {{1536, 2048}, {2048, 768}};

/// Masters of some experts of Qwen3-30B-A3B in turn, gate and up, down, gate and up, down; their
/// codes, their places and what is counted.
struct Set {
  Set(const Bench& bench, std::int64_t count, std::uint64_t seed) {
    const Device device = bench.device();
    const auto keep = [&](Buffer buffer) -> const Buffer& {
      return memory.emplace_back(std::move(buffer));
    };
    amax = Buffer(device, 4 * count);
    bad = Buffer(device, 8 * count);
    flips = Buffer(device, 8 * kNumFlipCounts);
    fill_bytes(amax.as<void>(), device, 0, amax.bytes(), bench.stream());
    fill_bytes(bad.as<void>(), device, 0xFF, bad.bytes(), bench.stream());
    for (std::int64_t i = 0; i < count; ++i) {
      const auto [out, cols] = kShapes[i % 2];
      const std::int64_t size = std::int64_t{out} * cols;
      // BF16 pairs pass for FP32 numbers of the upper one's size.
      const float* master =
          keep(bench.normal_bf16(2 * size, seed + static_cast<std::uint64_t>(i))).as<float>();
      const PackedView<std::uint8_t> codes = {
          {keep(Buffer(device, size / 2)).as<std::uint8_t>(),
           {out, cols / 2},
           {cols / 2, 1},
           device},
          {keep(Buffer(device, size / 16)).as<std::uint8_t>(),
           {out, cols / 16},
           {cols / 16, 1},
           device},
          {keep(Buffer(device, 4)).as<float>(), {out}, {0}, device}};
      weights.push_back({{master, {out, cols}, {cols, 1}, device},
                         codes,
                         amax.as<std::uint32_t>() + i,
                         bad.as<std::uint64_t>() + i});
      const W4a4Weights place = {keep(Buffer(device, W4a4Weights::expert_bytes(out, cols))).as<>(),
                                 1, out, cols, device};
      replaced.push_back({codes, place, 0, flips.as<std::int64_t>()});
      numbers += static_cast<double>(size);
    }
  }

  std::vector<Buffer> memory;
  Buffer amax, bad, flips;
  std::vector<WeightOnItsWay> weights;
  std::vector<Replaced> replaced;
  double numbers = 0;
};

void run(Bench& bench) {
  const Quantizer rule = {.element = Element::kE2m1,
                          .scale = ScaleFormat::kE4m3,
                          .global = GlobalScale::kPerTensor,
                          .global_is_power_of_two = true};
  std::vector<Set> sets;
  for (std::uint64_t i = 0; i < 6; ++i) sets.emplace_back(bench, kMostWeights, 100 * i);
  WeightSums sums(bench.device(), bench.stream());
  bench.run({.name = "masters to codes",
             .size = "4 experts' weights",
             .bytes = sets[0].numbers * 4.5625,
             .sets = 6,
             .launch = [&](int set, Stream) {
               quantize_weights(sets[static_cast<std::size_t>(set)].weights, rule, sums);
             }});
  std::vector<Set> more;
  for (std::uint64_t i = 0; i < 6; ++i) more.emplace_back(bench, kMostReplaced, 1000 + 100 * i);
  for (const Set& set : more) {
    for (std::size_t i = 0; i < set.weights.size(); i += kMostWeights) {
      quantize_weights(std::span(set.weights).subspan(i, kMostWeights), rule, sums);
    }
  }
  bench.run({.name = "codes to tiles, flips counted",
             .size = "16 experts' weights",
             .bytes = more[0].numbers * 0.5625 * 3,
             .sets = 6,
             .launch = [&](int set, Stream stream) {
               w4a4_replace(more[static_cast<std::size_t>(set)].replaced, stream);
             }});
  std::vector<Crc32cList> lists;
  for (const Set& set : more) {
    Crc32cList& list = lists.emplace_back(bench.device(), bench.stream());
    for (const Replaced& one : set.replaced) list.add({one.now.codes, one.now.scales});
  }
  const Buffer crcs(bench.device(), 4 * kMostReplaced);
  for (Crc32cList& list : lists) list.launch(crcs.as<std::uint32_t>(), bench.stream());
  bench.run({.name = "crc32c of codes",
             .size = "16 experts' weights",
             .bytes = more[0].numbers * 0.5625,
             .floor = cuda::Floor::kRead,
             .sets = 6,
             .launch = [&](int set, Stream stream) {
               lists[static_cast<std::size_t>(set)].launch(crcs.as<std::uint32_t>(), stream);
             }});
}

const cuda::BenchEntry kEntry("quantize_weights", run);

}  // namespace
}  // namespace lockstep
