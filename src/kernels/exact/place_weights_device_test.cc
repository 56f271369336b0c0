/// Weights placed in one launch: the tiles, flips, checksums and errors of taking them step by
/// step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "device/testing.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/crc32c.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/place_weights.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

Quantizer placed_rule(std::int32_t denominator) {
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  rule.denominator = denominator;
  return rule;
}

struct Shape {
  std::int32_t out, cols;
};

std::vector<float> numbers_of(Shape shape, std::uint64_t seed, bool moved) {
  std::vector<float> values;
  const auto count = static_cast<std::uint64_t>(shape.out) * static_cast<std::uint64_t>(shape.cols);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (std::uint64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto word = static_cast<std::uint32_t>(state >> 32);
    const float x = static_cast<float>(word) / 2147483648.0f - 1.0f;
    const int scale = static_cast<int>((i / 16 * 7 + seed) % 9) - 4;
    float value = word % 31 == 0 ? 0.0f : std::ldexp(x, scale);
    if (moved && i % 3 == 0) value *= 1.3f;
    values.push_back(value);
  }
  // Powers of two far away, and a matrix of zeros.
  if (seed % 5 == 3) {
    for (float& x : values) x = std::ldexp(x, 118);
  }
  if (seed % 5 == 2) std::fill(values.begin(), values.end(), 0.0f);
  return values;
}

/// Weights of one expert each, placed at once and one by one.
class BothWays {
 public:
  BothWays(Device device, const Quantizer& rule, const std::vector<Shape>& shapes)
      : device_(device), rule_(rule), shapes_(shapes), counts_(zeros(2 * kNumFlipCounts)) {
    for (const Shape& shape : shapes) {
      for (auto* all : {&tiles_, &other_}) {
        all->emplace_back(device, W4a4Weights::expert_bytes(shape.out, shape.cols));
        fill_bytes(all->back().as<void>(), device, 0, all->back().bytes());
      }
    }
  }

  void update(WeightPlacer& placer, std::uint64_t round) {
    const auto count = static_cast<std::int64_t>(shapes_.size());
    std::vector<Buffer> masters, samples;
    const Buffer sums = to_device(std::vector<std::uint32_t>(shapes_.size()), device_);
    const Buffer bad = to_device(std::vector<std::uint64_t>(shapes_.size(), ~0ull), device_);
    std::vector<PlacedWeight> weights;
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      masters.push_back(to_device(numbers_of(shapes_[i], i, round == 1), device_));
      const auto [out, cols] = shapes_[i];
      const Buffer& sample = samples.emplace_back(device_, sample_bytes(out, cols, step_of(i)));
      fill_bytes(sample.as<void>(), device_, 0xEE, sample.bytes());
      const bool is_sampled = i % 5 != 4;
      weights.push_back({.master = master(masters[i], i),
                         .place = place(tiles_[i], i),
                         .expert = 0,
                         .flips = round == 1 ? counts_.as<std::int64_t>() : nullptr,
                         .bad = bad.as<std::uint64_t>() + i,
                         .sum = sums.as<std::uint32_t>() + i,
                         .sample = is_sampled ? sample.as<>() : nullptr,
                         .sample_step = step_of(i)});
      EXPECT_TRUE(placer.takes(rule_, weights[i].master));
    }
    WeightSums at_once(device_, {}), one_by_one(device_, {});
    placer.place(weights, rule_, at_once);
    Crc32cList list(device_);
    std::vector<Buffer> keep;
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      const auto codes = take_one(weights[i].master, i, round, one_by_one, list, keep);
      if (weights[i].sample != nullptr) {
        expect_sample(to_host<std::uint8_t>(samples[i]), codes, shapes_[i], step_of(i));
      } else {
        const auto left = to_host<std::uint8_t>(samples[i]);
        EXPECT_EQ(std::ranges::count(left, 0xEE), std::ssize(left)) << i;
      }
    }
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      EXPECT_EQ(to_host<std::uint8_t>(tiles_[i]), to_host<std::uint8_t>(other_[i])) << i;
    }
    std::vector<std::uint32_t> crcs = to_host<std::uint32_t>(sums);
    for (std::int64_t i = 0; i < count; ++i) {
      auto& crc = crcs[static_cast<std::size_t>(i)];
      const Shape& shape = shapes_[static_cast<std::size_t>(i)];
      crc = crc_of_sum(crc, std::int64_t{shape.out} * shape.cols / 16 * 9 + 4);
    }
    EXPECT_EQ(crcs, list.run());
    EXPECT_EQ(to_host<std::uint64_t>(bad), std::vector<std::uint64_t>(shapes_.size(), ~0ull));
    double error = 0, norm = 0, expected_error = 0, expected_norm = 0;
    at_once.read(error, norm);
    one_by_one.read(expected_error, expected_norm);
    EXPECT_NEAR(error / expected_error, 1, 1e-6);
    EXPECT_NEAR(norm / expected_norm, 1, 1e-6);
  }

  void expect_flips() const {
    const auto counts = to_host<std::int64_t>(counts_);
    for (int i = 0; i < kNumFlipCounts; ++i) {
      EXPECT_EQ(counts[static_cast<std::size_t>(i)],
                counts[static_cast<std::size_t>(kNumFlipCounts + i)]);
    }
    EXPECT_GT(counts[kCodeFlips], 0);
  }

 private:
  Buffer zeros(int count) const {
    return to_device(std::vector<std::int64_t>(static_cast<std::size_t>(count)), device_);
  }
  TensorView<const float, 2> master(const Buffer& buffer, std::size_t i) const {
    const auto [out, cols] = shapes_[i];
    return {buffer.as<float>(), {out, cols}, {cols, 1}, device_};
  }
  W4a4Weights place(const Buffer& buffer, std::size_t i) const {
    return {buffer.as<>(), 1, shapes_[i].out, shapes_[i].cols, device_};
  }

  static std::int64_t step_of(std::size_t i) { return std::array{1, 3, 16, 37}[i % 4]; }

  /// A sample is the scale, then so many rows' codes, then their scales; but for the scale's bytes
  /// 4 to 15, nothing in it is left as it was.
  static void expect_sample(const std::vector<std::uint8_t>& sample,
                            const PackedView<std::uint8_t>& codes, const Shape& shape,
                            std::int64_t step) {
    std::vector<std::uint8_t> wanted(16, 0xEE);
    const auto global =
        host_of(reinterpret_cast<const std::uint8_t*>(codes.global.data), 4, codes.codes.device);
    std::copy(global.begin(), global.end(), wanted.begin());
    for (const auto& of : {codes.codes, codes.scales}) {
      const auto all = host_of(of.data, of.shape[0] * of.shape[1], of.device);
      for (std::int64_t row = 0; row < shape.out; row += step) {
        const auto from = all.begin() + row * of.shape[1];
        wanted.insert(wanted.end(), from, from + of.shape[1]);
      }
    }
    EXPECT_EQ(sample, wanted) << shape.out << " by " << shape.cols << ", every " << step;
  }
  static std::vector<std::uint8_t> host_of(const std::uint8_t* data, std::int64_t bytes,
                                           Device device) {
    std::vector<std::uint8_t> here(static_cast<std::size_t>(bytes));
    copy_bytes(here.data(), {}, data, device, bytes, {});
    synchronize(device);
    return here;
  }

  PackedView<std::uint8_t> take_one(const TensorView<const float, 2>& from, std::size_t i,
                                    std::uint64_t round, WeightSums& sums, Crc32cList& list,
                                    std::vector<Buffer>& keep) {
    const auto [out, cols] = shapes_[i];
    const auto bytes = [&](std::int64_t rows, std::int64_t width) {
      const Buffer& made = keep.emplace_back(device_, rows * width);
      return TensorView<std::uint8_t, 2>{
          made.as<std::uint8_t>(), {rows, width}, {width, 1}, device_};
    };
    const PackedView<std::uint8_t> codes = {
        bytes(out, cols / 2),
        bytes(out, cols / 16),
        {reinterpret_cast<float*>(bytes(1, 4).data), {out}, {0}, device_}};
    keep.push_back(to_device(std::vector<std::uint64_t>{0, ~0ull}, device_));
    const WeightOnItsWay weight = {from, codes, keep.back().as<std::uint32_t>(),
                                   keep.back().as<std::uint64_t>() + 1};
    quantize_weights({&weight, 1}, rule_, sums);
    const Replaced replaced = {codes, place(other_[i], i), 0,
                               round == 1 ? counts_.as<std::int64_t>() + kNumFlipCounts : nullptr};
    w4a4_replace({&replaced, 1}, {});
    list.add({codes.codes,
              codes.scales,
              {reinterpret_cast<const std::uint8_t*>(codes.global.data), {1, 4}, {4, 1}, device_}});
    return codes;
  }

  Device device_;
  Quantizer rule_;
  std::vector<Shape> shapes_;
  Buffer counts_;
  std::vector<Buffer> tiles_, other_;
};

class PlaceWeightsOn : public testing::TestWithParam<Device> {
  void SetUp() override {
    if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "one by one there";
  }
};

TEST_P(PlaceWeightsOn, GivesTilesFlipsAndChecksums) {
  // One unit; more matrices than a step has; a step's worth, two to a step, and some in between.
  std::vector<Shape> small = {{16, 64}};
  std::vector<Shape> many,
      large = {{1536, 2048}, {2048, 768}, {1536, 2048}, {2048, 768}, {768, 2048},
               {48, 192},    {2048, 768}, {16, 4096},   {64, 64},    {1536, 2048}};
  for (int i = 0; i < 40; ++i) many.push_back({16 + 16 * (i % 7), 64 + 64 * (i % 5)});
  for (const std::int32_t denominator : {448, 256}) {
    for (const auto& shapes : {small, many, large}) {
      SCOPED_TRACE(shapes.size());
      WeightPlacer placer(GetParam(), {});
      BothWays ways(GetParam(), placed_rule(denominator), shapes);
      for (const std::uint64_t round : {0, 1}) ways.update(placer, round);
      if (shapes.size() > 1) ways.expect_flips();
    }
  }
}

TEST_P(PlaceWeightsOn, WhatIsNotFiniteIsFoundWhereItStands) {
  const Device device = GetParam();
  std::vector<float> values = numbers_of({96, 128}, 1, false);
  values[5077] = INFINITY;
  values[5078] = NAN;
  values[9000] = 3.4e38f;  // beyond BF16
  const Buffer there = to_device(values, device);
  const Buffer bad = to_device(std::vector<std::uint64_t>{~0ull}, device);
  const Buffer sum = to_device(std::vector<std::uint32_t>{0}, device);
  const Buffer tiles = to_device(
      std::vector<std::uint8_t>(static_cast<std::size_t>(W4a4Weights::expert_bytes(96, 128)), 0x55),
      device);
  const Buffer sample = to_device(
      std::vector<std::uint8_t>(static_cast<std::size_t>(sample_bytes(96, 128, 5)), 0x55), device);
  const PlacedWeight weight = {.master = {there.as<float>(), {96, 128}, {128, 1}, device},
                               .place = {tiles.as<>(), 1, 96, 128, device},
                               .expert = 0,
                               .flips = nullptr,
                               .bad = bad.as<std::uint64_t>(),
                               .sum = sum.as<std::uint32_t>(),
                               .sample = sample.as<>(),
                               .sample_step = 5};
  WeightSums sums(device, {});
  WeightPlacer placer(device, {});
  placer.place({&weight, 1}, placed_rule(448), sums);
  EXPECT_EQ(to_host<std::uint64_t>(bad)[0], 5077u);
  const auto bytes = to_host<std::uint8_t>(tiles);
  for (std::size_t i = W4a4Weights::kHeaderBytes; i < bytes.size(); ++i) {
    ASSERT_EQ(bytes[i], 0) << i;
  }
  const auto sampled = to_host<std::uint8_t>(sample);
  EXPECT_EQ(std::count(sampled.begin() + 16, sampled.end(), 0), std::ssize(sampled) - 16);
}

TEST_P(PlaceWeightsOn, TakesOnlyWhatItsKernelCan) {
  const Device device = GetParam();
  const WeightPlacer placer(device, {});
  const Buffer memory(device, 1 << 20);
  const auto takes = [&](std::int64_t rows, std::int64_t cols, const Quantizer& rule) {
    return placer.takes(rule, {memory.as<float>(), {rows, cols}, {cols, 1}, device});
  };
  EXPECT_TRUE(takes(16, 64, placed_rule(448)));
  EXPECT_FALSE(takes(24, 64, placed_rule(448)));
  EXPECT_FALSE(takes(16, 80, placed_rule(448)));
  EXPECT_FALSE(takes(16, 64, kLockstep));  // a scale a row
  EXPECT_FALSE(takes(1 << 14, 1 << 12, placed_rule(448)));
  PlacedWeight weight = {.master = {memory.as<float>(), {16, 64}, {64, 1}, device},
                         .place = {memory.as<>() + (1 << 19), 1, 16, 64, device, true}};
  WeightSums sums(device, {});
  WeightPlacer other(device, {});
  EXPECT_THROW(other.place({&weight, 1}, placed_rule(448), sums), Error);
}

INSTANTIATE_TEST_SUITE_P(Devices, PlaceWeightsOn, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::kernels
