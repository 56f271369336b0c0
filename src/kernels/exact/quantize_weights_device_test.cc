/// Several weights at once on a CUDA device: the bytes of quantize_weight() and w4a4_fill(), the
/// counts of count_flips().
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "device/testing.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/quantize_weights.h"
#include "kernels/exact/weight_numbers.h"

namespace lockstep::kernels {
namespace {

Quantizer weight_rule(std::int32_t denominator) {
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  rule.denominator = denominator;
  return rule;
}

std::vector<float> masters(std::int64_t count, std::uint64_t seed, int spread) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto words = philox(seed, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
    const float x = static_cast<float>(words[0]) / 2147483648.0f - 1.0f;
    const int block =
        static_cast<int>(philox(seed, philox_counter(static_cast<std::uint64_t>(i / 16), 1, 0))[0] %
                         static_cast<std::uint32_t>(2 * spread + 1));
    values.push_back(words[1] % 31 == 0 ? 0.0f : std::ldexp(x, block - spread));
  }
  return values;
}

class WeightsAtOnceOn : public testing::TestWithParam<Device> {};

TEST_P(WeightsAtOnceOn, GiveTheCpusCodesTilesAndFlips) {
  const Device device = GetParam();
  if (device.kind == Device::Kind::kCpu) GTEST_SKIP() << "one by one there";
  for (const std::int32_t denominator : {448, 256}) {
    const Quantizer rule = weight_rule(denominator);
    for (const auto& [out, cols] : {std::pair{64, 64}, {40, 208}, {1, 16}, {96, 768}}) {
      WeightSums sums(device, {});
      double cpu_error = 0, cpu_norm = 0;
      std::vector<Packed> before, expected;
      std::vector<Buffer> keep;
      const std::int64_t expert_bytes = W4a4Weights::expert_bytes(out, cols);
      Buffer memory(device, 4 * expert_bytes), other(device, 4 * expert_bytes);
      fill_bytes(memory.as<void>(), device, 0, memory.bytes());
      fill_bytes(other.as<void>(), device, 0, other.bytes());
      const W4a4Weights place = {memory.as<>(), 4, out, cols, device};
      const W4a4Weights one_by_one = {other.as<>(), 4, out, cols, device};
      const Buffer flips = to_device(std::vector<std::int64_t>(kNumFlipCounts), device);
      const Buffer flips_one_by_one = to_device(std::vector<std::int64_t>(kNumFlipCounts), device);
      for (const std::uint64_t round : {0, 1}) {
        std::vector<WeightOnItsWay> weights;
        std::vector<Replaced> replaced;
        expected.clear();
        for (std::int32_t e = 0; e < 4; ++e) {
          // The last one has another power of two, far away: what scales need to be brought down.
          std::vector<float> values = masters(out * cols, 10 + static_cast<std::uint64_t>(e), 4);
          if (round == 1) {
            for (std::size_t i = 0; i < values.size(); i += 3) values[i] *= 1.3f;
          }
          if (e == 3) {
            for (float& x : values) x = std::ldexp(x, 118);
          }
          if (e == 2) std::fill(values.begin(), values.end(), 0.0f);
          Packed& codes = expected.emplace_back(out, cols, 16);
          quantize_weight({values.data(), {out, cols}, {cols, 1}}, rule, codes.view());
          keep.push_back(to_device(values, device));
          const TensorView<const float, 2> master = {
              keep.back().as<float>(), {out, cols}, {cols, 1}, device};
          const auto room = [&](std::int64_t rows, std::int64_t of) {
            keep.emplace_back(device, rows * of);
            return TensorView<std::uint8_t, 2>{
                keep.back().as<std::uint8_t>(), {rows, of}, {of, 1}, device};
          };
          const PackedView<std::uint8_t> to = {
              room(out, cols / 2),
              room(out, cols / 16),
              {reinterpret_cast<float*>(room(1, 4).data), {out}, {0}, device}};
          keep.push_back(to_device(std::vector<std::uint32_t>{0}, device));
          auto* amax = keep.back().as<std::uint32_t>();
          keep.push_back(to_device(std::vector<std::uint64_t>{~std::uint64_t{0}}, device));
          weights.push_back({master, to, amax, keep.back().as<std::uint64_t>()});
          replaced.push_back({to, place, e, round == 1 ? flips.as<std::int64_t>() : nullptr});
          ASSERT_TRUE(quantizes_at_once(rule, master));
        }
        quantize_weights(weights, rule, sums);
        w4a4_replace(replaced, {});
        for (std::size_t e = 0; e < 4; ++e) {
          const auto read = [&](const TensorView<std::uint8_t, 2>& view) {
            std::vector<std::uint8_t> bytes(
                static_cast<std::size_t>(view.shape[0] * view.shape[1]));
            copy_bytes(bytes.data(), {}, view.data, device, std::ssize(bytes));
            synchronize(device);
            return bytes;
          };
          EXPECT_EQ(read(weights[e].out.codes), expected[e].codes)
              << out << " " << cols << " " << e;
          EXPECT_EQ(read(weights[e].out.scales), expected[e].scales);
          float global = 0;
          copy_bytes(&global, {}, weights[e].out.global.data, device, 4);
          synchronize(device);
          EXPECT_EQ(global, expected[e].global[0]);
          if (round == 1) {
            count_flips(replaced[e].now, one_by_one, static_cast<std::int32_t>(e),
                        flips_one_by_one.as<std::int64_t>());
          }
          w4a4_fill(one_by_one, static_cast<std::int32_t>(e), 0, replaced[e].now, {}, rule);
        }
        EXPECT_EQ(to_host<std::uint8_t>(memory), to_host<std::uint8_t>(other));
      }
      EXPECT_EQ(to_host<std::int64_t>(flips), to_host<std::int64_t>(flips_one_by_one));
      sums.read(cpu_error, cpu_norm);
      EXPECT_GT(cpu_norm, 0);
      EXPECT_LT(cpu_error, cpu_norm);
    }
  }
}

TEST_P(WeightsAtOnceOn, WhatIsNotFiniteIsFoundWhereItStands) {
  const Device device = GetParam();
  std::vector<float> values = masters(96 * 64, 3, 2);
  values[77] = INFINITY;
  values[78] = NAN;
  values[5000] = 3.4e38f;  // beyond BF16
  const Buffer there = to_device(values, device);
  const TensorView<const float, 2> master = {there.as<float>(), {96, 64}, {64, 1}, device};
  const Buffer bad = to_device(std::vector<std::uint64_t>{~std::uint64_t{0}}, device);
  const Buffer rounded(device, 96 * 64 * 2);
  round_weight(master, {rounded.as<Bf16>(), {96, 64}, {64, 1}, device}, bad.as<std::uint64_t>());
  EXPECT_EQ(to_host<std::uint64_t>(bad)[0], 77u);
  const auto bf16 = to_host<Bf16>(rounded);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i != 78) {
      EXPECT_EQ(to_float(bf16[i]), to_float(to_bf16(values[i])));
    }
  }
  if (device.kind == Device::Kind::kCpu) return;
  const Buffer again = to_device(std::vector<std::uint64_t>{~std::uint64_t{0}}, device);
  const Buffer amax = to_device(std::vector<std::uint32_t>{0}, device);
  const Buffer codes(device, 96 * 32), scales(device, 96 * 4), global(device, 4);
  WeightSums sums(device, {});
  const WeightOnItsWay weight = {master,
                                 {{codes.as<std::uint8_t>(), {96, 32}, {32, 1}, device},
                                  {scales.as<std::uint8_t>(), {96, 4}, {4, 1}, device},
                                  {global.as<float>(), {96}, {0}, device}},
                                 amax.as<std::uint32_t>(),
                                 again.as<std::uint64_t>()};
  quantize_weights({&weight, 1}, weight_rule(448), sums);
  EXPECT_EQ(to_host<std::uint64_t>(again)[0], 77u);
  EXPECT_GE(to_host<std::uint32_t>(amax)[0], 0x7F80u);
}

INSTANTIATE_TEST_SUITE_P(Devices, WeightsAtOnceOn, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::kernels
