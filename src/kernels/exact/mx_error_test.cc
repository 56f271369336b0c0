#include "kernels/exact/mx_error.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "numerics/macro_block.h"

namespace lockstep::kernels {
namespace {

constexpr ScaleRule kRules[] = {ScaleRule::kMxFloor, ScaleRule::kMxEven, ScaleRule::kMxCeil,
                                ScaleRule::kMxRceil};

TEST(MxError, ThePartsAddUpUnderEveryRule) {
  std::vector<Bf16> x = random_values(64 * 256, 9, 4);
  for (const ScaleRule scale_rule : kRules) {
    const Quantizer rule = mx_rule(scale_rule);
    const MxError e = mx_error(matrix(x, 64, 256), rule);
    EXPECT_NEAR(e.scale + e.dead_zone + e.grid + 2 * e.scale_grid + 2 * e.scale_dead_zone, e.total,
                1e-9 * e.total);
    // The total is quantize()'s own.
    Packed out(64, 256, 32);
    quantize({.x = matrix(x, 64, 256), .rule = rule, .out = out.view()});
    std::vector<float> back(x.size());
    dequantize({.codes = out.view(), .rule = rule, .f32 = matrix(back, 64, 256)});
    double total = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double d = static_cast<double>(back[i]) - static_cast<double>(to_float(x[i]));
      total += d * d;
    }
    EXPECT_NEAR(total, e.total, 1e-9 * total);
    EXPECT_GT(e.scale, 0.1 * e.total);
    EXPECT_GT(e.dead, 0);
  }
}

TEST(MxError, TheDeadZoneIsOrthogonalWhereScalesAreNotBelowTheirWish) {
  std::vector<Bf16> x = random_values(64 * 256, 10, 2);
  const MxError e = mx_error(matrix(x, 64, 256), mx_rule(ScaleRule::kMxRceil));
  EXPECT_EQ(e.scale_dead_zone, 0.0);
  EXPECT_LT(e.cosine(), -0.3);  // a coarser scale undoes part of what the grid rounded
  EXPECT_NE(mx_error(matrix(x, 64, 256), mx_rule(ScaleRule::kMxFloor)).scale_dead_zone, 0.0);
}

TEST(MxError, BlocksWhosePowerOfTwoIsIdealHaveNoBias) {
  std::vector<Bf16> x = random_values(4 * 32, 11, 0);
  for (std::size_t block = 0; block < 4; ++block) {
    for (std::size_t i = 0; i < 32; ++i) {
      const float value = to_float(x[32 * block + i]);
      x[32 * block + i] = to_bf16(i == 5 ? 6.0f : std::fmod(value, 6.0f));
    }
  }
  const MxError e = mx_error(matrix(x, 4, 32), mx_rule(ScaleRule::kMxRceil));
  EXPECT_EQ(e.scale, 0.0);
  EXPECT_NEAR(e.dead_zone + e.grid, e.total, 1e-12);
}

TEST(MacroBlock, TheMantissaIsItsDefinitionForEveryMaximum) {
  for (std::uint32_t mantissa = 0; mantissa < 128; ++mantissa) {
    for (const int exponent : {-100, -3, 0, 1, 50}) {
      const double amax = std::ldexp(1.0 + mantissa / 128.0, exponent);
      const double wish = amax / 6;
      const double power = std::exp2(std::ceil(std::log2(wish) - 1e-12));
      const int m = macro_mantissa(static_cast<float>(amax));
      EXPECT_EQ(m, static_cast<int>(std::floor(256 * (power / wish) + 1e-9)) - 256) << amax;
      // The largest element now fits its scale to a 256th, from below.
      const double stretched =
          static_cast<double>(stretch(static_cast<float>(amax), static_cast<std::uint8_t>(m)));
      EXPECT_EQ(stretched, amax * (256 + m) / 256);
      EXPECT_LE(stretched, 6 * power);
      EXPECT_GT(stretched, 6 * power * (1 - 1.0 / 256));
    }
  }
  EXPECT_EQ(macro_mantissa(0.0f), 0);
  EXPECT_EQ(macro_mantissa(5.0f), 51);  // docs/formats/mxfp4.md
}

TEST(MacroBlock, TakesAwayBiasAndLosesLess) {
  std::vector<Bf16> x;
  for (std::uint64_t i = 0; i < 32 * 320; ++i) x.push_back(to_bf16(normal(12, i) * 0.3f));
  for (const ScaleRule scale_rule : {ScaleRule::kMxRceil, ScaleRule::kMxEven}) {
    const Quantizer rule = macro_rule(scale_rule);
    Packed out(32, 320, rule);
    std::vector<float> values(x.size());
    std::vector<Bf16> rounded(x.size()), own(x);
    quantize({.x = matrix(x, 32, 320), .rule = rule, .out = out.view()});
    dequantize({.codes = out.view(),
                .rule = rule,
                .bf16 = matrix(rounded, 32, 320),
                .f32 = matrix(values, 32, 320)});
    guide({.x = matrix(own, 32, 320), .rule = rule, .out = matrix(own, 32, 320)});
    EXPECT_EQ(own, rounded);  // the trainer's operand is the rollout's
    double lost = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t row = i / 320, col = i % 320;
      const double m = 1.0 + out.mantissas[row * 3 + col / 128] / 256.0;
      const auto code = static_cast<E2m1>(
          out.code(static_cast<std::int64_t>(row), static_cast<std::int64_t>(col)));
      const double worth =
          static_cast<double>(to_float(code)) * std::ldexp(1.0, out.scales[i / 32] - 127) / m;
      ASSERT_EQ(values[i], static_cast<float>(worth));
      ASSERT_EQ(rounded[i], to_bf16(values[i]));
      const double d = worth - static_cast<double>(to_float(x[i]));
      lost += d * d;
    }
    const double share = scale_rule == ScaleRule::kMxRceil ? 0.9 : 0.97;
    const MxError without = mx_error(matrix(x, 32, 320), mx_rule(scale_rule));
    EXPECT_LT(lost, share * without.total) << static_cast<int>(scale_rule);
    // The decomposition sees the same loss, and less of a bias.
    const MxError with = mx_error(matrix(x, 32, 320), rule);
    EXPECT_NEAR(with.total, lost, 1e-6 * lost);
    EXPECT_NEAR(
        with.scale + with.dead_zone + with.grid + 2 * with.scale_grid + 2 * with.scale_dead_zone,
        with.total, 1e-9 * with.total);
    EXPECT_LT(with.scale, without.scale);
  }
}

TEST(MacroBlock, RowsThatAreNotFiniteAndZerosAreZero) {
  std::vector<Bf16> x(2 * 128, Bf16{0});
  x[7] = static_cast<Bf16>(std::uint16_t{0x7F80});
  x[9] = to_bf16(1.0f);
  Packed out(2, 128, macro_rule(ScaleRule::kMxRceil));
  const QuantizeArgs args = {
      .x = matrix(x, 2, 128), .rule = macro_rule(ScaleRule::kMxRceil), .out = out.view()};
  quantize(args);
  EXPECT_EQ(out.mantissas, (std::vector<std::uint8_t>{0, 0}));
  for (const std::uint8_t code : out.codes) EXPECT_EQ(code, 0);
  QuantizeArgs wrong = args;
  wrong.rule = kLockstep;
  wrong.rule.macro_block = 128;
  wrong.out.scales.shape[1] = 8;
  EXPECT_THROW(quantize(wrong), Error);
  wrong = args;
  wrong.out.mantissas.shape[1] = 2;
  EXPECT_THROW(quantize(wrong), Error);
  wrong = args;
  wrong.rule.macro_block = 48;
  EXPECT_THROW(quantize(wrong), Error);
}

TEST(MacroBlock, NothingFollowsARecordOfThem) {
  std::vector<Bf16> x = random_values(2 * 128, 9, 1);
  std::vector<std::uint8_t> records(2 * 20);
  GuideArgs args = {.x = matrix(x, 2, 128),
                    .rule = macro_rule(ScaleRule::kMxRceil),
                    .guidance = Guidance::kLsb,
                    .layout = {Encoding::kLsb, 128, 32, 0},
                    .records = matrix(records, 2, 20),
                    .out = matrix(x, 2, 128)};
  EXPECT_THROW(guide(args), Error);
}

}  // namespace
}  // namespace lockstep::kernels
