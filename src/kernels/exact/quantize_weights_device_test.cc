/// Several weights at once on a CUDA device: the bytes of quantize_weight() and w4a4_fill(), the
/// counts of count_flips().
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/error.h"
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

/// Four experts' matrices of one shape, which go to tiles twice: all at once, and one by one.
class FourExperts {
 public:
  FourExperts(Device device, const Quantizer& rule, std::int32_t out, std::int32_t cols)
      : device_(device),
        rule_(rule),
        out_(out),
        cols_(cols),
        memory_(tiles()),
        other_(tiles()),
        flips_(to_device(std::vector<std::int64_t>(kNumFlipCounts), device)),
        flips_one_by_one_(to_device(std::vector<std::int64_t>(kNumFlipCounts), device)) {}

  /// Quantizes the numbers of a round here and there; the second round counts flips.
  void update(std::uint64_t round, WeightSums& sums) {
    weights_.clear();
    replaced_.clear();
    expected_.clear();
    for (std::int32_t e = 0; e < 4; ++e) add(round, e);
    quantize_weights(weights_, rule_, sums);
    w4a4_replace(replaced_, {});
    for (std::size_t e = 0; e < 4; ++e) {
      expect_codes(e);
      const auto expert = static_cast<std::int32_t>(e);
      const W4a4Weights one_by_one = place(other_);
      if (round == 1) {
        count_flips(replaced_[e].now, one_by_one, expert, flips_one_by_one_.as<std::int64_t>());
      }
      w4a4_fill(one_by_one, expert, 0, replaced_[e].now, {}, rule_);
    }
    EXPECT_EQ(to_host<std::uint8_t>(memory_), to_host<std::uint8_t>(other_));
  }

  void expect_flips() const {
    EXPECT_EQ(to_host<std::int64_t>(flips_), to_host<std::int64_t>(flips_one_by_one_));
  }

 private:
  Buffer tiles() const {
    Buffer memory(device_, 4 * W4a4Weights::expert_bytes(out_, cols_));
    fill_bytes(memory.as<void>(), device_, 0, memory.bytes());
    return memory;
  }
  W4a4Weights place(const Buffer& memory) const { return {memory.as<>(), 4, out_, cols_, device_}; }

  std::vector<float> numbers(std::uint64_t round, std::int32_t e) const {
    std::vector<float> values = masters(out_ * cols_, 10 + static_cast<std::uint64_t>(e), 4);
    if (round == 1) {
      for (std::size_t i = 0; i < values.size(); i += 3) values[i] *= 1.3f;
    }
    // The last one has another power of two, far away: what scales need to be brought down.
    if (e == 3) {
      for (float& x : values) x = std::ldexp(x, 118);
    }
    if (e == 2) std::fill(values.begin(), values.end(), 0.0f);
    return values;
  }

  TensorView<std::uint8_t, 2> room(std::int64_t rows, std::int64_t cols) {
    const Buffer& made = keep_.emplace_back(device_, rows * cols);
    return {made.as<std::uint8_t>(), {rows, cols}, {cols, 1}, device_};
  }

  void add(std::uint64_t round, std::int32_t e) {
    const std::vector<float> values = numbers(round, e);
    Packed& codes = expected_.emplace_back(out_, cols_, 16);
    quantize_weight({values.data(), {out_, cols_}, {cols_, 1}}, rule_, codes.view());
    keep_.push_back(to_device(values, device_));
    const TensorView<const float, 2> master = {
        keep_.back().as<float>(), {out_, cols_}, {cols_, 1}, device_};
    const PackedView<std::uint8_t> to = {
        room(out_, cols_ / 2),
        room(out_, cols_ / 16),
        {reinterpret_cast<float*>(room(1, 4).data), {out_}, {0}, device_}};
    keep_.push_back(to_device(std::vector<std::uint32_t>{0}, device_));
    auto* amax = keep_.back().as<std::uint32_t>();
    keep_.push_back(to_device(std::vector<std::uint64_t>{~std::uint64_t{0}}, device_));
    weights_.push_back({master, to, amax, keep_.back().as<std::uint64_t>()});
    replaced_.push_back({to, place(memory_), e, round == 1 ? flips_.as<std::int64_t>() : nullptr});
    EXPECT_TRUE(quantizes_at_once(rule_, master));
  }

  std::vector<std::uint8_t> read(const TensorView<std::uint8_t, 2>& view) const {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(view.shape[0] * view.shape[1]));
    copy_bytes(bytes.data(), {}, view.data, device_, std::ssize(bytes));
    synchronize(device_);
    return bytes;
  }

  void expect_codes(std::size_t e) const {
    EXPECT_EQ(read(weights_[e].out.codes), expected_[e].codes) << out_ << " " << cols_ << " " << e;
    EXPECT_EQ(read(weights_[e].out.scales), expected_[e].scales);
    float global = 0;
    copy_bytes(&global, {}, weights_[e].out.global.data, device_, 4);
    synchronize(device_);
    EXPECT_EQ(global, expected_[e].global[0]);
  }

  Device device_;
  Quantizer rule_;
  std::int32_t out_, cols_;
  Buffer memory_, other_;
  Buffer flips_, flips_one_by_one_;
  std::vector<WeightOnItsWay> weights_;
  std::vector<Replaced> replaced_;
  std::vector<Packed> expected_;
  std::vector<Buffer> keep_;
};

TEST_P(WeightsAtOnceOn, GiveTheCpusCodesTilesAndFlips) {
  const Device device = GetParam();
  if (device.kind == Device::Kind::kCpu) GTEST_SKIP() << "one by one there";
  for (const std::int32_t denominator : {448, 256}) {
    for (const auto& [out, cols] : {std::pair{64, 64}, {40, 208}, {1, 16}, {96, 768}}) {
      WeightSums sums(device, {});
      FourExperts experts(device, weight_rule(denominator), out, cols);
      for (const std::uint64_t round : {0, 1}) experts.update(round, sums);
      experts.expect_flips();
      double error = 0, norm = 0;
      sums.read(error, norm);
      EXPECT_GT(norm, 0);
      EXPECT_LT(error, norm);
    }
  }
}

TEST_P(WeightsAtOnceOn, AreNotBlamedForACallThatFailedBefore) {
  if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "nothing is launched there";
  EXPECT_THROW(PinnedBuffer(64, {Device::Kind::kCuda, 99}), Error);
  WeightSums sums(GetParam(), {});
  FourExperts experts(GetParam(), weight_rule(448), 64, 64);
  EXPECT_NO_THROW(experts.update(0, sums));
}

TEST(WeightsAtOnce, RefuseAPlaceWhoseScalesHaveMantissas) {
  const Replaced replaced = {{}, {nullptr, 1, 64, 64, {}, true}};
  try {
    w4a4_replace({&replaced, 1}, {});
    FAIL() << "took it";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no powers of two"), std::string::npos);
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
