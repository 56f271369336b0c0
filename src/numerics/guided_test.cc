#include "numerics/guided.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace lockstep {
namespace {

constexpr float kGrid[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

struct Coded {
  bool negative;
  std::uint32_t m;
  float value() const { return negative ? -kGrid[m] : kGrid[m]; }
};

Coded by_bit(float x, float scale, std::uint32_t bit) {
  return {std::signbit(x), guided_by_bit(bracket(std::abs(x), scale), bit)};
}

Coded by_code(float x, float scale, E2m1 code) {
  return {std::signbit(x), guided_by_code(bracket(std::abs(x), scale), std::signbit(x), code)};
}

TEST(Guided, DecodeTableOfOneBit) {
  struct Row {
    float from;
    float to;
    float even;
    float odd;
  };
  // Magnitudes [from, to): what bit 0 and bit 1 mean. Below zero the same, mirrored.
  const Row table[] = {{0, 0.5f, 0, 0.5f}, {0.5f, 1, 1, 0.5f}, {1, 1.5f, 1, 1.5f},
                       {1.5f, 2, 2, 1.5f}, {2, 3, 2, 3},       {3, 4, 4, 3},
                       {4, 9.5f, 4, 6}};
  int seen = 0;
  for (const Row& row : table) {
    for (float z = row.from; z < row.to; z += 1.0f / 256) {
      for (const float scale : {1.0f, 0.4375f, 0x1p-125f, 240 * 0x1p+116f}) {
        EXPECT_EQ(by_bit(z * scale, scale, 0).value(), row.even) << z;
        EXPECT_EQ(by_bit(z * scale, scale, 1).value(), row.odd) << z;
        EXPECT_EQ(by_bit(-z * scale, scale, 0).value(), -row.even) << z;
        EXPECT_EQ(by_bit(-z * scale, scale, 1).value(), -row.odd) << z;
        ++seen;
      }
    }
  }
  EXPECT_EQ(seen, 9728);
}

TEST(Guided, CasesOfTheDecodeTable) {
  // Far-side neighbour: 2.1 with the rollout at 1.5; the full code stays at the nearer end.
  EXPECT_EQ(by_bit(2.1f, 1, 1).value(), 3.0f);
  EXPECT_EQ(by_code(2.1f, 1, to_e2m1(1.5f)).value(), 2.0f);
  // Two steps away: the same parity gives round-to-nearest, the full code the nearer end.
  EXPECT_EQ(by_bit(2.2f, 1, 0).value(), 2.0f);
  EXPECT_EQ(by_code(2.2f, 1, to_e2m1(4.0f)).value(), 3.0f);
  // Exactly on a codeword the bracket reaches upward; 6 is the upper end of {4, 6}.
  EXPECT_EQ(by_bit(2.0f, 1, 1).value(), 3.0f);
  EXPECT_EQ(by_bit(6.0f, 1, 0).value(), 4.0f);
  EXPECT_EQ(by_bit(6.0f, 1, 1).value(), 6.0f);
  EXPECT_EQ(by_bit(100.0f, 1, 0).value(), 4.0f);
  // Crossing zero: a bit decodes on x's side, a full code comes no nearer than zero.
  EXPECT_EQ(by_bit(-0.05f, 1, 1).value(), -0.5f);
  EXPECT_EQ(by_code(-0.05f, 1, to_e2m1(0.3f)).value(), 0.0f);
  EXPECT_EQ(by_bit(-0.05f, 1, 0).value(), 0.0f);
  EXPECT_EQ(by_bit(-0.0f, 1, 1).value(), -0.5f);  // -0 counts as negative
  EXPECT_EQ(by_bit(0.0f, 1, 1).value(), 0.5f);
  // Code 8, which is never emitted, means zero.
  EXPECT_EQ(by_code(0.7f, 1, E2m1{8}).value(), 0.5f);
  EXPECT_EQ(by_code(-0.2f, 1, E2m1{8}).value(), 0.0f);
}

TEST(Guided, NearestIsTheQuantizersForEveryBf16AndScale) {
  for (std::uint32_t s8 = 1; s8 <= kE4m3Max; ++s8) {
    const float scale = scale_value(static_cast<E4m3>(static_cast<std::uint8_t>(s8)), 3);
    for (std::uint32_t bits = 0; bits < 0x7F80; ++bits) {
      const float a = float_of(bits << 16);
      const std::uint32_t m = bracket(a, scale);
      const std::uint32_t near = nearest_in_bracket(a, scale, m);
      ASSERT_EQ(near, e2m1_quotient(a, scale)) << a << " / " << scale;
      ASSERT_LE(near - m, 1u);
      ASSERT_TRUE(m <= 6 && kGrid[m] * scale <= a && (m == 6 || a < kGrid[m + 1] * scale));
    }
  }
}

/// All BF16 numbers from -limit to limit in their order.
std::vector<float> bf16_line(float limit, float smallest) {
  std::vector<float> line = {0.0f};
  for (std::uint32_t bits = float_bits(smallest) >> 16; float_of(bits << 16) <= limit; ++bits) {
    line.push_back(float_of(bits << 16));
    line.push_back(-line.back());
  }
  std::sort(line.begin(), line.end());
  return line;
}

TEST(Guided, IsExactWithinAQuarterOfTheScale) {
  // Every pair of BF16 numbers closer than scale / 4, for every significand of a scale: 8 from
  // normal ones, and the subnormals 1 to 7 have the same. Magnitudes below scale / 64 stand for
  // smaller ones: no threshold lies there.
  std::int64_t pairs = 0;
  std::int64_t moved = 0;
  std::int64_t failed = 0;
  for (std::uint32_t s8 = 0x38; s8 < 0x40; ++s8) {
    const float scale = to_float(static_cast<E4m3>(static_cast<std::uint8_t>(s8)));
    const std::vector<float> line = bf16_line(9.5f * scale, scale / 64);
    for (std::size_t i = 0; i < line.size(); ++i) {
      const float x_roll = line[i];
      const E2m1 code = to_e2m1_scaled(x_roll, scale);
      const float want = to_float(code);
      const auto from = std::lower_bound(line.begin(), line.end(), x_roll - 0.25f * scale);
      for (auto at = from; at != line.end() && *at < x_roll + 0.25f * scale; ++at) {
        if (*at <= x_roll - 0.25f * scale) continue;
        const float bit = by_bit(*at, scale, bits_of(code) & 1u).value();
        const float full = by_code(*at, scale, code).value();
        failed += bit != want || full != want;
        moved += to_float(to_e2m1_scaled(*at, scale)) != want;
        ++pairs;
      }
    }
  }
  EXPECT_EQ(failed, 0);
  EXPECT_GT(pairs, 5'000'000);
  EXPECT_GT(moved, 500'000);  // so many that round-to-nearest gets wrong
}

TEST(Guided, AQuarterOfTheScaleIsTight) {
  // The rollout at the tie .25 -> 0, the trainer at .5: the bracket {.5, 1} has no 0.
  EXPECT_EQ(to_float(to_e2m1(0.25f)), 0.0f);
  EXPECT_EQ(by_bit(0.5f, 1, 0).value(), 1.0f);
  EXPECT_EQ(by_bit(std::nextafter(0.5f, 0.0f), 1, 0).value(), 0.0f);
}

TEST(Guided, ResidueFindsTheScaleBelowThreeThirtyFirsts) {
  const double limit = 3.0 / 31;
  std::int64_t tried = 0;
  for (std::uint32_t c = 0; c <= kE4m3Max; ++c) {
    const auto code = static_cast<E4m3>(static_cast<std::uint8_t>(c));
    // Every quotient that the rollout rounds to this code: the cell's ends and what lies between.
    const float value = to_float(code);
    for (int step = -64; step <= 64; ++step) {
      const float width = std::max(value * 0.0675f, 0x1p-10f);
      const float y_roll = std::max(0.0f, value + width * static_cast<float>(step) / 64);
      if (y_roll > 448.0f || to_e4m3(y_roll) != code) continue;
      for (const double drift : {-limit, -0.05, -0.001, 0.0, 0.001, 0.05, limit}) {
        const double y = y_roll * (1.0 + drift * (1 - 1e-6));
        ASSERT_EQ(bits_of(scale_of_residue(c & 3u, static_cast<float>(y))), c)
            << y_roll << " drifted by " << drift;
        ++tried;
      }
    }
  }
  EXPECT_GT(tried, 70'000);
}

TEST(Guided, ThreeThirtyFirstsAreTight) {
  // 31/32 rounds to 1; at 28/32 the codes of 1 and of 3/4 are equally far, and the lower is
  // taken.
  EXPECT_EQ(to_float(to_e4m3(31.0f / 32)), 1.0f);
  const std::uint32_t residue = bits_of(to_e4m3(1.0f)) & 3u;
  EXPECT_EQ(to_float(scale_of_residue(residue, std::nextafter(28.0f / 32, 1.0f))), 1.0f);
  EXPECT_EQ(to_float(scale_of_residue(residue, 28.0f / 32)), 0.75f);
}

TEST(Guided, ResidueIsTheNearestByDefinition) {
  // p as numerics defines it, in double; the nearest of all codes of the residue by search.
  const auto line = [](float y) {
    return y >= 0x1p-6f ? 8 + (static_cast<double>(float_bits(y)) - 0x3C800000) / 0x1p20
                        : static_cast<double>(y) * 512;
  };
  std::vector<float> ys = {0.0f, 1e-30f, 448, 464, 500, 1e30f, float_of(0x7F800000u)};
  for (std::uint32_t c = 0; c < 126; ++c) {
    for (int eighth = 0; eighth < 8; ++eighth) {
      const float low = to_float(static_cast<E4m3>(static_cast<std::uint8_t>(c)));
      const float high = to_float(static_cast<E4m3>(static_cast<std::uint8_t>(c + 1)));
      const float y = low + (high - low) * static_cast<float>(eighth) / 8;
      for (const float near : {y, std::nextafter(y, 0.0f), std::nextafter(y, 1e3f)})
        ys.push_back(near);
    }
  }
  for (const float y : ys) {
    for (std::uint32_t residue = 0; residue < 4; ++residue) {
      std::uint32_t best = residue;
      for (std::uint32_t c = residue; c <= kE4m3Max; c += 4) {
        if (std::abs(c - line(y)) < std::abs(best - line(y))) best = c;
      }
      ASSERT_EQ(bits_of(scale_of_residue(residue, y)), best) << y << " residue " << residue;
    }
  }
}

// Everything is constexpr, so that device code compiles it.
static_assert(bracket(2.5f, 1.0f) == 4);
static_assert(nearest_in_bracket(2.5f, 1.0f, 4) == 4);
static_assert(guided_by_bit(4, 1) == 5);
static_assert(bits_of(scale_of_residue(0, 1.0f)) == 0x38);

}  // namespace
}  // namespace lockstep
