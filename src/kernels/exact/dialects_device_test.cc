/// What only some contracts ask for, on every device against the CPU, byte for byte: FP32 global
/// scales in the product, macro blocks, halves of a product, rounding that no record can guide.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/halves.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/residual.h"
#include "kernels/exact/w4a4_testing.h"

namespace lockstep::kernels {
namespace {

class DialectOn : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, DialectOn, testing::ValuesIn(devices()), name_of_device);

template <typename T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

Quantizer fp32(StoredGlobal stored) {
  Quantizer rule = kLockstep;
  rule.global_is_power_of_two = false;
  rule.stored_global = stored;
  return rule;
}

/// Global scales that no rounding made one power of two, subnormal ones and 0 among them.
void unround(Codes& codes, std::uint32_t seed, bool one) {
  for (std::size_t r = 0; r < codes.global.size(); ++r) {
    const std::uint32_t bits = word(seed, one ? 0 : static_cast<std::uint32_t>(r));
    codes.global[r] *= 1.0f + static_cast<float>(bits % 65536) / 65536.0f;
    if (!one && r % 7 == 3) codes.global[r] = std::numeric_limits<float>::denorm_min() * 77;
    if (!one && r % 7 == 5) codes.global[r] = 0.0f;
    // Many sums are subnormal by the exponent of a normal scale, and ties once rounded to that.
    if (!one && r % 7 == 1) codes.global[r] = 0x1p-130f;
    if (!one && r % 7 == 2) codes.global[r] = 0x1.8p-133f;
  }
}

std::vector<float> scaled_product(const Codes& a, const Quantizer& rule,
                                  const std::vector<Codes>& w, const Quantizer& rule_w,
                                  Device device) {
  const std::vector<std::int32_t> offsets = {0, 0, 5, 9, 20}, from = {3, 1, 1, 0, 7, 8, 2, 9, 4, 5,
                                                                      6, 6, 0, 1, 2, 3, 4, 9, 8, 7};
  std::vector<std::int32_t> to;
  for (std::int32_t i = 0; i < 20; ++i) to.push_back(19 - i);
  const std::int64_t out = w[0].rows;
  const OnDevice a_on(a, device);
  Experts experts({w.begin(), w.end()}, device);  // by the default rule; filled anew
  experts.view.scaled = true;
  for (std::size_t e = 0; e < w.size(); ++e) {
    const OnDevice rows(w[e], device);
    w4a4_fill(experts.view, static_cast<std::int32_t>(e), 0, rows.view, {}, rule_w);
    synchronize(device);
  }
  const Buffer offsets_on = to_device(offsets, device), from_on = to_device(from, device);
  const Buffer to_on = to_device(to, device), room(device, 4 * a.rows);
  const Buffer y = to_device(std::vector<float>(static_cast<std::size_t>(20 * out), -3.0f), device);
  w4a4({.a = a_on.view,
        .w = experts.view,
        .offsets = index_view(offsets_on),
        .from = index_view(from_on),
        .to = index_view(to_on),
        .out = {y.as<float>(), {20, out}, {out, 1}, device},
        .rule = rule,
        .room = {room.as<float>(), static_cast<std::size_t>(a.rows)}});
  return to_host<float>(y);
}

TEST_P(DialectOn, Fp32GlobalScalesInTheProduct) {
  const std::array rules = {fp32(StoredGlobal::kDecode), fp32(StoredGlobal::kEncode),
                            fp32(StoredGlobal::kAmax), kLockstep};
  for (const Quantizer& rule_a : rules) {
    for (const Quantizer& rule_w : rules) {
      Codes a = random_codes(10, 192, 5, 20, false);
      if (!rule_a.global_is_power_of_two) unround(a, 6, false);
      if (rule_a.stored_global == StoredGlobal::kEncode) {
        for (float& g : a.global) g = g > 1e-30f ? g : 3.0f;  // 1 / g is finite
      }
      std::vector<Codes> w;
      for (std::uint32_t e = 0; e < 4; ++e) {
        w.push_back(random_codes(40, 192, 20 + e, 20, true));
        if (!rule_w.global_is_power_of_two) unround(w.back(), 30 + e, true);
        for (float& g : w.back().global) g *= power_of_two(-8 * static_cast<int>(e % 3));
      }
      EXPECT_TRUE(same_bytes(scaled_product(a, rule_a, w, rule_w, GetParam()),
                             scaled_product(a, rule_a, w, rule_w, {})));
    }
  }
}

/// Numbers of all sizes; of the last rows one is zero, one not finite, one as large as they get.
std::vector<Bf16> numbers(std::int64_t rows, std::int64_t cols) {
  std::vector<Bf16> x;
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    const std::uint32_t bits = word(9, static_cast<std::uint32_t>(i));
    const float size = std::ldexp(1.0f, static_cast<int>(i / cols % 9) * 4 - 20);
    x.push_back(to_bf16((static_cast<float>(bits % 65536) / 32768.0f - 1.0f) * size));
  }
  const auto row = [&](std::int64_t r) { return x.begin() + (rows - r) * cols; };
  std::fill_n(row(1), cols, to_bf16(0.0f));
  *(row(2) + 5) = to_bf16(std::numeric_limits<float>::infinity());
  std::fill_n(row(3), cols, to_bf16(3.3e38f));
  std::fill_n(row(4), cols, to_bf16(std::ldexp(1.0f, -130)));
  return x;
}

/// What quantize(), dequantize() and the dense second pass leave under macro blocks.
struct MacroResult {
  std::vector<std::uint8_t> codes, scales, mantissas, nonfinite;
  std::vector<float> global, values;
  std::vector<Bf16> rounded, sums;
  std::vector<std::int64_t> counts;
};

MacroResult in_macro_blocks(const Quantizer& rule, std::int64_t cols, bool f32, Device device) {
  constexpr std::int64_t kRows = 37;
  const std::vector<Bf16> x = numbers(kRows, cols);
  std::vector<float> wide(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) wide[i] = to_float(x[i]) * 1.0001f;
  const Buffer bf16_on = to_device(x, device), f32_on = to_device(wide, device);
  struct Packed {
    Packed(const Quantizer& rule, std::int64_t cols, Device device)
        : codes(device, kRows * rule.code_bytes(cols)),
          scales(device, kRows * rule.scale_cols(cols)),
          mantissas(device, kRows * rule.macro_cols(cols)),
          global(device, kRows * 4) {
      const auto bytes = [&](const Buffer& of, std::int64_t width) {
        return TensorView<std::uint8_t, 2>{
            of.as<std::uint8_t>(), {kRows, width}, {width, 1}, device};
      };
      view = {.codes = bytes(codes, rule.code_bytes(cols)),
              .scales = bytes(scales, rule.scale_cols(cols)),
              .global = {global.as<float>(), {kRows}, {1}, device},
              .mantissas = bytes(mantissas, rule.macro_cols(cols))};
    }
    Buffer codes, scales, mantissas, global;
    PackedView<std::uint8_t> view;
  };
  const Packed main(rule, cols, device), rest(rule, cols, device);
  const Buffer nonfinite(device, kRows);
  const Buffer counts = to_device(std::vector<std::int64_t>(kNumQuantizeCounts, 2), device);
  const TensorView<const Bf16, 2> view = {bf16_on.as<Bf16>(), {kRows, cols}, {cols, 1}, device};
  QuantizeArgs args = {.rule = rule,
                       .out = main.view,
                       .nonfinite = {nonfinite.as<std::uint8_t>(), {kRows}, {1}, device},
                       .counts = {counts.as<std::int64_t>(), {kNumQuantizeCounts}, {1}, device}};
  if (f32) {
    args.x_f32 = {f32_on.as<float>(), {kRows, cols}, {cols, 1}, device};
  } else {
    args.x = view;
  }
  quantize(args);
  const Buffer values(device, kRows * cols * 4), rounded(device, kRows * cols * 2);
  const TensorView<Bf16, 2> rounded_view = {rounded.as<Bf16>(), {kRows, cols}, {cols, 1}, device};
  dequantize({.codes = main.view,
              .rule = rule,
              .bf16 = rounded_view,
              .f32 = {values.as<float>(), {kRows, cols}, {cols, 1}, device}});
  MacroResult result = {.codes = to_host<std::uint8_t>(main.codes),
                        .scales = to_host<std::uint8_t>(main.scales),
                        .mantissas = to_host<std::uint8_t>(main.mantissas),
                        .nonfinite = to_host<std::uint8_t>(nonfinite),
                        .global = to_host<float>(main.global),
                        .values = to_host<float>(values),
                        .rounded = to_host<Bf16>(rounded),
                        .sums = {},
                        .counts = to_host<std::int64_t>(counts)};
  const Buffer lost(device, kRows * cols * 4);
  residual_of(view, rule, main.view, rest.view,
              {lost.as<float>(), {kRows, cols}, {cols, 1}, device}, {});
  add_residual(main.view, rest.view, rule, 0.5f, rounded_view);
  result.sums = to_host<Bf16>(rounded);
  return result;
}

TEST_P(DialectOn, MacroBlocks) {
  for (const ScaleRule scale :
       {ScaleRule::kMxFloor, ScaleRule::kMxEven, ScaleRule::kMxCeil, ScaleRule::kMxRceil}) {
    for (const std::int64_t cols : {32, 128, 160, 2048}) {
      for (const bool f32 : {false, true}) {
        const Quantizer rule = macro_rule(scale);
        const MacroResult here = in_macro_blocks(rule, cols, f32, GetParam());
        const MacroResult cpu = in_macro_blocks(rule, cols, f32, {});
        SCOPED_TRACE(std::to_string(static_cast<int>(scale)) + ", " + std::to_string(cols) +
                     (f32 ? " of FP32" : " of BF16"));
        EXPECT_TRUE(same_bytes(here.mantissas, cpu.mantissas));
        EXPECT_TRUE(same_bytes(here.scales, cpu.scales));
        EXPECT_TRUE(same_bytes(here.codes, cpu.codes));
        EXPECT_TRUE(same_bytes(here.global, cpu.global));
        EXPECT_EQ(here.nonfinite, cpu.nonfinite);
        EXPECT_EQ(here.counts, cpu.counts);
        EXPECT_TRUE(same_bytes(here.values, cpu.values));
        EXPECT_TRUE(same_bytes(here.rounded, cpu.rounded));
        EXPECT_TRUE(same_bytes(here.sums, cpu.sums));
      }
    }
  }
}

TEST_P(DialectOn, HalvesOfAProduct) {
  const Codes codes = random_codes(9, 96, 3, 10, false);
  const OnDevice from(codes, GetParam());
  for (const bool first : {true, false}) {
    Codes zeros = codes;
    std::fill(zeros.codes.begin(), zeros.codes.end(), std::uint8_t{0x55});
    const OnDevice room(zeros, GetParam());
    const PackedView<std::uint8_t> to = {
        {room.codes.as<std::uint8_t>(), {9, 48}, {48, 1}, GetParam()},
        {room.scales.as<std::uint8_t>(), {9, 6}, {6, 1}, GetParam()},
        {room.global.as<float>(), {9}, {1}, GetParam()}};
    keep_half(from.view, first, to);
    const auto kept = to_host<std::uint8_t>(room.codes);
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const bool stays = (i % 48 < 24) == first;
      EXPECT_EQ(kept[i], stays ? codes.codes[i] : 0) << i;
    }
    EXPECT_EQ(to_host<std::uint8_t>(room.scales), codes.scales);
    EXPECT_EQ(to_host<float>(room.global), codes.global);
    EXPECT_THROW(keep_half(from.view, first, {{}, to.scales, to.global}), Error);
  }
  const std::vector<float> a = {1.0f, 1.00390625f, -3.14159f, 1e-39f}, b = {2.0f, 1e-3f, 7.77f, 0};
  const Buffer sum = to_device(a, GetParam()), other = to_device(b, GetParam());
  add_halves({other.as<float>(), {2, 2}, {2, 1}, GetParam()},
             {sum.as<float>(), {2, 2}, {2, 1}, GetParam()});
  const std::vector<float> sums = to_host<float>(sum);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(sums[i], to_float(to_bf16(a[i])) + to_float(to_bf16(b[i])));
  }
}

std::vector<Bf16> rounded_alone(const Quantizer& rule, Device device, std::int64_t& nonfinite) {
  constexpr std::int64_t kRows = 21, kCols = 256;
  const Buffer x = to_device(numbers(kRows, kCols), device), out(device, kRows * kCols * 2);
  const Buffer counts = to_device(std::vector<std::int64_t>(kNumGuideCounts, 1), device);
  guide({.x = {x.as<Bf16>(), {kRows, kCols}, {kCols, 1}, device},
         .rule = rule,
         .out = {out.as<Bf16>(), {kRows, kCols}, {kCols, 1}, device},
         .counts = {counts.as<std::int64_t>(), {kNumGuideCounts}, {1}, device}},
        {});
  nonfinite = to_host<std::int64_t>(counts)[kNonfinite];
  return to_host<Bf16>(out);
}

TEST_P(DialectOn, RoundingThatNoRecordGuides) {
  Quantizer te = fp32(StoredGlobal::kAmax);
  te.global = GlobalScale::kPerToken;
  te.scale_rule = ScaleRule::kTe;
  te.code_rule = CodeRule::kTe;
  te.sign_of_zero = SignOfZero::kKept;
  for (const Quantizer& rule : {te, macro_rule(ScaleRule::kMxRceil)}) {
    std::int64_t here = 0, cpu = 0;
    EXPECT_TRUE(same_bytes(rounded_alone(rule, GetParam(), here), rounded_alone(rule, {}, cpu)));
    EXPECT_EQ(here, cpu);
    EXPECT_GE(here, 2);  // of a row that holds Inf, and what leaves the range when it is stretched
  }
}

}  // namespace
}  // namespace lockstep::kernels
