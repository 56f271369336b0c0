// guide() on every device against its definition, byte for byte and count for count.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "device/testing.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "numerics/guided.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kToken = {.element = Element::kE2m1,
                              .scale = ScaleFormat::kE4m3,
                              .global = GlobalScale::kPerToken,
                              .global_is_power_of_two = true};
constexpr Quantizer with_global(Quantizer rule, GlobalScale global) {
  rule.global = global;
  return rule;
}
constexpr Quantizer four_over_six(Quantizer rule, FourOverSix metric) {
  rule.denominator = 256;
  rule.four_over_six = metric;
  return rule;
}
constexpr Quantizer mx(ScaleRule scale_rule, Element element = Element::kE2m1) {
  return {.element = element, .block = 32, .scale = ScaleFormat::kE8m0, .scale_rule = scale_rule};
}
constexpr Quantizer kCache = with_global(kToken, GlobalScale::kStatic);
constexpr Quantizer kWideCache = {
    .element = Element::kE4m3, .global = GlobalScale::kStatic, .global_is_power_of_two = true};
constexpr std::array kAllGuidance = {Guidance::kOwnScale,     Guidance::kRolloutScale,
                                     Guidance::kLsbScaleMod4, Guidance::kLsb,
                                     Guidance::kFullGuided,   Guidance::kFullForced};

/// What a call reads, on the host.
struct Case {
  Quantizer rule;
  Guidance guidance;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t slots = 1;
  std::int64_t x_stride = cols;
  std::vector<Bf16> x{};
  std::vector<std::uint8_t> records{};
  std::vector<std::uint8_t> present{};
  std::int8_t exponent = 0;

  RowLayout layout() const {
    const bool own = rule.global == GlobalScale::kPerToken;
    const bool scaled = rule.scale != ScaleFormat::kNone;
    return {encoding_for(guidance, rule), static_cast<std::int32_t>(cols * slots),
            scaled ? rule.block : 0, own ? static_cast<std::int32_t>(slots) : 0};
  }
};

struct Outcome {
  std::vector<Bf16> out;
  std::vector<std::int64_t> counts;
};

Outcome run(Case& c, Device device, bool definition) {
  std::vector<Bf16> out(static_cast<std::size_t>(c.rows * c.cols), Bf16{0xABCD});
  std::vector<std::int64_t> counts(kNumGuideCounts, 1000);
  const Buffer x = to_device(c.x, device);
  const Buffer records = to_device(c.records, device);
  const Buffer present = to_device(c.present, device);
  const Buffer to = to_device(out, device);
  const Buffer sums = to_device(counts, device);
  GuideArgs args;
  args.x = {x.as<const Bf16>(), {c.rows, c.cols}, {c.x_stride, 1}, device};
  args.rule = c.rule;
  args.guidance = c.guidance;
  args.layout = c.layout();
  args.exponent = c.exponent;
  const std::int64_t bytes = args.layout.bytes();
  if (c.guidance != Guidance::kOwnScale) {
    args.records = {
        records.as<const std::uint8_t>(), {c.rows / c.slots, bytes}, {bytes, 1}, device};
    if (bytes == 0) args.records.data = sums.as<const std::uint8_t>();
  }
  if (!c.present.empty()) {
    args.present = {present.as<const std::uint8_t>(), {c.rows / c.slots}, {1}, device};
  }
  args.out = {to.as<Bf16>(), {c.rows, c.cols}, {c.cols, 1}, device};
  args.counts = {sums.as<std::int64_t>(), {kNumGuideCounts}, {1}, device};
  if (definition) {
    guide_on(args, Isa::kPortable);
  } else {
    guide(args);
  }
  return {to_host<Bf16>(to), to_host<std::int64_t>(sums)};
}

void expect_the_definition(Case& c, Device device, const std::string& what) {
  const Outcome want = run(c, Device{}, true);
  const Outcome got = run(c, device, false);
  std::size_t different = 0;
  std::size_t first = 0;
  for (std::size_t i = want.out.size(); i-- > 0;) {
    if (got.out[i] == want.out[i]) continue;
    ++different;
    first = i;
  }
  EXPECT_EQ(different, 0u) << what << ": guidance " << static_cast<int>(c.guidance) << ", first at "
                           << first << " of row " << first / static_cast<std::size_t>(c.cols)
                           << ": x " << std::hex << bits_of(c.x[first]) << ", got "
                           << bits_of(got.out[first]) << ", not " << bits_of(want.out[first]);
  EXPECT_EQ(got.counts, want.counts) << what << ": guidance " << static_cast<int>(c.guidance);
}

std::uint32_t word_at(std::uint64_t i, std::uint32_t seed) {
  return philox(seed, philox_counter(i, 0, 0))[0];
}

/// Rows of different sizes with outliers and zeros, and the records of their like after a drift.
Case drifted(const Quantizer& rule, Guidance guidance, std::int64_t rows, std::int64_t cols,
             std::int64_t slots, double drift) {
  Case c{rule, guidance, rows, cols, slots};
  std::vector<Bf16> rollout;
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    const PhiloxWords w = philox(7, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
    double x =
        std::ldexp(unit(w[0], w[1]) + unit(w[1], w[0]) - 1, static_cast<int>(i / cols % 9) * 3 - 9);
    if (w[2] % 61 == 0) x *= 30;
    if (w[2] % 17 == 1) x = 0;
    rollout.push_back(to_bf16(static_cast<float>(x)));
    c.x.push_back(to_bf16(static_cast<float>(x * (1 + drift * (unit(w[3], w[2]) * 2 - 1)))));
  }
  if (rule.global == GlobalScale::kStatic) c.exponent = rule.is_wide() ? -6 : -8;
  const RowLayout layout = c.layout();
  c.records.resize(static_cast<std::size_t>(rows / slots * layout.bytes()));
  if (c.records.empty()) return c;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(rule.code_bytes(rows * cols)));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows * rule.scale_cols(cols)));
  std::vector<float> global(static_cast<std::size_t>(rows));
  QuantizeArgs args;
  args.x = {rollout.data(), {rows, cols}, {cols, 1}};
  args.rule = rule;
  args.exponent = c.exponent;
  args.out = {{codes.data(), {rows, rule.code_bytes(cols)}, {rule.code_bytes(cols), 1}},
              {scales.data(), {rows, rule.scale_cols(cols)}, {rule.scale_cols(cols), 1}},
              {global.data(), {rows}, {1}}};
  args.layout = layout;
  args.records = {c.records.data(), {rows / slots, layout.bytes()}, {layout.bytes(), 1}};
  quantize(args);
  return c;
}

/// Some rows absent, some damaged in each way, some not finite.
void damage(Case& c) {
  const auto records = static_cast<std::size_t>(c.rows / c.slots);
  const auto bytes = static_cast<std::size_t>(c.layout().bytes());
  c.present.assign(records, 1);
  for (std::size_t r = 0; r < records; ++r) {
    const std::uint32_t word = word_at(r, 8);
    if (word % 7 == 0) c.present[r] = 0;
    if (word % 7 == 1 && bytes > 0) {
      c.records[r * bytes + word / 7 % bytes] = 0xFF;
    }
    if (word % 7 == 2 && bytes > 0) c.records[(r + 1) * bytes - 1] = 117;
  }
  for (std::int64_t row = 0; row < c.rows; ++row) {
    const std::uint32_t word = word_at(static_cast<std::uint64_t>(row), 9);
    if (word % 5 != 0) continue;
    const float bad = word % 3 == 0   ? std::numeric_limits<float>::quiet_NaN()
                      : word % 3 == 1 ? std::numeric_limits<float>::infinity()
                                      : -std::numeric_limits<float>::infinity();
    c.x[static_cast<std::size_t>(row * c.x_stride + word / 15 % c.cols)] = to_bf16(bad);
  }
}

class GuideDevice : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, GuideDevice, testing::ValuesIn(devices()), name_of_device);

TEST_P(GuideDevice, EveryRuleModeAndShapeIsTheDefinition) {
  const struct {
    const char* name;
    Quantizer rule;
    std::int64_t rows, cols, slots;
  } cases[] = {
      {"token", kToken, 38, 128, 1},
      {"narrow", kToken, 37, 16, 1},
      {"slots", kToken, 24, 48, 3},
      {"w2_in", kToken, 24, 768, 8},
      {"w13_in", kToken, 19, 2048, 1},
      {"odd", kToken, 11, 1040, 1},
      {"wide", kToken, 7, 4112, 1},
      {"wide slots", kToken, 12, 2304, 3},
      {"wider", kCache, 5, 12304, 1},
      {"widest", kToken, 3, 16400, 1},
      {"cache", kCache, 40, 512, 1},
      {"mx", mx(ScaleRule::kMxRceil), 19, 96, 1},
      {"mx-even", mx(ScaleRule::kMxEven), 12, 2048, 1},
      {"mx-slots", mx(ScaleRule::kMxFloor), 24, 64, 4},
      {"mx-wide", mx(ScaleRule::kMxCeil), 5, 4096, 1},
      {"four-over-six", four_over_six(kToken, FourOverSix::kMse), 19, 128, 1},
      {"four-over-six-mae", four_over_six(kToken, FourOverSix::kMae), 24, 48, 3},
      {"four-over-six-cache", four_over_six(kCache, FourOverSix::kMse), 20, 64, 1},
      {"mxfp8", mx(ScaleRule::kMxFloor, Element::kE4m3), 19, 96, 1},
      {"fp8-cache", kWideCache, 20, 64, 1},
  };
  for (const auto& one : cases) {
    for (const Guidance guidance : kAllGuidance) {
      for (const double drift : {0.008, 2.0}) {
        Case c = drifted(one.rule, guidance, one.rows, one.cols, one.slots, drift);
        expect_the_definition(c, GetParam(), one.name);
        damage(c);
        expect_the_definition(c, GetParam(), std::string(one.name) + ", damaged");
      }
    }
  }
}

TEST_P(GuideDevice, WeightsShareOneExponent) {
  Case c = drifted(with_global(kToken, GlobalScale::kPerTensor), Guidance::kOwnScale, 70, 64, 1, 0);
  expect_the_definition(c, GetParam(), "weights");
  c.x[64] = to_bf16(std::numeric_limits<float>::infinity());  // its row has no part in n
  expect_the_definition(c, GetParam(), "weights, one row not finite");
}

TEST_P(GuideDevice, AnyStrideAndNoMoreThanItsRows) {
  for (const std::int64_t stride : {136, 131}) {
    Case c = drifted(kToken, Guidance::kLsb, 21, 128, 1, 0.1);
    std::vector<Bf16> wide(static_cast<std::size_t>(21 * stride), to_bf16(3e38f));
    for (std::int64_t i = 0; i < 21 * 128; ++i) {
      wide[static_cast<std::size_t>(i / 128 * stride + i % 128)] = c.x[static_cast<std::size_t>(i)];
    }
    c.x = wide;
    c.x_stride = stride;
    expect_the_definition(c, GetParam(), "stride " + std::to_string(stride));
  }
}

/// Every finite BF16 number under scale bytes and exponents from end to end.
TEST_P(GuideDevice, EveryNumberUnderEveryScaleIsTheDefinition) {
  const bool all = GetParam().kind == Device::Kind::kCuda;
  for (const Quantizer& rule : {kToken, mx(ScaleRule::kMxEven)}) {
    for (const Guidance guidance : kAllGuidance) {
      if (guidance == Guidance::kOwnScale) continue;
      for (const int n : {-116, -11, 3, 116}) {
        Case c{rule, guidance, 0, 2048};
        const RowLayout layout = c.layout();
        const std::uint32_t most = rule.is_mx() ? 252 : 126;
        if (rule.is_mx() && n != 3) continue;
        for (std::uint32_t byte = 0; byte <= most; byte += all ? 1 : 9) {
          for (std::uint32_t first = 0; first < 0x10000; first += 2048) {
            std::vector<std::uint8_t> record(static_cast<std::size_t>(layout.bytes()));
            for (std::int32_t i = 0; i < layout.element_bytes(); ++i) {
              record[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(
                  word_at(c.records.size() + static_cast<std::uint64_t>(i), 10));
            }
            for (std::int32_t i = 0; i < layout.scale_bytes(); ++i) {
              record[static_cast<std::size_t>(layout.element_bytes() + i)] =
                  static_cast<std::uint8_t>(guidance == Guidance::kLsbScaleMod4 ? byte * 37 : byte);
            }
            if (!rule.is_mx()) record.back() = static_cast<std::uint8_t>(n);
            c.records.insert(c.records.end(), record.begin(), record.end());
            for (std::uint32_t bits = first; bits < first + 2048; ++bits) {
              const bool finite = (bits & 0x7F80u) != 0x7F80u;
              c.x.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(finite ? bits : 0x8000u)));
            }
            ++c.rows;
          }
        }
        expect_the_definition(c, GetParam(), "n = " + std::to_string(n));
      }
    }
  }
}

/// Block maxima around every code of a scale, in steps of one BF16 number: own scales and residues.
TEST_P(GuideDevice, EveryBlockMaximumIsTheDefinition) {
  const std::uint32_t step = GetParam().kind == Device::Kind::kCuda ? 1 : 13;
  for (const Quantizer& rule : {kToken, kCache, mx(ScaleRule::kMxRceil), mx(ScaleRule::kMxEven),
                                mx(ScaleRule::kMxFloor), mx(ScaleRule::kMxCeil)}) {
    for (const Guidance guidance : {Guidance::kOwnScale, Guidance::kLsbScaleMod4}) {
      for (const int n : {-116, -20, 0, 40, 116}) {
        if (rule.is_mx() && n != 0) continue;
        Case c{rule, guidance, 0, rule.block};
        c.exponent = static_cast<std::int8_t>(n);
        const RowLayout layout = c.layout();
        for (std::uint32_t bits = 0; bits < 0x7F80u; bits += step) {
          for (std::int32_t i = 0; i < rule.block; ++i) {
            const std::uint32_t word = word_at(bits * 32u + static_cast<std::uint32_t>(i), 11);
            const std::uint32_t value = i == 3 ? bits : bits > 0 ? bits - word % 512 % bits : 0;
            c.x.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(value | (word & 0x8000u))));
          }
          for (std::int32_t i = 0; i < layout.bytes(); ++i) {
            c.records.push_back(static_cast<std::uint8_t>(word_at(c.records.size(), 12)));
          }
          if (layout.exponents > 0 && guidance == Guidance::kLsbScaleMod4) {
            c.records.back() = static_cast<std::uint8_t>(n);
          }
          ++c.rows;
        }
        expect_the_definition(c, GetParam(), "n = " + std::to_string(n));
      }
    }
  }
}

/// Drift below a quarter of the scale, and of the block's maximum below 3/31: guidance by one bit
/// gives the rollout's values back.
TEST_P(GuideDevice, SmallDriftIsErased) {
  for (const Guidance guidance : {Guidance::kLsb, Guidance::kLsbScaleMod4}) {
    Case c = drifted(kToken, guidance, 64, 2048, 1, 0.008);
    const Outcome guided = run(c, GetParam(), false);
    Case same = drifted(kToken, guidance, 64, 2048, 1, 0.0);
    const Outcome rollout = run(same, Device{}, true);
    EXPECT_EQ(guided.out, rollout.out);
    EXPECT_GT(guided.counts[kMoved], 1000);
  }
}

TEST_P(GuideDevice, NamesTwoDevices) {
  if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "two devices are needed";
  Case c = drifted(kToken, Guidance::kOwnScale, 4, 32, 1, 0.0);
  GuideArgs args;
  args.x = {c.x.data(), {4, 32}, {32, 1}};
  args.out = {c.x.data(), {4, 32}, {32, 1}, GetParam()};
  args.rule = kToken;
  EXPECT_THROW(guide(args), Error);
}

}  // namespace
}  // namespace lockstep::kernels
