/// The bits of quantize() and dequantize() on a CPU, where there is a CUDA device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "device/testing.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/fake_quantize.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

Quantizer rule_of_weights() {
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  return rule;
}

class FakeQuantizeOn : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, FakeQuantizeOn, testing::ValuesIn(devices()), name_of_device);

/// Blocks of many sizes; the last weights are zeros, huge and tiny.
std::vector<Bf16> weights_of(std::int64_t weights, std::int64_t count) {
  std::vector<Bf16> x;
  for (std::int64_t i = 0; i < weights * count; ++i) {
    const auto words = philox(7, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
    const auto block = philox(8, philox_counter(static_cast<std::uint64_t>(i / 16), 0, 0))[0] % 12;
    const std::int64_t which = i / count, last = weights - 1;
    const int shift = which == last ? 118 : which == last - 1 ? -100 : 0;
    const float value = std::ldexp(static_cast<float>(words[0]) / 2147483648.0f - 1.0f,
                                   static_cast<int>(block) - 6 + shift);
    x.push_back(to_bf16(words[1] % 31 == 0 || which == last - 2 ? 0.0f : value));
  }
  return x;
}

TEST_P(FakeQuantizeOn, GivesWhatTheCodesAreWorth) {
  const Device device = GetParam();
  const Quantizer rule = rule_of_weights();
  for (const auto& [weights, rows, cols] :
       {std::array<std::int64_t, 3>{5, 48, 64}, std::array<std::int64_t, 3>{3, 7, 16},
        std::array<std::int64_t, 3>{6, 200, 528}}) {
    const std::vector<Bf16> x = weights_of(weights, rows * cols);
    const Buffer there = to_device(x, device), amax(device, weights * 4);
    const FakeQuantizeArgs args = {
        .x = {there.as<Bf16>(), {weights, rows, cols}, {rows * cols, cols, 1}, device},
        .rule = rule,
        .amax = amax.as<std::uint32_t>()};
    if (device.kind == Device::Kind::kCpu) {
      EXPECT_FALSE(fakes_at_once(args));
      EXPECT_THROW(fake_quantize(args, {}), Error);
      continue;
    }
    ASSERT_TRUE(fakes_at_once(args));
    fake_quantize(args, {});
    const std::vector<Bf16> got = to_host<Bf16>(there);
    for (std::int64_t w = 0; w < weights; ++w) {
      Packed codes(rows, cols, 16);
      std::vector<Bf16> worth(static_cast<std::size_t>(rows * cols));
      quantize({.x = {x.data() + w * rows * cols, {rows, cols}, {cols, 1}},
                .rule = rule,
                .out = codes.view()});
      dequantize(
          {.codes = codes.view(), .rule = rule, .bf16 = {worth.data(), {rows, cols}, {cols, 1}}});
      EXPECT_EQ(std::memcmp(got.data() + w * rows * cols, worth.data(), worth.size() * 2), 0) << w;
    }
  }
}

}  // namespace
}  // namespace lockstep::kernels
