// swiglu() on every device, bit for bit.
#include <gtest/gtest.h>

#include <vector>

#include "base/philox.h"
#include "device/testing.h"
#include "kernels/exact/swiglu.h"
#include "numerics/exp.h"

namespace lockstep::kernels {
namespace {

class SwigluDevice : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, SwigluDevice, testing::ValuesIn(devices()), name_of_device);

void expect_the_definition(const std::vector<float>& g, const std::vector<float>& u, Device device,
                           std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  const Buffer gate = to_device(g, device);
  const Buffer up = to_device(u, device);
  const std::vector<Bf16> before(static_cast<std::size_t>(rows * stride), Bf16{0xABCD});
  const Buffer out = to_device(before, device);
  swiglu({{gate.as<const float>(), {rows, cols}, {stride, 1}, device},
          {up.as<const float>(), {rows, cols}, {stride, 1}, device},
          {out.as<Bf16>(), {rows, cols}, {stride, 1}, device}});
  const std::vector<Bf16> got = to_host<Bf16>(out);
  for (std::int64_t i = 0; i < rows * stride; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const Bf16 want = i % stride < cols ? swiglu_exact(g[at], u[at]) : before[at];
    ASSERT_EQ(bits_of(got[at]), bits_of(want)) << std::hexfloat << g[at] << " " << u[at];
  }
}

TEST_P(SwigluDevice, EveryExponentAndManyMantissasAreTheDefinition) {
  const std::uint32_t each = GetParam().kind == Device::Kind::kCuda ? 16384 : 512;
  std::vector<float> g;
  std::vector<float> u;
  for (std::uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
    for (std::uint32_t i = 0; i < each; ++i) {
      const PhiloxWords words = philox(9, philox_counter(sign_exponent, i, 0));
      const std::uint32_t mantissa = i == 0 ? 0 : i == 1 ? 0x7FFFFF : words[0] & 0x7FFFFF;
      g.push_back(float_of(sign_exponent << 23 | mantissa));
      u.push_back(i % 3 == 0 ? float_of(words[1])
                             : (static_cast<float>(words[1] % 20001) - 10000.0f) / 1000.0f);
    }
  }
  const auto rows = static_cast<std::int64_t>(g.size()) / 512;
  expect_the_definition(g, u, GetParam(), rows, 512, 512);
}

TEST_P(SwigluDevice, ArgumentsOfExpAreTheDefinition) {
  std::vector<float> g;
  std::vector<float> u;
  for (float x = -110.0f; x < 95.0f; x += 1.0f / 4096) {
    g.push_back(x);
    u.push_back(static_cast<float>(g.size() % 37) - 18.0f);
  }
  g.resize(g.size() / 768 * 768);
  u.resize(g.size());
  expect_the_definition(g, u, GetParam(), static_cast<std::int64_t>(g.size()) / 768, 768, 768);
}

TEST_P(SwigluDevice, AnyWidthAndStride) {
  for (const std::int64_t cols : {1, 7, 16, 33, 80}) {
    for (const std::int64_t stride : {cols, cols + 1, cols + 4}) {
      std::vector<float> g(static_cast<std::size_t>(3 * stride));
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = 0.37f * static_cast<float>(i % 29) - 5;
      expect_the_definition(g, std::vector<float>(g.rbegin(), g.rend()), GetParam(), 3, cols,
                            stride);
    }
  }
}

}  // namespace
}  // namespace lockstep::kernels
