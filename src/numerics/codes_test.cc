#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "numerics/scale.h"

namespace lockstep {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kMidpoints[7] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

Bf16 bf16_of(int bits) { return static_cast<Bf16>(static_cast<std::uint16_t>(bits)); }
E4m3 e4m3_of(int bits) { return static_cast<E4m3>(static_cast<std::uint8_t>(bits)); }

/// By distance in double, which holds every quotient that is asked for exactly or far from a tie.
std::uint32_t nearest_magnitude(double a, Tie tie) {
  a = std::min(a, 8.0);
  std::uint32_t best = 0;
  for (std::uint32_t m = 1; m < 8; ++m) {
    const double gain = std::abs(kValues[best] - a) - std::abs(kValues[m] - a);
    const bool takes_tie = tie == Tie::kAway || (tie == Tie::kEven && m % 2 == 0);
    if (gain > 0 || (gain == 0 && takes_tie)) best = m;
  }
  return best;
}

TEST(Bf16, RoundsToNearestEvenOnAllNeighbours) {
  for (int high = 0; high < 0x8000; ++high) {
    const Bf16 x = bf16_of(high);
    if (!is_finite(x)) continue;
    EXPECT_EQ(to_bf16(to_float(x)), x);
    const std::uint32_t bits = static_cast<std::uint32_t>(high) << 16;
    const Bf16 even = bf16_of(high + (high & 1));
    EXPECT_EQ(to_bf16(float_of(bits | 0x8000u)), even);
    EXPECT_EQ(to_bf16(float_of(bits | 0x7FFFu)), x);
    EXPECT_EQ(to_bf16(float_of(bits | 0x8001u)), bf16_of(high + 1));
    EXPECT_EQ(to_bf16(-float_of(bits | 0x8001u)), bf16_of((high + 1) | 0x8000));
  }
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()), bf16_of(0x7F80));
  EXPECT_FALSE(is_finite(to_bf16(kNan)));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(float_of(0x7F800001u)))));
}

TEST(E2m1, ValuesAndHalfUnits) {
  for (std::uint8_t code = 0; code < 16; ++code) {
    const double value = (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
    EXPECT_EQ(to_float(static_cast<E2m1>(code)), value);
    EXPECT_EQ(half_units(static_cast<E2m1>(code)), 2 * value);
    EXPECT_EQ(bits_of(to_e2m1(static_cast<float>(value))), code == 8 ? 0 : code);
  }
}

TEST(E2m1, EveryBf16NumberGoesToTheNearest) {
  for (const Tie tie : {Tie::kEven, Tie::kTowardZero, Tie::kAway}) {
    for (int bits = 0; bits < 0x7F80; ++bits) {
      const float a = to_float(bf16_of(bits));
      ASSERT_EQ(e2m1_quotient(a, 1.0f, tie), nearest_magnitude(a, tie)) << a;
      ASSERT_EQ(bits_of(to_e2m1(-a, tie)) & 7u, e2m1_quotient(a, 1.0f, tie)) << a;
    }
  }
}

TEST(E2m1, MidpointsAndTheirNeighbours) {
  for (std::uint32_t i = 0; i < 7; ++i) {
    const auto middle = static_cast<float>(kMidpoints[i]);
    EXPECT_EQ(e2m1_quotient(middle, 1.0f), i + i % 2);
    EXPECT_EQ(e2m1_quotient(middle, 1.0f, Tie::kTowardZero), i);
    EXPECT_EQ(e2m1_quotient(middle, 1.0f, Tie::kAway), i + 1);
    for (const Tie tie : {Tie::kEven, Tie::kTowardZero, Tie::kAway}) {
      EXPECT_EQ(e2m1_quotient(std::nextafter(middle, 0.0f), 1.0f, tie), i);
      EXPECT_EQ(e2m1_quotient(std::nextafter(middle, 9.0f), 1.0f, tie), i + 1);
    }
  }
}

TEST(E2m1, EndsOfTheLine) {
  EXPECT_EQ(bits_of(to_e2m1(kInf)), 7);
  EXPECT_EQ(bits_of(to_e2m1(-kInf)), 15);
  EXPECT_EQ(bits_of(to_e2m1(kNan)), 0);
  EXPECT_EQ(bits_of(to_e2m1(-0.0f)), 0);
  EXPECT_EQ(bits_of(to_e2m1(-0.25f)), 0);
  EXPECT_EQ(bits_of(to_e2m1_scaled(5.0f, 0.0f)), 0);
  EXPECT_EQ(bits_of(to_e2m1_scaled(-1e30f, 1e-30f)), 15);
}

TEST(E2m1, R09_TiesAndTheSmallestSubnormal) {
  EXPECT_EQ(to_float(to_e2m1_scaled(-0.625f, 0.5f)), -1.0f);
  EXPECT_EQ(to_float(to_e2m1_scaled(float_of(0x3F000000u), 2.0f)), 0.0f);
  EXPECT_EQ(to_float(to_e2m1_scaled(float_of(0x3F000003u), 2.0f)), 0.5f);
}

TEST(E4m3, DecodesAllCodes) {
  for (int b = 0; b < 127; ++b) {
    const int e = b >> 3;
    const double value = e == 0 ? std::ldexp(b & 7, -9) : std::ldexp(8 + (b & 7), e - 10);
    EXPECT_EQ(to_float(e4m3_of(b)), value);
    EXPECT_EQ(to_float(e4m3_of(b | 0x80)), -value);
    EXPECT_EQ(e4m3_units(e4m3_of(b)), std::ldexp(value, 9));
    EXPECT_EQ(to_e4m3(static_cast<float>(value)), e4m3_of(b));
  }
  EXPECT_EQ(e4m3_units(e4m3_of(kE4m3Max)), 229376);
  EXPECT_TRUE(std::isnan(to_float(e4m3_of(0x7F))));
}

TEST(E4m3, MidpointsAndTheirNeighbours) {
  for (int b = 0; b < kE4m3Max; ++b) {
    const float middle = (to_float(e4m3_of(b)) + to_float(e4m3_of(b + 1))) / 2;
    EXPECT_EQ(to_e4m3(middle), e4m3_of(b + b % 2)) << b;
    EXPECT_EQ(to_e4m3(std::nextafter(middle, 0.0f)), e4m3_of(b)) << b;
    EXPECT_EQ(to_e4m3(std::nextafter(middle, 1e9f)), e4m3_of(b + 1)) << b;
    EXPECT_EQ(to_e4m3(-middle), e4m3_of((b + b % 2) | 0x80)) << b;
  }
  EXPECT_EQ(bits_of(to_e4m3(0x1p-10f)), 0);
}

TEST(E4m3, SaturatesAndKeepsNan) {
  for (const float x : {448.0f, 449.0f, 464.0f, 465.0f, 480.0f, 1e30f, kInf}) {
    EXPECT_EQ(bits_of(to_e4m3(x)), kE4m3Max) << x;
    EXPECT_EQ(bits_of(to_e4m3(-x)), kE4m3Max | 0x80) << x;
  }
  EXPECT_EQ(bits_of(to_e4m3(kNan)) & 0x7F, 0x7F);
  EXPECT_EQ(bits_of(to_e4m3(std::numeric_limits<float>::denorm_min())), 0);
}

struct MxRow {
  float amax;
  int floor, ceil, rceil, even;
};

TEST(E8m0, ScaleBytesOfTheFourRules) {
  const MxRow rows[] = {
      {1.0f, 0x7d, 0x7d, 0x7d, 0x7d},       {1.5f, 0x7d, 0x7e, 0x7d, 0x7d},
      {1.5000001f, 0x7d, 0x7e, 0x7e, 0x7d}, {1.75f, 0x7d, 0x7e, 0x7e, 0x7e},
      {3.0f, 0x7e, 0x7f, 0x7e, 0x7e},       {3.0000002f, 0x7e, 0x7f, 0x7f, 0x7e},
      {3.5f, 0x7e, 0x7f, 0x7f, 0x7f},       {4.0f, 0x7f, 0x7f, 0x7f, 0x7f},
      {6.0f, 0x7f, 0x80, 0x7f, 0x7f},       {6.0000005f, 0x7f, 0x80, 0x80, 0x7f},
      {7.0f, 0x7f, 0x80, 0x80, 0x80},       {8.0f, 0x80, 0x80, 0x80, 0x80},
  };
  for (const MxRow& row : rows) {
    EXPECT_EQ(bits_of(mx_scale(row.amax, MxRule::kFloor)), row.floor) << row.amax;
    EXPECT_EQ(bits_of(mx_scale(row.amax, MxRule::kCeil)), row.ceil) << row.amax;
    EXPECT_EQ(bits_of(mx_scale(row.amax, MxRule::kRceil)), row.rceil) << row.amax;
    EXPECT_EQ(bits_of(mx_scale(row.amax, MxRule::kEven)), row.even) << row.amax;
  }
}

int clamp_mx(double exponent) {
  return static_cast<int>(std::min(std::max(exponent, -127.0), 125.0)) + 127;
}

TEST(E8m0, EveryBf16AmaxByItsLogarithm) {
  for (int bits = 1; bits < 0x7F80; ++bits) {
    const double amax = to_float(bf16_of(bits));
    const auto x = static_cast<float>(amax);
    int e = 0;
    const double m = 2 * std::frexp(amax, &e);
    const double floor_log2 = e - 1;
    ASSERT_EQ(bits_of(mx_scale(x, MxRule::kFloor)), clamp_mx(floor_log2 - 2)) << amax;
    ASSERT_EQ(bits_of(mx_scale(x, MxRule::kCeil)), clamp_mx(floor_log2 + (m > 1) - 2)) << amax;
    ASSERT_EQ(bits_of(mx_scale(x, MxRule::kEven)), clamp_mx(floor_log2 + (m >= 1.75) - 2)) << amax;
    ASSERT_EQ(bits_of(mx_scale(x, MxRule::kRceil)), clamp_mx(floor_log2 + (m > 1.5) - 2)) << amax;
  }
  for (const MxRule rule : {MxRule::kFloor, MxRule::kEven, MxRule::kCeil, MxRule::kRceil}) {
    EXPECT_EQ(bits_of(mx_scale(0.0f, rule)), 0);
  }
  EXPECT_EQ(to_float(static_cast<E8m0>(0)), 0x1p-127f);
  EXPECT_EQ(to_float(static_cast<E8m0>(252)), 0x1p125f);
  EXPECT_TRUE(std::isnan(to_float(static_cast<E8m0>(255))));
}

TEST(Exponent, IsTheSmallestThatHoldsEveryBf16Amax) {
  for (int bits = 1; bits < 0x7F80; ++bits) {
    const float amax = to_float(bf16_of(bits));
    const int n = global_exponent(amax);
    ASSERT_GE(n, -116);
    ASSERT_LE(n, 116);
    ASSERT_TRUE(n == 116 || amax <= std::ldexp(2688.0, n)) << amax;
    ASSERT_TRUE(n == -116 || amax > std::ldexp(2688.0, n - 1)) << amax;
    ASSERT_TRUE(n == -116 || kv_exponent(amax) == std::min(n + 2, 116)) << amax;
  }
  EXPECT_EQ(global_exponent(0.0f), 0);
  EXPECT_EQ(kv_exponent(0.0f), 0);
  EXPECT_EQ(global_exponent(2688.0f), 0);
  EXPECT_EQ(global_exponent(std::nextafter(2688.0f, 3000.0f)), 1);
  EXPECT_EQ(global_exponent(std::numeric_limits<float>::max()), 116);
  EXPECT_EQ(global_exponent(std::numeric_limits<float>::denorm_min()), -116);
  EXPECT_EQ(power_of_two(-118), std::ldexp(1.0f, -118));
  for (int n = -116; n <= 116; ++n) EXPECT_EQ(exponent_of(power_of_two(n)), n);
}

/// The real number amax / (6 * 2^n) rounded by distance. Doubles hold it to 2^-53, and a tie is far
/// from everything that is not one.
int nearest_scale(double amax, int n) {
  const double exact = std::ldexp(amax, -n) / 6;
  int best = 0;
  for (int b = 1; b <= kE4m3Max; ++b) {
    const double gain = std::abs(to_float(e4m3_of(best)) - exact) -
                        std::abs(static_cast<double>(to_float(e4m3_of(b))) - exact);
    if (gain > 0 || (gain == 0 && b % 2 == 0)) best = b;
  }
  return best;
}

TEST(Scale, EveryPublishedOrderGivesTheExactByteUnderAPowerOfTwo) {
  Quantizer rule = {.element = Element::kE2m1,
                    .scale = ScaleFormat::kE4m3,
                    .global = GlobalScale::kPerToken,
                    .global_is_power_of_two = true};
  for (const int n : {-116, -9, 0, 5, 116}) {
    const GlobalNumbers global = global_of_exponent(n);
    for (int e = n - 3; e <= n + 12; ++e) {
      for (int m = 128; m < 256; ++m) {
        const auto amax = static_cast<float>(std::ldexp(m, e - 7));
        if (!(amax <= std::ldexp(2688.0, n))) continue;
        const int exact = nearest_scale(amax, n);
        for (const ScaleRule order :
             {ScaleRule::kExact, ScaleRule::kTe, ScaleRule::kCompressedTensors}) {
          rule.scale_rule = order;
          ASSERT_EQ(scale_byte(rule, amax, global), exact) << amax << " " << n;
        }
        rule.scale_rule = ScaleRule::kModelOpt;
        ASSERT_EQ(scale_byte(rule, amax, global), std::max(exact, 1)) << amax << " " << n;
        rule.scale_rule = ScaleRule::kTorchao;
        ASSERT_EQ(scale_byte(rule, amax, global), std::max(exact, 8)) << amax << " " << n;
      }
    }
  }
}

TEST(Scale, All1016ValuesAreExactInBf16AndFindTheirCode) {
  for (const int n : {-116, -1, 0, 116}) {
    for (int b = 0; b <= kE4m3Max; ++b) {
      const float scale = scale_value(e4m3_of(b), n);
      for (std::uint8_t code = 0; code < 8; ++code) {
        const double value = std::ldexp(kValues[code] * to_float(e4m3_of(b)), n);
        const float x = to_float(static_cast<E2m1>(code)) * scale;
        ASSERT_EQ(x, value);
        ASSERT_EQ(to_float(to_bf16(x)), x);
        ASSERT_EQ(bits_of(to_e2m1_scaled(x, scale)), b == 0 ? 0 : code);
        ASSERT_EQ(bits_of(to_e2m1_scaled(-x, scale)), b == 0 || code == 0 ? 0 : code | 8);
      }
    }
  }
}

TEST(Scale, ThresholdsAreBf16NumbersAndTheirNeighboursFall) {
  for (const int n : {-116, -118, 0, 114}) {
    for (int b = 1; b <= kE4m3Max; ++b) {
      const float scale = scale_value(e4m3_of(b), n);
      for (std::uint32_t i = 0; i < 7; ++i) {
        const float threshold = static_cast<float>(kMidpoints[i]) * scale;
        const Bf16 bits = to_bf16(threshold);
        ASSERT_EQ(to_float(bits), threshold);
        ASSERT_EQ(e2m1_quotient(threshold, scale), i + i % 2);
        ASSERT_EQ(e2m1_quotient(to_float(bf16_of(bits_of(bits) - 1)), scale), i);
        ASSERT_EQ(e2m1_quotient(to_float(bf16_of(bits_of(bits) + 1)), scale), i + 1);
        ASSERT_EQ(e2m1_quotient(std::nextafter(threshold, 0.0f), scale), i);
        ASSERT_EQ(e2m1_quotient(std::nextafter(threshold, kInf), scale), i + 1);
      }
    }
  }
}

// The form for hardware without integer compares: a reciprocal, one product, its lowest bit
// cleared.
TEST(Scale, ReciprocalWithItsProductsLowestBitClearedEqualsTheQuotient) {
  for (int significand = 8; significand < 16; ++significand) {
    const auto scale = static_cast<float>(significand);
    const float reciprocal = 1.0f / scale;
    for (int e = -4; e <= 8; ++e) {
      for (int m = 128; m < 256; ++m) {
        const auto x = static_cast<float>(std::ldexp(m, e - 7));
        const float z = float_of(float_bits(x * reciprocal) & ~1u);
        ASSERT_EQ(e2m1_quotient(z, 1.0f), e2m1_quotient(x, scale)) << x << " " << scale;
      }
    }
  }
}

TEST(Scale, R03_GlobalScalesAreFiniteAndPositiveForEveryAmax) {
  for (const StoredGlobal stored :
       {StoredGlobal::kDecode, StoredGlobal::kEncode, StoredGlobal::kAmax}) {
    for (const bool power : {false, true}) {
      const Quantizer rule = {.element = Element::kE2m1,
                              .scale = ScaleFormat::kE4m3,
                              .global = GlobalScale::kPerTensor,
                              .stored_global = stored,
                              .global_is_power_of_two = power};
      for (const float amax : {0.0f, 1e-45f, 1e-38f, 1.0f, 3e38f}) {
        const GlobalNumbers global = global_of_amax(rule, amax);
        EXPECT_TRUE(std::isfinite(global.encode) && global.encode > 0) << amax;
        EXPECT_TRUE(std::isfinite(global.decode) && global.decode > 0) << amax;
      }
    }
  }
}

TEST(Scale, CacheBlocksSaturateWhereTheScaleWouldRoundAbove448) {
  for (const int n : {-20, 0, 7}) {
    const auto edge = static_cast<float>(std::ldexp(464.0 * 6, n));
    EXPECT_FALSE(is_saturated(edge, n));
    EXPECT_TRUE(is_saturated(std::nextafter(edge, kInf), n));
    EXPECT_EQ(bits_of(block_scale(edge, n)), kE4m3Max);
  }
}

}  // namespace
}  // namespace lockstep
