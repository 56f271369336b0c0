/// E4M3 elements under powers of two: MXFP8, FP8 in blocks, the FP8 cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "kernels/exact/audit.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "numerics/guided.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer e4m3(std::int32_t block, std::int32_t rows, ScaleRule rule) {
  return {.element = Element::kE4m3,
          .block = block,
          .block_rows = rows,
          .scale = ScaleFormat::kE8m0,
          .scale_rule = rule};
}
constexpr Quantizer kMxfp8 = e4m3(32, 1, ScaleRule::kMxRceil);
constexpr Quantizer kRow = e4m3(128, 1, ScaleRule::kMxRceil);
constexpr Quantizer kTile = e4m3(128, 128, ScaleRule::kMxRceil);
constexpr Quantizer kFixed = {
    .element = Element::kE4m3, .global = GlobalScale::kStatic, .global_is_power_of_two = true};
constexpr std::int8_t kExponent = -5;

/// A matrix and its codes.
struct Coded {
  Quantizer rule;
  std::int64_t rows, cols;
  std::vector<std::uint8_t> codes, scales;
  std::vector<std::int64_t> counts = std::vector<std::int64_t>(kNumQuantizeCounts);

  Coded(const Quantizer& r, std::vector<Bf16>& x, std::int64_t n)
      : rule(r),
        rows(n),
        cols(static_cast<std::int64_t>(x.size()) / n),
        codes(x.size(), 0xFF),
        scales(static_cast<std::size_t>(r.scale_rows(n) * r.scale_cols(cols)), 0xFF) {
    quantize({.x = matrix(x, rows, cols),
              .rule = rule,
              .exponent = kExponent,
              .out = view(),
              .counts = {counts.data(), {kNumQuantizeCounts}, {1}, {}}});
  }
  PackedView<std::uint8_t> view() {
    return {matrix(codes, rows, cols),
            matrix(scales, rule.scale_rows(rows), rule.scale_cols(cols)),
            {}};
  }
  std::vector<Bf16> values() {
    std::vector<Bf16> out(codes.size());
    dequantize(
        {.codes = view(), .rule = rule, .exponent = kExponent, .bf16 = matrix(out, rows, cols)});
    return out;
  }
};

// ---- An independent reading, in double ----

double worth(int magnitude) {
  const int e = magnitude >> 3, m = magnitude & 7;
  return e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
}

int nearest(double z) {
  int best = 0;
  for (int m = 1; m <= 126; ++m) {
    const double here = std::abs(worth(m) - z), there = std::abs(worth(best) - z);
    if (here < there || (here == there && m % 2 == 0)) best = m;
  }
  return best;
}

int expected_exponent(double amax, ScaleRule rule) {
  int e = 0;
  const double mantissa = 2 * std::frexp(amax, &e);  // [1, 2)
  e = e - 1 - 8;
  if (rule == ScaleRule::kMxEven) e += mantissa >= 1.9375;
  if (rule == ScaleRule::kMxCeil) e += mantissa > 1;
  if (rule == ScaleRule::kMxRceil) e += mantissa > 1.75;
  return std::clamp(e, -124, 119);
}

double amax_of(const std::vector<Bf16>& x, std::int64_t cols, std::int64_t row, std::int64_t end,
               std::int64_t col, std::int64_t last) {
  double most = 0;
  for (; row < end; ++row) {
    for (std::int64_t c = col; c < last; ++c) {
      most =
          std::max<double>(most, std::abs(to_float(x[static_cast<std::size_t>(row * cols + c)])));
    }
  }
  return most;
}

void expect_as_read(const Quantizer& rule, std::int64_t rows, std::int64_t cols, int binades) {
  std::vector<Bf16> x = random_values(static_cast<std::size_t>(rows * cols),
                                      static_cast<std::uint64_t>(cols), binades);
  Coded coded(rule, x, rows);
  const std::vector<Bf16> values = coded.values();
  const std::int64_t across = rule.is_mx() ? rule.block : cols;
  std::map<std::pair<std::int64_t, std::int64_t>, double> found;  // amax of a block, once
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const std::int64_t top = r / rule.block_rows * rule.block_rows, left = c / across * across;
      const auto [at_block, fresh] = found.try_emplace({top, left}, 0.0);
      if (fresh) {
        at_block->second = amax_of(x, cols, top, std::min(rows, top + rule.block_rows), left,
                                   std::min(cols, left + across));
      }
      const double amax = at_block->second;
      double scale = std::ldexp(1.0, kExponent);
      if (rule.is_mx()) {
        const std::uint8_t byte = coded.scales[static_cast<std::size_t>(
            r / rule.block_rows * rule.scale_cols(cols) + c / across)];
        ASSERT_EQ(byte, amax == 0 ? 0 : expected_exponent(amax, rule.scale_rule) + 127);
        scale = std::ldexp(1.0, byte - 127);
      }
      const auto at = static_cast<std::size_t>(r * cols + c);
      const double value = to_float(x[at]);
      const int m = amax == 0 ? 0 : nearest(std::abs(value) / scale);
      const int code = m | (value < 0 && m > 0 ? 0x80 : 0);
      ASSERT_EQ(coded.codes[at], code) << "row " << r << ", column " << c;
      ASSERT_EQ(to_float(values[at]), (value < 0 ? -1 : 1) * worth(m) * (amax == 0 ? 0 : scale));
    }
  }
}

TEST(Fp8, QuantizesAsRead) {
  for (const ScaleRule rule :
       {ScaleRule::kMxFloor, ScaleRule::kMxEven, ScaleRule::kMxCeil, ScaleRule::kMxRceil}) {
    expect_as_read(e4m3(32, 1, rule), 12, 96, 12);
  }
  expect_as_read(kRow, 5, 256, 6);
  expect_as_read(e4m3(64, 1, ScaleRule::kMxRceil), 5, 64, 60);
  expect_as_read(kFixed, 8, 64, 8);
}

// Blocks at the edges are smaller, and one row of scales serves 128 rows.
TEST(Fp8, BlocksOfRowsEndWhereTheMatrixEnds) {
  expect_as_read(kTile, 130, 200, 4);
  expect_as_read(kTile, 20, 48, 30);
}

TEST(Fp8, EveryValueIsABf16Number) {
  for (int byte = 0; byte <= most_scale_byte(kMxfp8); ++byte) {
    const float scale = mx_value(kMxfp8, static_cast<std::uint8_t>(byte));
    if (byte < 3) {
      EXPECT_EQ(scale, 0.0f);
    }
    for (int code = 0; code <= 126; ++code) {
      const float value = to_float(static_cast<E4m3>(static_cast<std::uint8_t>(code))) * scale;
      ASSERT_EQ(to_float(to_bf16(value)), value) << byte << " " << code;
      ASSERT_EQ(static_cast<double>(value), worth(code) * static_cast<double>(scale));
    }
  }
}

TEST(Fp8, R04_ZeroAndNonfiniteRowsAreZeros) {
  for (const Quantizer& rule : {kMxfp8, kRow, kFixed}) {
    std::vector<Bf16> x(3 * 128, to_bf16(-3.0f));
    std::fill_n(x.begin(), 128, Bf16{0x8000});
    x[200] = Bf16{0x7F80};
    Coded coded(rule, x, 3);
    EXPECT_TRUE(std::all_of(coded.codes.begin(), coded.codes.begin() + 256,
                            [](std::uint8_t code) { return code == 0; }));
    EXPECT_NE(coded.codes[256], 0);
    EXPECT_EQ(coded.counts[kNonfiniteRows], 1);
    for (std::int64_t i = 0; i < 2 * rule.scale_cols(128); ++i) {
      EXPECT_EQ(coded.scales[static_cast<std::size_t>(i)], 0);
    }
  }
}

TEST(Fp8, WhatIsAboveTheFixedScaleSaturatesAndIsCounted) {
  std::vector<Bf16> x(4 * 16, Bf16{});
  x[0] = to_bf16(std::ldexp(464.0f, kExponent));  // a tie, to 448
  x[16] = to_bf16(std::ldexp(466.0f, kExponent));
  x[33] = to_bf16(-1e30f);
  Coded coded(kFixed, x, 4);
  EXPECT_EQ(coded.codes[0], 0x7E);
  EXPECT_EQ(coded.codes[16], 0x7E);
  EXPECT_EQ(coded.codes[33], 0xFE);
  EXPECT_EQ(coded.counts[kSaturatedBlocks], 2);
  EXPECT_EQ(coded.counts[kBlocks], 4);
  EXPECT_EQ(coded.counts[kZeroBlocks], 1);
}

TEST(Fp8, MistakesAndDamageAreNamed) {
  std::vector<Bf16> x(64, to_bf16(1.0f));
  Coded coded(kMxfp8, x, 2);
  coded.codes[40] = 0x7F;
  EXPECT_THROW(coded.values(), Error);
  coded.codes[40] = 1;
  coded.scales[1] = 0xFF;
  EXPECT_THROW(coded.values(), Error);
  Quantizer odd = kMxfp8;
  odd.scale = ScaleFormat::kE4m3;
  EXPECT_THROW(Coded(odd, x, 2), Error);
}

// ---- Guided rounding ----

Bf16 step(Bf16 x, int by) {
  // BF16 numbers in order, through zero.
  const int bits = bits_of(x);
  const int order = ((bits & 0x8000) != 0 ? -(bits & 0x7FFF) : bits) + by;
  return static_cast<Bf16>(static_cast<std::uint16_t>(order < 0 ? 0x8000 | -order : order));
}

float guided(float x, std::uint32_t bit) {
  const std::uint32_t m = guided_by_bit(e4m3_bracket(std::abs(x)), bit);
  const float value = to_float(static_cast<E4m3>(static_cast<std::uint8_t>(m)));
  return x < 0 ? -value : value;
}

// All BF16 numbers that round to a finite code, against all that lie within the radius.
TEST(GuidedE4m3, OneBitIsExactWithinHalfTheNearerGap) {
  std::int64_t pairs = 0;
  for (int bits = 0x3500; bits < 0x4420; bits += bits < 0x3A00 ? 16 : 1) {  // 2^-21 to 640
    const auto roll = static_cast<Bf16>(static_cast<std::uint16_t>(bits));
    const float x = to_float(roll);
    const E4m3 code = to_e4m3(x);
    const float radius = bits_of(code) < 8 ? 0x1p-10f : x / 31;
    for (const int direction : {-1, 1}) {
      Bf16 other = roll;
      while (std::abs(to_float(other) - x) < radius && to_float(other) < 1e3f) {
        ASSERT_EQ(guided(to_float(other), bits_of(code) & 1u), to_float(code))
            << x << " and " << to_float(other);
        ++pairs;
        // Near zero some of each binade will do.
        const bool tiny = std::abs(to_float(other)) < 0x1p-12f;
        other = step(other, direction * (tiny ? 32 : 1));
      }
    }
  }
  EXPECT_GT(pairs, 100000);
  std::cout << pairs << " pairs\n";
}

// Half the gap itself is too far: 1.8125 is a tie that goes to 1.75, and 1.875 opens the next cell.
TEST(GuidedE4m3, TheRadiusIsTight) {
  EXPECT_EQ(to_float(to_e4m3(1.8125f)), 1.75f);
  EXPECT_EQ(guided(to_float(step(to_bf16(1.875f), -1)), 0), 1.75f);
  EXPECT_EQ(guided(1.875f, 0), 2.0f);
}

TEST(GuidedE4m3, BracketsHoldOneCodeOfEachParity) {
  for (int bits = 0; bits < 0x7F80; ++bits) {
    const float z = to_float(static_cast<Bf16>(static_cast<std::uint16_t>(bits)));
    const auto m = static_cast<int>(e4m3_bracket(z));
    ASSERT_TRUE(m == 125 || z < worth(m + 1));
    ASSERT_GE(z, worth(m));
    const int near = bits_of(to_e4m3(z));
    ASSERT_TRUE(near == m || near == m + 1) << z;
  }
}

TEST(MxResidue, FindsTheByteOfEveryMaximumThatDriftedByLessThanTwo) {
  for (const Quantizer& rule :
       {kMxfp8, e4m3(32, 1, ScaleRule::kMxFloor), e4m3(32, 1, ScaleRule::kMxEven),
        e4m3(32, 1, ScaleRule::kMxCeil), mx_rule(ScaleRule::kMxFloor), mx_rule(ScaleRule::kMxEven),
        mx_rule(ScaleRule::kMxCeil), mx_rule(ScaleRule::kMxRceil)}) {
    for (int bits = 0x80; bits < 0x7F80; bits += 3) {
      const float amax = to_float(static_cast<Bf16>(static_cast<std::uint16_t>(bits)));
      const std::uint8_t byte = scale_byte(rule, amax, {});
      for (const float drift : {0.501f, 0.9f, 1.1f, 1.99f}) {
        if (!is_finite(amax * drift) || amax * drift < kFloatMinNormal) continue;
        const std::uint8_t own = scale_byte(rule, amax * drift, {});
        ASSERT_EQ(mx_byte_of_residue(rule, byte & 3u, own), byte) << amax << " * " << drift;
      }
    }
  }
}

constexpr std::array kModes = {Guidance::kOwnScale,     Guidance::kRolloutScale,
                               Guidance::kLsbScaleMod4, Guidance::kLsb,
                               Guidance::kFullGuided,   Guidance::kFullForced};

/// Two engines' numbers, `slots` rows a record.
struct Pair {
  Quantizer rule;
  std::int64_t rows, cols, slots;
  std::vector<Bf16> roll, train;

  Pair(const Quantizer& r, std::int64_t n, std::int64_t c, std::int64_t s, double drift)
      : rule(r), rows(n), cols(c), slots(s) {
    roll = random_values(static_cast<std::size_t>(n * c), 3, 2);
    for (std::size_t i = 0; i < roll.size(); ++i) {
      const double noise = 1 + drift * static_cast<double>(normal(4, i));
      train.push_back(to_bf16(static_cast<float>(static_cast<double>(to_float(roll[i])) * noise)));
    }
  }
  RowLayout layout(Guidance mode) const {
    const std::int32_t block = rule.is_mx() ? rule.block : 0;
    return {encoding_for(mode, rule), static_cast<std::int32_t>(cols * slots), block, 0};
  }
  std::vector<std::uint8_t> records(Guidance mode) {
    const RowLayout kept = layout(mode);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(rows / slots * kept.bytes()));
    if (bytes.empty()) return bytes;  // a fixed scale leaves nothing to record
    std::vector<std::uint8_t> codes(roll.size());
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows * rule.scale_cols(cols)));
    quantize({.x = matrix(roll, rows, cols),
              .rule = rule,
              .exponent = kExponent,
              .out = {matrix(codes, rows, cols), matrix(scales, rows, rule.scale_cols(cols)), {}},
              .layout = kept,
              .records = matrix(bytes, rows / slots, kept.bytes())});
    return bytes;
  }
  std::vector<Bf16> guide_by(Guidance mode, std::vector<std::uint8_t> records,
                             std::vector<std::int64_t>& counts) {
    std::vector<Bf16> out(train.size());
    counts.assign(kNumGuideCounts, 0);
    GuideArgs args = {.x = matrix(train, rows, cols), .rule = rule, .guidance = mode};
    args.out = matrix(out, rows, cols);
    args.exponent = kExponent;
    args.counts = {counts.data(), {kNumGuideCounts}, {1}, {}};
    if (mode != Guidance::kOwnScale) {
      args.layout = layout(mode);
      args.records = matrix(records, rows / slots, args.layout.bytes());
    }
    guide(args);
    return out;
  }
};

double expected(double x, double scale, Guidance mode, int code) {
  if (scale == 0) return 0;
  const double z = std::min(std::abs(x) / scale, 448.0);
  const int sign = std::signbit(x) ? -1 : 1;
  int m = 125;
  while (worth(m) > z) --m;
  const int recorded = (code & 0x80) != 0 ? -(code & 0x7F) : code & 0x7F;
  switch (mode) {
    case Guidance::kOwnScale:
    case Guidance::kRolloutScale: return sign * worth(nearest(z)) * scale;
    case Guidance::kLsb:
    case Guidance::kLsbScaleMod4: return sign * worth(m % 2 == code % 2 ? m : m + 1) * scale;
    case Guidance::kFullGuided: return sign * worth(std::clamp(sign * recorded, m, m + 1)) * scale;
    case Guidance::kFullForced: return (recorded < 0 ? -1 : 1) * worth(std::abs(recorded)) * scale;
  }
  return 0;
}

void expect_guided_as_read(Pair& pair) {
  Coded roll(pair.rule, pair.roll, pair.rows), own(pair.rule, pair.train, pair.rows);
  const std::int64_t blocks = pair.rule.scale_cols(pair.cols);
  for (const Guidance mode : kModes) {
    std::vector<std::int64_t> counts;
    const std::vector<Bf16> got = pair.guide_by(
        mode, mode == Guidance::kOwnScale ? std::vector<std::uint8_t>() : pair.records(mode),
        counts);
    for (std::size_t i = 0; i < got.size(); ++i) {
      double scale = std::ldexp(1.0, kExponent);
      if (pair.rule.is_mx()) {
        const auto col = static_cast<std::int64_t>(i) % pair.cols;
        const auto at = static_cast<std::size_t>(static_cast<std::int64_t>(i) / pair.cols * blocks +
                                                 col / pair.rule.block);
        int byte = mode == Guidance::kOwnScale ? own.scales[at] : roll.scales[at];
        if (mode == Guidance::kLsbScaleMod4) {
          int best = -1;
          for (int b = byte % 4; b <= 246; b += 4) {
            if (best < 0 || std::abs(b - own.scales[at]) < std::abs(best - own.scales[at]))
              best = b;
          }
          byte = best;
        }
        scale = byte < 3 ? 0 : std::ldexp(1.0, byte - 127);
      }
      const double want = expected(to_float(pair.train[i]), scale, mode, roll.codes[i]);
      ASSERT_EQ(to_float(got[i]), want) << "mode " << static_cast<int>(mode) << " element " << i;
    }
    EXPECT_EQ(counts[kCovered], mode == Guidance::kOwnScale ? 0 : pair.rows);
    EXPECT_EQ(counts[kDamaged] + counts[kNonfinite] + counts[kAbsent], 0);
  }
}

TEST(Fp8, GuidesAsReadInEveryMode) {
  for (const double drift : {0.0, 0.005, 0.3}) {
    for (const Quantizer& rule : {kMxfp8, kRow, kFixed}) {
      Pair rows(rule, 6, 256, 1, drift), slots(rule, 6, 128, 3, drift);
      expect_guided_as_read(rows);
      expect_guided_as_read(slots);
    }
    Pair shorter(e4m3(96, 1, ScaleRule::kMxRceil), 4, 96, 2, drift);
    expect_guided_as_read(shorter);
  }
}

TEST(Fp8, WithoutDriftEveryModeIsTheRollout) {
  for (const Quantizer& rule : {kMxfp8, kRow, kFixed}) {
    Pair pair(rule, 8, 128, 2, 0.0);
    const std::vector<Bf16> want = Coded(rule, pair.roll, 8).values();
    for (const Guidance mode : kModes) {
      std::vector<std::int64_t> counts;
      const std::vector<Bf16> got = pair.guide_by(
          mode, mode == Guidance::kOwnScale ? std::vector<std::uint8_t>() : pair.records(mode),
          counts);
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(to_float(got[i]), to_float(want[i]));
      EXPECT_EQ(counts[kMoved], 0);
    }
  }
}

TEST(Fp8, DamagedRecordsAreAbsent) {
  Pair pair(kMxfp8, 4, 64, 1, 0.1);
  std::vector<std::int64_t> counts;
  const std::vector<Bf16> own = pair.guide_by(Guidance::kOwnScale, {}, counts);
  std::vector<std::uint8_t> records = pair.records(Guidance::kFullForced);
  const auto bytes = static_cast<std::size_t>(pair.layout(Guidance::kFullForced).bytes());
  records[bytes + 5] = 0xFF;           // an element that is no number
  records[2 * bytes + 64 + 1] = 0xF7;  // a scale above 2^119
  const std::vector<Bf16> got = pair.guide_by(Guidance::kFullForced, records, counts);
  EXPECT_EQ(counts[kDamaged], 2);
  for (std::size_t i = 64; i < 192; ++i) EXPECT_EQ(got[i], own[i]);
}

TEST(Fp8, AuditCountsWhatParts) {
  for (const Quantizer& rule : {kMxfp8, kRow, kFixed}) {
    Pair pair(rule, 8, 256, 1, 0.02);
    std::vector<std::int64_t> counts, audited(kNumAuditCounts);
    std::vector<std::uint8_t> records = pair.records(Guidance::kFullForced);
    std::vector<Bf16> operand = pair.guide_by(Guidance::kFullForced, records, counts);
    const RowLayout layout = pair.layout(Guidance::kFullForced);
    audit({.x = matrix(pair.train, 8, 256),
           .operand = matrix(operand, 8, 256),
           .rule = rule,
           .layout = layout,
           .records = matrix(records, 8, layout.bytes()),
           .exponent = kExponent,
           .counts = {audited.data(), {kNumAuditCounts}, {1}, {}}});
    Coded roll(rule, pair.roll, 8), own(rule, pair.train, 8);
    std::int64_t codes = 0, values = 0;
    const std::vector<Bf16> a = roll.values(), b = own.values();
    for (std::size_t i = 0; i < a.size(); ++i) {
      codes += roll.codes[i] != own.codes[i];
      values += to_float(a[i]) != to_float(b[i]);
    }
    EXPECT_GT(codes, 100);
    EXPECT_EQ(audited[kAuditCodeFlips], codes);
    EXPECT_EQ(audited[kAuditFlips], values);
    EXPECT_EQ(audited[kAuditStillDiffer], 0);
    EXPECT_EQ(audited[kAuditCodes], 8 * 256);
    EXPECT_EQ(audited[kAuditBlocks], rule.is_mx() ? 8 * 256 / rule.block : 8);
    EXPECT_GT(audited[kAuditBeyond], 0);
    EXPECT_LT(audited[kAuditBeyond], codes);
  }
}

}  // namespace
}  // namespace lockstep::kernels
