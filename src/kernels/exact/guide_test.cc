#include "kernels/exact/guide.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"
#include "numerics/guided.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kToken = {.element = Element::kE2m1,
                              .scale = ScaleFormat::kE4m3,
                              .global = GlobalScale::kPerToken,
                              .global_is_power_of_two = true};
constexpr Quantizer kCache = {.element = Element::kE2m1,
                              .scale = ScaleFormat::kE4m3,
                              .global = GlobalScale::kStatic,
                              .global_is_power_of_two = true};
constexpr Quantizer kMx = {.element = Element::kE2m1,
                           .block = 32,
                           .scale = ScaleFormat::kE8m0,
                           .scale_rule = ScaleRule::kMxRceil};
constexpr Quantizer four_over_six(Quantizer rule, FourOverSix metric) {
  rule.denominator = 256;
  rule.four_over_six = metric;
  return rule;
}
constexpr Quantizer kToken46 = four_over_six(kToken, FourOverSix::kMse);
constexpr Quantizer kToken46Mae = four_over_six(kToken, FourOverSix::kMae);
constexpr Quantizer kCache46 = four_over_six(kCache, FourOverSix::kMse);
constexpr std::array kAllGuidance = {Guidance::kOwnScale,     Guidance::kRolloutScale,
                                     Guidance::kLsbScaleMod4, Guidance::kLsb,
                                     Guidance::kFullGuided,   Guidance::kFullForced};

template <typename T>
TensorView<T, 2> view(std::vector<std::remove_const_t<T>>& data, std::int64_t rows) {
  const std::int64_t cols = rows == 0 ? 0 : static_cast<std::int64_t>(data.size()) / rows;
  return {data.data(), {rows, cols}, {cols, 1}};
}

/// Rollout's values, the trainer's, and what quantize() made of the former.
struct Case {
  Quantizer rule;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t slots = 1;
  std::int8_t exponent = 0;
  std::vector<Bf16> roll{};
  std::vector<Bf16> train{};
  std::vector<std::uint8_t> codes{};
  std::vector<std::uint8_t> scales{};
  std::vector<float> global{};

  Case(Quantizer r, std::int64_t n, std::int64_t c, double drift, std::uint32_t seed,
       std::int64_t slots_of_record = 1)
      : rule(r), rows(n), cols(c), slots(slots_of_record) {
    for (std::int64_t i = 0; i < n * c; ++i) {
      const PhiloxWords w = philox(seed, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
      // Rows of different sizes, a few outliers, zeros here and there.
      double x =
          std::ldexp(unit(w[0], w[1]) + unit(w[1], w[0]) - 1, static_cast<int>(i / c % 9) * 3 - 9);
      if (w[2] % 61 == 0) x *= 30;
      if (w[2] % 17 == 1) x = 0;
      roll.push_back(to_bf16(static_cast<float>(x)));
      const double noise = unit(w[3], w[2]) * 2 - 1;
      train.push_back(to_bf16(static_cast<float>(x * (1 + drift * noise))));
    }
    codes.resize(static_cast<std::size_t>(n * c / 2));
    scales.resize(static_cast<std::size_t>(n * c / rule.block));
    global.resize(static_cast<std::size_t>(n));
    if (rule.global == GlobalScale::kStatic) exponent = -8;
  }

  PackedView<std::uint8_t> packed() {
    return {view<std::uint8_t>(codes, rows),
            view<std::uint8_t>(scales, rows),
            {global.data(), {rows}, {1}}};
  }
  RowLayout layout(Guidance guidance) const {
    const bool own = rule.global == GlobalScale::kPerToken;
    return {encoding_for(guidance, rule), static_cast<std::int32_t>(cols * slots), rule.block,
            own ? static_cast<std::int32_t>(slots) : 0};
  }
  std::vector<std::uint8_t> records(Guidance guidance) {
    const RowLayout l = layout(guidance);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(rows / slots * l.bytes()));
    QuantizeArgs args;
    args.x = view<const Bf16>(roll, rows);
    args.rule = rule;
    args.exponent = exponent;
    args.out = packed();
    args.layout = l;
    if (!bytes.empty()) args.records = view<std::uint8_t>(bytes, rows / slots);
    quantize(args);
    return bytes;
  }
  /// What the rollout computed with.
  std::vector<Bf16> rollout_values() {
    std::vector<Bf16> out(roll.size());
    DequantizeArgs args{packed(), rule, exponent};
    if (rule.is_mx()) args.codes.global = {};
    args.bf16 = view<Bf16>(out, rows);
    dequantize(args);
    return out;
  }
};

struct Guided {
  std::vector<Bf16> out;
  std::array<std::int64_t, kNumGuideCounts> counts{};
};

Guided run(Case& c, Guidance guidance, std::vector<std::uint8_t>& records, Isa isa,
           std::vector<std::uint8_t>* present = nullptr) {
  Guided result;
  result.out.resize(c.train.size(), Bf16{0xABCD});
  GuideArgs args;
  args.x = view<const Bf16>(c.train, c.rows);
  args.rule = c.rule;
  args.guidance = guidance;
  args.layout = c.layout(guidance);
  args.exponent = c.exponent;
  if (!records.empty()) args.records = view<std::uint8_t>(records, c.rows / c.slots);
  if (present != nullptr) args.present = {present->data(), {c.rows / c.slots}, {1}};
  args.out = view<Bf16>(result.out, c.rows);
  args.counts = {result.counts.data(), {kNumGuideCounts}, {1}};
  guide_on(args, isa);
  return result;
}

// ---- An independent reading of docs/methods.md, TRACE, in double, element by element ----

constexpr double kGrid[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

int nearest(double z) {
  int best = 0;
  for (int i = 1; i < 8; ++i) {
    const double here = std::abs(kGrid[i] - z);
    const double there = std::abs(kGrid[best] - z);
    if (here < there || (here == there && i % 2 == 0)) best = i;
  }
  return best;
}

double expected(double x, double scale, Guidance guidance, int bit, int code, bool& moved) {
  moved = false;
  if (scale == 0) return 0;
  const int sign = std::signbit(x) ? -1 : 1;
  const double z = std::min(std::abs(x) / scale, 6.0);
  int m = 6;
  while (kGrid[m] > z) --m;
  int k = sign * nearest(z);
  const int k_roll = (code & 8) != 0 ? -(code & 7) : code & 7;
  const int near = k;
  if (guidance == Guidance::kLsb || guidance == Guidance::kLsbScaleMod4) {
    k = sign * (m % 2 == bit ? m : m + 1);
  } else if (guidance == Guidance::kFullGuided) {
    k = sign * std::clamp(sign * k_roll, m, m + 1);
  } else if (guidance == Guidance::kFullForced) {
    k = k_roll;
  }
  moved = k != near;
  return (k < 0 ? -1 : 1) * kGrid[std::abs(k)] * scale;
}

double block_scale_of(double amax, int n) {
  return static_cast<double>(
             to_float(to_e4m3(static_cast<float>(amax * std::ldexp(1.0, -n) / 6)))) *
         std::ldexp(1.0, n);
}

/// Four over six by brute force: the losses of both maps.
double better_scale(const Case& c, std::int64_t row, std::int64_t block, double amax, int n) {
  const double four =
      static_cast<double>(to_float(to_e4m3(static_cast<float>(amax * std::ldexp(1.0, -n) / 4)))) *
      std::ldexp(1.0, n);
  const double six = block_scale_of(amax, n);
  double losses[2] = {0, 0};
  for (std::int64_t i = 0; i < c.rule.block; ++i) {
    const auto at = static_cast<std::size_t>(row * c.cols + block * c.rule.block + i);
    const double x = std::abs(to_float(c.train[at]));
    for (const bool map : {false, true}) {
      const double scale = map ? four : six;
      const double value = scale == 0 ? 0 : kGrid[nearest(x / scale)] * scale;
      const double lost = std::abs(value - x);
      losses[map] += c.rule.four_over_six == FourOverSix::kMae ? lost : lost * lost;
    }
  }
  return losses[1] < losses[0] ? four : six;
}

bool holds_a_six(const Case& c, std::int64_t row, std::int64_t block) {
  for (std::int64_t i = 0; i < c.rule.block; ++i) {
    const std::int64_t at = row * c.cols + block * c.rule.block + i;
    if ((c.codes[static_cast<std::size_t>(at / 2)] >> (at % 2 * 4) & 7) == 7) return true;
  }
  return false;
}

/// The scale that the trainer must use for a block.
double scale_for(const Case& c, Guidance guidance, std::int64_t row, std::int64_t block) {
  double own_amax = 0;
  double row_amax = 0;
  for (std::int64_t i = 0; i < c.cols; ++i) {
    const double a = std::abs(to_float(c.train[static_cast<std::size_t>(row * c.cols + i)]));
    row_amax = std::max(row_amax, a);
    if (i / c.rule.block == block) own_amax = std::max(own_amax, a);
  }
  const auto at = static_cast<std::size_t>(row * (c.cols / c.rule.block) + block);
  if (c.rule.is_mx()) {
    const int own = own_amax == 0 ? 0 : static_cast<int>(std::ceil(std::log2(own_amax / 6))) + 127;
    if (guidance == Guidance::kOwnScale) return std::ldexp(1.0, own - 127);
    if (guidance != Guidance::kLsbScaleMod4) return std::ldexp(1.0, c.scales[at] - 127);
    int best = c.scales[at] % 4;
    for (int byte = best; byte <= 252; byte += 4) {
      if (std::abs(byte - own) < std::abs(best - own)) best = byte;
    }
    return std::ldexp(1.0, best - 127);
  }
  int n = c.exponent;
  if (c.rule.global == GlobalScale::kPerToken) {
    n = guidance == Guidance::kOwnScale
            ? (row_amax == 0
                   ? 0
                   : static_cast<int>(std::ceil(std::log2(row_amax / 6 / c.rule.denominator))))
            : static_cast<int>(std::log2(c.global[static_cast<std::size_t>(row)]));
  }
  const bool maps = c.rule.four_over_six != FourOverSix::kOff;
  if (guidance == Guidance::kOwnScale) {
    return maps ? better_scale(c, row, block, own_amax, n) : block_scale_of(own_amax, n);
  }
  if (guidance != Guidance::kLsbScaleMod4) {
    return to_float(static_cast<E4m3>(c.scales[at])) * std::ldexp(1.0, n);
  }
  const bool four = maps && c.scales[at] != 0 && !holds_a_six(c, row, block);
  const auto y = static_cast<float>(own_amax * std::ldexp(1.0, -n)) / (four ? 4.0f : 6.0f);
  return to_float(scale_of_residue(c.scales[at] & 3u, y)) * std::ldexp(1.0, n);
}

int code_of(const Case& c, std::int64_t index) {
  return c.codes[static_cast<std::size_t>(index / 2)] >> (index % 2 * 4) & 15;
}

class GuideIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!has_isa(GetParam())) GTEST_SKIP() << "this machine does not have these instructions";
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, GuideIsa, testing::ValuesIn(kAllIsas));

TEST_P(GuideIsa, EqualsAnIndependentReadingInEveryMode) {
  std::vector<Case> cases;
  for (const double drift : {0.008, 0.2, 2.0}) {
    cases.emplace_back(kToken, 19, 128, drift, 1);
    cases.emplace_back(kToken, 12, 48, drift, 2, 3);  // slots whose residues share bytes
    cases.emplace_back(kToken, 5, 16, drift, 3);
    cases.emplace_back(kCache, 20, 64, drift, 4);
    cases.emplace_back(kMx, 9, 96, drift, 5);
    cases.emplace_back(kToken46, 19, 128, drift, 1);
    cases.emplace_back(kToken46Mae, 12, 48, drift, 2, 3);  // maps share bytes as well
    cases.emplace_back(kCache46, 20, 64, drift, 4);
  }
  for (Case& c : cases) {
    for (const Guidance guidance : kAllGuidance) {
      std::vector<std::uint8_t> records = c.records(guidance);
      const Guided got = run(c, guidance, records, GetParam());
      std::int64_t moved = 0;
      for (std::int64_t i = 0; i < c.rows * c.cols; ++i) {
        const std::int64_t row = i / c.cols;
        const double scale = scale_for(c, guidance, row, i % c.cols / c.rule.block);
        const int code = code_of(c, i);
        bool here = false;
        const double want = expected(to_float(c.train[static_cast<std::size_t>(i)]), scale,
                                     guidance, code & 1, code, here);
        moved += here;
        ASSERT_EQ(bits_of(got.out[static_cast<std::size_t>(i)]),
                  bits_of(to_bf16(static_cast<float>(want == 0 ? 0.0 : want))))
            << "guidance " << static_cast<int>(guidance) << " element " << i;
      }
      const bool guided = guidance != Guidance::kOwnScale;
      EXPECT_EQ(got.counts[kCovered], guided ? c.rows : 0);
      EXPECT_EQ(got.counts[kAbsent], 0);
      EXPECT_EQ(got.counts[kMoved], moved);
      EXPECT_EQ(got.counts[kDamaged] + got.counts[kNonfinite], 0);
    }
  }
}

TEST_P(GuideIsa, WithoutDriftEveryModeIsTheRollout) {
  for (const Quantizer& rule : {kToken, kCache, kMx, kToken46, kToken46Mae, kCache46}) {
    Case c(rule, 30, 128, 0.0, 7);
    for (const Guidance guidance : kAllGuidance) {
      std::vector<std::uint8_t> records = c.records(guidance);
      const Guided got = run(c, guidance, records, GetParam());
      const std::vector<Bf16> want = c.rollout_values();
      for (std::size_t i = 0; i < want.size(); ++i) {
        ASSERT_EQ(bits_of(got.out[i]), bits_of(want[i])) << static_cast<int>(guidance);
      }
      EXPECT_EQ(got.counts[kMoved], 0);
    }
  }
}

TEST_P(GuideIsa, SmallDriftIsErasedByOneBitUnderFourOverSix) {
  Case c(kToken46, 64, 128, 0.008, 8);
  std::vector<std::uint8_t> none;
  const Guided own = run(c, Guidance::kOwnScale, none, GetParam());
  for (const Guidance guidance : {Guidance::kLsb, Guidance::kLsbScaleMod4, Guidance::kFullGuided}) {
    std::vector<std::uint8_t> records = c.records(guidance);
    const Guided got = run(c, guidance, records, GetParam());
    const std::vector<Bf16> want = c.rollout_values();
    std::int64_t flips = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(bits_of(got.out[i]), bits_of(want[i])) << static_cast<int>(guidance) << " " << i;
      flips += own.out[i] != want[i];
    }
    EXPECT_GT(flips, 200) << "the trainer's own choice of maps must differ here and there";
    if (guidance != Guidance::kLsbScaleMod4) continue;
    // Without its map bit a residue names another scale.
    const RowLayout layout = c.layout(guidance);
    for (std::int64_t r = 0; r < c.rows; ++r) {
      std::uint8_t* maps = &records[static_cast<std::size_t>(
          r * layout.bytes() + layout.element_bytes() + layout.scale_bytes())];
      maps[0] = static_cast<std::uint8_t>(~maps[0]);
    }
    EXPECT_NE(run(c, guidance, records, GetParam()).out, want);
  }
}

TEST_P(GuideIsa, SmallDriftIsErasedByOneBit) {
  Case c(kToken, 64, 128, 0.008, 8);
  for (const Guidance guidance : {Guidance::kLsb, Guidance::kLsbScaleMod4, Guidance::kFullGuided}) {
    std::vector<std::uint8_t> records = c.records(guidance);
    const Guided got = run(c, guidance, records, GetParam());
    const std::vector<Bf16> want = c.rollout_values();
    for (std::size_t i = 0; i < want.size(); ++i) ASSERT_EQ(bits_of(got.out[i]), bits_of(want[i]));
    EXPECT_GT(got.counts[kMoved], 20);
  }
  std::vector<std::uint8_t> none;
  const Guided own = run(c, Guidance::kOwnScale, none, GetParam());
  const std::vector<Bf16> want = c.rollout_values();
  std::int64_t flips = 0;
  for (std::size_t i = 0; i < want.size(); ++i) flips += own.out[i] != want[i];
  EXPECT_GT(flips, 100);
}

TEST_P(GuideIsa, AbsentAndDamagedRowsAreTheTrainersOwn) {
  for (const Quantizer& rule : {kToken, kCache, kMx}) {
    Case c(rule, 12, 64, 0.05, 9);
    std::vector<std::uint8_t> none;
    const Guided own = run(c, Guidance::kOwnScale, none, GetParam());
    for (const Guidance guidance : kAllGuidance) {
      if (guidance == Guidance::kOwnScale) continue;
      std::vector<std::uint8_t> records = c.records(guidance);
      const Guided whole = run(c, guidance, records, GetParam());
      std::vector<std::uint8_t> present(12, 1);
      present[3] = 0;
      const RowLayout layout = c.layout(guidance);
      const bool has_bytes = guidance != Guidance::kLsbScaleMod4;
      // Row 5: a scale byte that no rollout writes. Row 8: an n out of range.
      if (has_bytes) {
        records[static_cast<std::size_t>(5 * layout.bytes() + layout.element_bytes() + 1)] = 0xFF;
      }
      if (layout.exponents > 0) records[static_cast<std::size_t>(9 * layout.bytes() - 1)] = 117;
      const Guided got = run(c, guidance, records, GetParam(), &present);
      std::int64_t absent = 1;
      for (std::int64_t r = 0; r < 12; ++r) {
        const bool damaged = (r == 5 && has_bytes) || (r == 8 && layout.exponents > 0);
        absent += damaged;
        const std::vector<Bf16>& want = r == 3 || damaged ? own.out : whole.out;
        for (std::size_t i = 0; i < 64; ++i) {
          const std::size_t at = static_cast<std::size_t>(r) * 64 + i;
          ASSERT_EQ(bits_of(got.out[at]), bits_of(want[at])) << "row " << r;
        }
      }
      EXPECT_EQ(got.counts[kAbsent], absent);
      EXPECT_EQ(got.counts[kCovered], 12 - absent);
      EXPECT_EQ(got.counts[kDamaged], absent - 1);
    }
  }
}

TEST_P(GuideIsa, ZeroScalesGiveZeroInEveryMode) {
  Case c(kToken, 2, 64, 0.0, 10);
  // The rollout saw zeros (row 0) or a block whose scale underflows (row 1); the trainer did not.
  for (std::size_t i = 0; i < 128; ++i) {
    c.roll[i] = to_bf16(i == 64 ? 1.0f : i < 64 || i >= 80 ? 0.0f : 1e-3f);
    c.train[i] = to_bf16(i % 2 == 0 ? 0.7f : -0.7f);
  }
  for (std::size_t i = 96; i < 112; ++i) c.roll[i] = to_bf16(-1e-9f);
  for (const Guidance guidance :
       {Guidance::kRolloutScale, Guidance::kLsb, Guidance::kFullGuided, Guidance::kFullForced}) {
    std::vector<std::uint8_t> records = c.records(guidance);
    const Guided got = run(c, guidance, records, GetParam());
    for (std::size_t i = 0; i < 128; ++i) {
      if (i >= 64 && i < 80) continue;
      ASSERT_EQ(bits_of(got.out[i]), 0) << i << " guidance " << static_cast<int>(guidance);
    }
  }
}

TEST_P(GuideIsa, RowsThatAreNotFiniteBecomeZero) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    Case c(kToken, 3, 32, 0.01, 11);
    for (const Guidance guidance : kAllGuidance) {
      std::vector<std::uint8_t> records = c.records(guidance);
      const Guided clean = run(c, guidance, records, GetParam());
      const Bf16 kept = c.train[40];
      c.train[40] = to_bf16(bad);
      const Guided got = run(c, guidance, records, GetParam());
      c.train[40] = kept;
      for (std::size_t i = 0; i < 96; ++i) {
        const bool in_row = i >= 32 && i < 64;
        ASSERT_EQ(bits_of(got.out[i]), in_row ? 0 : bits_of(clean.out[i])) << i;
      }
      EXPECT_EQ(got.counts[kNonfinite], 1);
    }
  }
}

TEST_P(GuideIsa, InPlaceAndStrided) {
  Case c(kToken, 7, 32, 0.1, 12);
  std::vector<std::uint8_t> records = c.records(Guidance::kLsb);
  const Guided want = run(c, Guidance::kLsb, records, GetParam());
  std::vector<Bf16> wide(7 * 48, Bf16{0x1234});
  for (std::size_t i = 0; i < 7 * 32; ++i) wide[i / 32 * 48 + i % 32] = c.train[i];
  GuideArgs args;
  args.x = {wide.data(), {7, 32}, {48, 1}};
  args.rule = c.rule;
  args.guidance = Guidance::kLsb;
  args.layout = c.layout(Guidance::kLsb);
  args.records = view<std::uint8_t>(records, 7);
  args.out = {wide.data(), {7, 32}, {48, 1}};
  guide_on(args, GetParam());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    const bool inside = i % 48 < 32;
    EXPECT_EQ(bits_of(wide[i]), inside ? bits_of(want.out[i / 48 * 32 + i % 48]) : 0x1234);
  }
}

TEST_P(GuideIsa, R23_FullCodesUndoAnotherSourcePrecision) {
  // The rollout quantized FP32 registers, the trainer BF16: other codes, one step away at most.
  const std::int64_t rows = 32;
  Case c(kToken, rows, 128, 0.0, 13);
  std::vector<std::uint8_t> records = c.records(Guidance::kFullGuided);
  const RowLayout layout = c.layout(Guidance::kFullGuided);
  std::int64_t flips = 0;
  for (std::int64_t i = 0; i < rows * 128; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const double scale = scale_for(c, Guidance::kFullGuided, i / 128, i % 128 / 16);
    // Any FP32 number that rounds to the trainer's BF16 one.
    const std::uint32_t below = philox(3, philox_counter(at, 0, 0))[0] % 0xFFFF;
    const float x = to_float(c.train[at]);
    const float source = float_of(float_bits(x) + below - 0x7FFF);
    const E2m1 code = x == 0 ? E2m1{0} : to_e2m1_scaled(source, static_cast<float>(scale));
    flips += bits_of(code) != code_of(c, i);
    std::uint8_t& byte = records[static_cast<std::size_t>(i / 128 * layout.bytes() + i % 128 / 2)];
    byte = static_cast<std::uint8_t>(i % 2 == 0 ? (byte & 0xF0) | bits_of(code)
                                                : (byte & 0x0F) | bits_of(code) << 4);
  }
  EXPECT_GT(flips, 10);
  const Guided got = run(c, Guidance::kFullGuided, records, GetParam());
  for (std::int64_t i = 0; i < rows * 128; ++i) {
    const int code =
        records[static_cast<std::size_t>(i / 128 * layout.bytes() + i % 128 / 2)] >> (i % 2 * 4) &
        15;
    const float scale =
        static_cast<float>(scale_for(c, Guidance::kFullGuided, i / 128, i % 128 / 16));
    ASSERT_EQ(to_float(got.out[static_cast<std::size_t>(i)]),
              to_float(static_cast<E2m1>(static_cast<std::uint8_t>(code))) * scale);
  }
  EXPECT_EQ(got.counts[kMoved], flips);
}

TEST(Guide, R44_NoRowsIsNoWork) {
  Case c(kToken, 0, 0, 0.0, 14);
  std::array<std::int64_t, 3> counts{};
  GuideArgs args;
  args.x = {nullptr, {0, 128}, {128, 1}};
  args.rule = kToken;
  args.guidance = Guidance::kLsb;
  args.layout = {Encoding::kLsb, 128, 16, 1};
  args.records = {nullptr, {0, args.layout.bytes()}, {args.layout.bytes(), 1}};
  args.out = {nullptr, {0, 128}, {128, 1}};
  args.counts = {counts.data(), {3}, {1}};
  guide(args);
  EXPECT_EQ(counts[kCovered], 0);
}

TEST(Guide, WeightsShareOneExponent) {
  Case c(kToken, 6, 64, 0.3, 15);
  Quantizer weight = kToken;
  weight.global = GlobalScale::kPerTensor;
  c.rule = weight;
  c.roll = c.train;
  c.records(Guidance::kOwnScale);
  const std::vector<Bf16> want = c.rollout_values();
  std::vector<std::uint8_t> none;
  const Guided got = run(c, Guidance::kOwnScale, none, best_isa());
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_EQ(bits_of(got.out[i]), bits_of(want[i]));
}

std::string message_of(const GuideArgs& args) {
  try {
    guide(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Guide, NamesWhatIsWrong) {
  Case c(kToken, 4, 32, 0.0, 16);
  std::vector<std::uint8_t> records = c.records(Guidance::kLsb);
  std::vector<Bf16> out(c.train.size());
  GuideArgs args;
  args.x = view<const Bf16>(c.train, 4);
  args.rule = kToken;
  args.guidance = Guidance::kLsb;
  args.layout = c.layout(Guidance::kLsb);
  args.records = view<std::uint8_t>(records, 4);
  args.out = view<Bf16>(out, 4);
  EXPECT_EQ(message_of(args), "");
  GuideArgs wrong = args;
  wrong.guidance = Guidance::kFullForced;
  EXPECT_NE(message_of(wrong).find("layout.encoding is 3"), std::string::npos);
  wrong = args;
  wrong.layout.exponents = 0;
  EXPECT_NE(message_of(wrong).find("layout.exponents is 0"), std::string::npos);
  wrong = args;
  wrong.records.shape[0] = 3;
  EXPECT_NE(message_of(wrong).find("records are [3, 7], must be [4, 7]"), std::string::npos);
  wrong = args;
  wrong.rule.tie = Tie::kAway;
  EXPECT_NE(message_of(wrong).find("dialect"), std::string::npos);
  wrong = args;
  wrong.rule.four_over_six = FourOverSix::kMse;  // of denominator 448
  EXPECT_NE(message_of(wrong).find("power-of-two"), std::string::npos);
  wrong = args;
  wrong.rule = kMx;
  EXPECT_NE(message_of(wrong).find("layout.block is 16, the rule's is 32"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::kernels
