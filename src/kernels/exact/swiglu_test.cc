#include "kernels/exact/swiglu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "numerics/exp.h"

namespace lockstep::kernels {
namespace {

double ulp_of(double value) {
  return std::ldexp(1.0, std::max(value == 0 ? -126 : std::ilogb(value), -126) - 23);
}

TEST(Exp, IsWithinOneUlpOverAllFloats) {
  double worst = 0;
  for (std::uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += 1021) {
    const float x = float_of(static_cast<std::uint32_t>(bits));
    const float y = exp_exact(x);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(y));
      continue;
    }
    const double want = std::exp(static_cast<double>(x));
    if (static_cast<float>(want) == std::numeric_limits<float>::infinity()) {
      ASSERT_EQ(y, std::numeric_limits<float>::infinity()) << x;
    } else {
      worst = std::max(worst, std::abs(static_cast<double>(y) - want) / ulp_of(want));
    }
  }
  // Where results are normal and arguments dense.
  for (float x = -104.0f; x < 88.7f; x += 1.0f / 16384) {
    const double want = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(exp_exact(x)) - want) / ulp_of(want));
  }
  EXPECT_LE(worst, 1.0);
  EXPECT_GT(worst, 0.5);  // else the measure itself is wrong
}

TEST(Exp, OverflowsAndUnderflowsWhereFloatDoes) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_exact(88.722839f), inf);
  EXPECT_EQ(exp_exact(std::nextafter(88.722839f, 0.0f)), 0x1.ffff08p+127f);
  EXPECT_EQ(exp_exact(inf), inf);
  EXPECT_EQ(exp_exact(3e38f), inf);
  EXPECT_EQ(exp_exact(-103.972f), 0x1p-149f);
  EXPECT_EQ(exp_exact(-103.98f), 0.0f);
  EXPECT_EQ(exp_exact(-inf), 0.0f);
  EXPECT_EQ(exp_exact(0.0f), 1.0f);
  EXPECT_EQ(exp_exact(-0.0f), 1.0f);
}

TEST(Swiglu, IsCloseToTheTrueFunction) {
  for (float g = -87.0f; g < 100.0f; g += 1.0f / 4096) {
    const double want = g / (1 + std::exp(-static_cast<double>(g)));
    ASSERT_LE(std::abs(static_cast<double>(silu_exact(g)) - want), 2.5 * ulp_of(want)) << g;
  }
  // Below, exp(-g) grows coarse and then infinite: the error is the value itself, nothing in BF16.
  EXPECT_EQ(float_bits(silu_exact(-88.722839f)), 0x80000000u);
  EXPECT_LT(std::abs(silu_exact(std::nextafter(-88.722839f, 0.0f))), 3e-37f);
}

TEST(Swiglu, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(bits_of(swiglu_exact(0.0f, 5.0f)), 0x0000);
  EXPECT_EQ(bits_of(swiglu_exact(-0.0f, 5.0f)), 0x8000);
  EXPECT_EQ(bits_of(swiglu_exact(inf, 1.0f)), 0x7F80);
  EXPECT_EQ(bits_of(swiglu_exact(-inf, 1.0f)), 0x7FC0);  // Inf / Inf: a row that the engine refuses
  EXPECT_EQ(bits_of(swiglu_exact(-nan, 1.0f)), 0x7FC0);
  EXPECT_EQ(bits_of(swiglu_exact(1.0f, -nan)), 0x7FC0);
  EXPECT_EQ(bits_of(swiglu_exact(0.0f, inf)), 0x7FC0);
  EXPECT_EQ(bits_of(swiglu_exact(3e38f, 3.0f)), 0x7F80);
  EXPECT_EQ(bits_of(swiglu_exact(-100.0f, 3.0f)), 0x8000);
}

std::vector<Bf16> run(const std::vector<float>& g, const std::vector<float>& u, Isa isa) {
  std::vector<Bf16> out(g.size());
  const auto n = static_cast<std::int64_t>(g.size());
  swiglu_on({{g.data(), {1, n}, {n, 1}}, {u.data(), {1, n}, {n, 1}}, {out.data(), {1, n}, {n, 1}}},
            isa);
  return out;
}

class SwigluIsa : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, SwigluIsa, testing::ValuesIn(kAllIsas));

TEST_P(SwigluIsa, EqualsTheDefinitionOnEveryExponentAndAtRandom) {
  if (!has_isa(GetParam())) GTEST_SKIP() << "this machine does not have these instructions";
  std::vector<float> g;
  std::vector<float> u;
  for (std::uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
    for (std::uint32_t i = 0; i < 512; ++i) {
      const PhiloxWords words = philox(9, philox_counter(sign_exponent, i, 0));
      const std::uint32_t mantissa = i == 0 ? 0 : i == 1 ? 0x7FFFFF : words[0] & 0x7FFFFF;
      g.push_back(float_of(sign_exponent << 23 | mantissa));
      u.push_back(i % 3 == 0 ? float_of(words[1])
                             : (static_cast<float>(words[1] % 20001) - 10000.0f) / 1000.0f);
      g.push_back((static_cast<float>(words[2] % 2000001) - 1000000.0f) / 9000.0f);
      u.push_back(float_of((words[3] & 0x807FFFFFu) | 0x3F800000u));
    }
  }
  const std::vector<Bf16> out = run(g, u, GetParam());
  for (std::size_t i = 0; i < g.size(); ++i) {
    ASSERT_EQ(bits_of(out[i]), bits_of(swiglu_exact(g[i], u[i]))) << g[i] << " " << u[i];
  }
}

TEST_P(SwigluIsa, AnyWidthAndStride) {
  if (!has_isa(GetParam())) GTEST_SKIP() << "this machine does not have these instructions";
  for (const std::int64_t f : {1, 7, 16, 33, 80}) {
    std::vector<float> both(static_cast<std::size_t>(3 * 2 * f));
    for (std::size_t i = 0; i < both.size(); ++i) both[i] = 0.37f * static_cast<float>(i % 29) - 5;
    std::vector<Bf16> out(static_cast<std::size_t>(3 * (f + 2)), Bf16{0xABCD});
    swiglu_on({{both.data(), {3, f}, {2 * f, 1}},
               {both.data() + f, {3, f}, {2 * f, 1}},
               {out.data(), {3, f}, {f + 2, 1}}},
              GetParam());
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t c = 0; c < f + 2; ++c) {
        const auto at = static_cast<std::size_t>(r * 2 * f + c);
        const Bf16 want =
            c < f ? swiglu_exact(both[at], both[at + static_cast<std::size_t>(f)]) : Bf16{0xABCD};
        EXPECT_EQ(bits_of(out[static_cast<std::size_t>(r * (f + 2) + c)]), bits_of(want));
      }
    }
  }
}

TEST(Swiglu, NamesWhatIsWrong) {
  std::vector<float> g(8);
  std::vector<Bf16> out(8);
  const SwigluArgs args = {
      {g.data(), {2, 4}, {4, 1}}, {g.data(), {2, 3}, {4, 1}}, {out.data(), {2, 4}, {4, 1}}};
  EXPECT_THROW(
      {
        try {
          swiglu(args);
        } catch (const Error& error) {
          EXPECT_STREQ(error.what(), "swiglu: up is [2, 3], must be [2, 4] like gate");
          throw;
        }
      },
      Error);
}

/// The rows `| g | u | exp(-g) | silu(g) | bf16 |` of the document, as FP32 and BF16 bits.
TEST(Swiglu, WorkedValuesOfTheDocument) {
  std::ifstream file("docs/formats/swiglu.md");
  if (!file) GTEST_SKIP() << "run from the project's folder";
  std::string line;
  int rows = 0;
  while (std::getline(file, line)) {
    if (line.rfind("| 0x", 0) != 0) continue;
    std::replace(line.begin(), line.end(), '|', ' ');
    std::istringstream in(line);
    std::uint32_t g = 0;
    std::uint32_t u = 0;
    std::uint32_t e = 0;
    std::uint32_t s = 0;
    std::uint32_t y = 0;
    in >> std::hex >> g >> u >> e >> s >> y;
    ASSERT_FALSE(in.fail()) << line;
    EXPECT_EQ(float_bits(exp_exact(-float_of(g))), e) << line;
    EXPECT_EQ(float_bits(silu_exact(float_of(g))), s) << line;
    EXPECT_EQ(bits_of(swiglu_exact(float_of(g), float_of(u))), y) << line;
    ++rows;
  }
  EXPECT_EQ(rows, 9);
}

}  // namespace
}  // namespace lockstep::kernels
