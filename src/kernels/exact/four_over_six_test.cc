// Four over six against exact integers, over every mantissa that a block's maximum can have.
#include "numerics/four_over_six.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/error.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/quantize_rows.h"

namespace lockstep::kernels {
namespace {

using Wide = __int128;

constexpr int kUnit = 60;  // numbers here are whole multiples of 2^-60

Wide units(double x) { return static_cast<Wide>(std::ldexp(x, kUnit)); }

/// What a block loses under a scale, in 2^-60 or its square: every code is tried.
Wide loss(const Bf16* x, double scale, FourOverSix metric) {
  constexpr int kHalves[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  Wide sum = 0;
  for (int i = 0; i < 16; ++i) {
    const Wide a = units(std::abs(static_cast<double>(to_float(x[i]))));
    Wide least = a;
    for (const int halves : kHalves) {
      const Wide value = units(halves * scale / 2);
      least = std::min(least, value > a ? value - a : a - value);
    }
    sum += metric == FourOverSix::kMae ? least : least * least;
  }
  return sum;
}

std::vector<std::uint8_t> scales_of(std::vector<Bf16>& x, std::int64_t rows, std::int64_t cols,
                                    const Quantizer& rule, std::vector<float>* global = nullptr) {
  Packed out(rows, cols, 16);
  quantize({.x = matrix(x, rows, cols), .rule = rule, .out = out.view()});
  if (global != nullptr) *global = out.global;
  return out.scales;
}

class Metric : public testing::TestWithParam<FourOverSix> {};
INSTANTIATE_TEST_SUITE_P(Metrics, Metric, testing::Values(FourOverSix::kMae, FourOverSix::kMse));

TEST_P(Metric, TakesTheMapThatLosesLessForEveryMantissa) {
  const Quantizer rule = four_over_six(kLockstep, GetParam());
  int fours = 0, sixes = 0, ties = 0;
  for (std::uint64_t mantissa = 0; mantissa < 128; ++mantissa) {
    // The first block holds the row's largest number; the others' lie up to 2^8 below.
    const std::int64_t cols = 256;
    std::vector<Bf16> x;
    for (std::uint64_t i = 0; i < 256; ++i) {
      const double amax =
          std::ldexp(1.0 + static_cast<double>((mantissa + 37 * (i / 16)) % 128) / 128,
                     -static_cast<int>(i < 16 ? 0 : 1 + i / 16 % 8));
      const double part = unit(philox(mantissa, philox_counter(i, 0, 0))[0],
                               philox(mantissa, philox_counter(i, 1, 0))[0]);
      x.push_back(to_bf16(static_cast<float>(i % 16 == 3 ? -amax : (2 * part - 1) * amax)));
    }
    std::vector<float> global;
    const std::vector<std::uint8_t> scales = scales_of(x, 1, cols, rule, &global);
    const std::int32_t n = exponent_of(global[0]);
    ASSERT_LE(1.0 + static_cast<double>(mantissa) / 128, std::ldexp(1536.0, n));
    ASSERT_GT(1.0 + static_cast<double>(mantissa) / 128, std::ldexp(1536.0, n - 1));
    for (std::size_t b = 0; b < 16; ++b) {
      const auto amax = static_cast<float>(std::abs(to_float(x[16 * b + 3])));
      const float six = scale_value(to_e4m3(amax * power_of_two(-n) / 6.0f), n);
      const float four = scale_value(to_e4m3(amax * power_of_two(-n) / 4.0f), n);
      const Wide of_six = loss(&x[16 * b], six, GetParam());
      const Wide of_four = loss(&x[16 * b], four, GetParam());
      ASSERT_EQ(scale_value(static_cast<E4m3>(scales[b]), n), of_four < of_six ? four : six)
          << "mantissa " << mantissa << " block " << b;
      (of_four < of_six ? fours : of_four > of_six ? sixes : ties) += 1;
    }
  }
  EXPECT_GT(fours, 300);
  EXPECT_GT(sixes, 300);
}

// R12: a tie takes six, and a block of zeros has neither scale nor map.
TEST_P(Metric, R12_ATieTakesSixAndZerosTakeNothing) {
  const Quantizer rule = four_over_six(kLockstep, GetParam());
  // 12 is 6 * 2 and 4 * 3; row maxima fix n at 0.
  std::vector<Bf16> x(48, Bf16{0});
  x[0] = to_bf16(1536.0f);
  x[20] = to_bf16(-12.0f);
  const std::vector<std::uint8_t> scales = scales_of(x, 1, 48, rule);
  EXPECT_EQ(scales,
            (std::vector<std::uint8_t>{bits_of(to_e4m3(256.0f)), bits_of(to_e4m3(2.0f)), 0}));
}

// R12: blocks in which the two maps lose the same, and their neighbours in which one element is one
// BF16 number further: the difference is then the least there can be, and it decides alike in the
// definition and in every backend.
TEST_P(Metric, R12_NearTiesAreDecidedExactlyByEveryBackend) {
  const Quantizer rule = four_over_six(kLockstep, GetParam());
  std::vector<Bf16> x;
  int ties = 0, fours = 0, sixes = 0;
  std::vector<std::uint8_t> expected;
  for (std::uint64_t trial = 0; trial < 100; ++trial) {
    // Block 0 fixes n at 0; block 1's maximum is 12, for which both scales are E4M3 numbers.
    std::vector<Bf16> row(32, Bf16{0});
    row[0] = to_bf16(1536.0f);
    Bf16* block = row.data() + 16;
    block[0] = to_bf16(12.0f);
    for (std::uint64_t i = 1; i < 16; ++i) {
      block[i] = to_bf16(
          12.0f * static_cast<float>(philox(trial, philox_counter(i, 9, 0))[0] % 97) / 96.0f);
    }
    const auto difference = [&](std::uint16_t bits) {
      block[1] = static_cast<Bf16>(bits);
      return loss(block, 2.0, GetParam()) - loss(block, 3.0, GetParam());  // above 0: four
    };
    // Where the sign changes while one element runs through the BF16 numbers from 0.5 to 12.
    Wide before = difference(0x3F00);
    for (std::uint16_t bits = 0x3F01; bits <= 0x4140; ++bits) {
      const Wide now = difference(bits);
      if ((before > 0) != (now > 0)) {
        for (const int back : {1, 0}) {
          const Wide d = difference(static_cast<std::uint16_t>(bits - back));
          (d > 0 ? fours : d < 0 ? sixes : ties) += 1;
          x.insert(x.end(), row.begin(), row.end());
          expected.push_back(bits_of(to_e4m3(d > 0 ? 3.0f : 2.0f)));
        }
      }
      before = now;
    }
  }
  EXPECT_GT(ties, 5);
  EXPECT_GT(fours, 25);
  EXPECT_GT(sixes + ties, 25);  // under the mean error a near tie below zero is mostly a tie
  const auto rows = static_cast<std::int64_t>(expected.size());
  const std::vector<std::uint8_t> scales = scales_of(x, rows, 32, rule);
  for (std::size_t r = 0; r < expected.size(); ++r) {
    ASSERT_EQ(scales[2 * r + 1], expected[r]) << "row " << r;
    std::vector<std::uint8_t> codes(16), own(2);
    QuantizeCounts counts{};
    encode_row<Bf16>({x.data() + 32 * r, 32, global_of_exponent(0), codes.data(), own.data()}, rule,
                     counts);
    ASSERT_EQ(own[1], expected[r]) << "row " << r << ", the definition";
  }
}

TEST_P(Metric, LosesLessThanSixAloneUnderTheSameExponent) {
  const Quantizer rule = four_over_six(kLockstep, GetParam());
  Quantizer plain = rule;
  plain.four_over_six = FourOverSix::kOff;
  std::vector<Bf16> x = random_values(64 * 128, 5, 3);
  double loss_of[2] = {0, 0};
  for (const bool maps : {false, true}) {
    Packed out(64, 128, 16);
    quantize({.x = matrix(x, 64, 128), .rule = maps ? rule : plain, .out = out.view()});
    std::vector<float> back(x.size());
    dequantize({.codes = out.view(), .rule = rule, .f32 = matrix(back, 64, 128)});
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double d = static_cast<double>(back[i]) - static_cast<double>(to_float(x[i]));
      loss_of[maps] += GetParam() == FourOverSix::kMae ? std::abs(d) : d * d;
    }
  }
  EXPECT_LT(loss_of[1], 0.97 * loss_of[0]);
}

TEST(FourOverSix, TheMapIsWhatTheCodesSay) {
  const Quantizer rule = four_over_six(kLockstep, FourOverSix::kMse);
  std::vector<Bf16> x = random_values(32 * 256, 6, 2);
  std::vector<std::uint8_t> records(32 * 40);
  const RowLayout layout = {Encoding::kLsbScaleMod4Map, 256, 16, 1};
  ASSERT_EQ(layout.bytes(), 32 + 4 + 2 + 1);
  records.resize(static_cast<std::size_t>(32 * layout.bytes()));
  Packed out(32, 256, 16);
  quantize({.x = matrix(x, 32, 256),
            .rule = rule,
            .out = out.view(),
            .layout = layout,
            .records = matrix(records, 32, layout.bytes())});
  int fours = 0;
  for (std::size_t j = 0; j < 32 * 16; ++j) {
    const std::size_t row = j / 16, block = j % 16;
    float amax = 0;
    for (std::size_t i = 0; i < 16; ++i) {
      amax = std::max(amax, std::abs(to_float(x[16 * j + i])));
    }
    const std::int32_t n = exponent_of(out.global[row]);
    const bool four = out.scales[j] != bits_of(block_scale(amax, n));
    const std::uint8_t byte =
        records[row * static_cast<std::size_t>(layout.bytes()) + 36 + block / 8];
    ASSERT_EQ(byte >> (block % 8) & 1, four ? 1 : 0) << j;
    fours += four;
  }
  EXPECT_GT(fours, 25);
}

TEST(FourOverSix, RefusesWhatItIsNotDefinedFor) {
  std::vector<Bf16> x(32);
  const auto complaint = [&](const Quantizer& rule) -> std::string {
    Packed out(1, 32, rule.block);
    try {
      quantize({.x = matrix(x, 1, 32), .rule = rule, .out = out.view()});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Quantizer rule = four_over_six(kLockstep, FourOverSix::kMse);
  EXPECT_EQ(complaint(rule), "");
  rule.denominator = 448;
  EXPECT_NE(complaint(rule).find("denominator is 448"), std::string::npos);
  Quantizer mx = mx_rule(ScaleRule::kMxRceil);
  mx.four_over_six = FourOverSix::kMse;
  EXPECT_NE(complaint(mx).find("four_over_six"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::kernels
