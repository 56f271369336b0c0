#include "kernels/exact/quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/isa.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize_rows.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

Packed definition(const std::vector<Bf16>& x, std::int64_t rows, std::int64_t cols,
                  const Quantizer& rule, std::int32_t n, QuantizeCounts& counts) {
  Packed out(rows, cols, rule.block);
  for (std::int64_t r = 0; r < rows; ++r) {
    const Bf16* row = x.data() + r * cols;
    const GlobalNumbers global = rule.global == GlobalScale::kStatic
                                     ? global_of_exponent(n)
                                     : global_of_amax(rule, row_amax(row, cols));
    encode_row<Bf16>({row, cols, global, out.codes.data() + r * cols / 2,
                      out.scales.data() + r * cols / rule.block},
                     rule, counts);
    out.global[static_cast<std::size_t>(r)] = stored_global(rule, global);
  }
  return out;
}

TEST(Quantize, SimdReturnsTheDefinitionsBytesAndCounts) {
  Quantizer cache = kLockstep;
  cache.global = GlobalScale::kStatic;
  const std::vector<Quantizer> rules = {kLockstep,
                                        four_over_six(kLockstep, FourOverSix::kMse),
                                        four_over_six(kLockstep, FourOverSix::kMae),
                                        four_over_six(cache, FourOverSix::kMse),
                                        cache,
                                        mx_rule(ScaleRule::kMxFloor),
                                        mx_rule(ScaleRule::kMxEven),
                                        mx_rule(ScaleRule::kMxCeil),
                                        mx_rule(ScaleRule::kMxRceil)};
  for (const Quantizer& rule : rules) {
    ASSERT_EQ(simd_for(rule) == Simd::kNone, best_isa() == Isa::kPortable);
    for (const std::int64_t cols : {32, 96, 160, 2048, 2080}) {
      for (const int binades : {0, 3, 20, 130}) {
        const std::int64_t rows = 64;
        const auto x = random_values(static_cast<std::size_t>(rows * cols), 7, binades);
        const std::int32_t n = -9;
        QuantizeCounts counts{};
        const Packed expected = definition(x, rows, cols, rule, n, counts);
        for (const Simd simd : {Simd::kAvx2, Simd::kAvx512}) {
          if (!has_isa(simd == Simd::kAvx2 ? Isa::kAvx2 : Isa::kAvx512)) continue;
          QuantizeCounts simd_counts{};
          Packed out = expected;
          std::fill(out.codes.begin(), out.codes.end(), std::uint8_t{0x88});
          std::fill(out.scales.begin(), out.scales.end(), std::uint8_t{0x7F});
          std::vector<std::uint16_t> amaxes(static_cast<std::size_t>(cols / rule.block));
          for (std::int64_t r = 0; r < rows; ++r) {
            const Bf16* row = x.data() + r * cols;
            const std::uint16_t bits = block_amaxes(simd, row, cols, rule.block, amaxes.data());
            ASSERT_EQ(to_float(static_cast<Bf16>(bits)), row_amax(row, cols));
            const GlobalNumbers global =
                rule.global == GlobalScale::kStatic
                    ? global_of_exponent(n)
                    : global_of_amax(rule, to_float(static_cast<Bf16>(bits)));
            encode_row(simd,
                       {row, cols, global, out.codes.data() + r * cols / 2,
                        out.scales.data() + r * cols / rule.block},
                       rule, amaxes.data(), simd_counts);
          }
          ASSERT_EQ(out.scales, expected.scales) << cols << " " << binades;
          ASSERT_EQ(out.codes, expected.codes) << cols << " " << binades;
          ASSERT_EQ(simd_counts, counts) << cols << " " << binades;
        }
      }
    }
  }
}

TEST(Quantize, R11_EveryBackendOnThresholdsAndTheirNeighbours) {
  // A block a scale: the element that asks for it, then seven thresholds and their neighbours.
  std::vector<Bf16> x;
  for (int e = -6; e <= 6; ++e) {
    for (int m = 8; m < 16; ++m) {
      const auto scale = static_cast<float>(std::ldexp(m, e));
      for (const int step : {-1, 0, 1}) {
        x.push_back(to_bf16(6 * scale));
        for (const float mid : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) {
          const int bits = bits_of(to_bf16(mid * scale)) + step;
          x.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(bits)));
          x.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(bits | 0x8000)));
        }
        x.push_back(Bf16{0});
      }
    }
  }
  const auto cols = static_cast<std::int64_t>(x.size());
  QuantizeCounts counts{};
  Packed out = definition(x, 1, cols, kLockstep, 0, counts);
  const Packed expected = out;
  quantize({.x = matrix(x, 1, cols), .rule = kLockstep, .out = out.view()});
  EXPECT_EQ(out, expected);
}

/// Row `row` of codes as a record, bit by bit as the page that defines planes says it.
std::vector<std::uint8_t> slow_record(const Packed& packed, const RowLayout& layout,
                                      std::int64_t record) {
  std::vector<std::uint8_t> out(static_cast<std::size_t>(layout.bytes()));
  const std::int64_t slots = layout.width / packed.cols;
  const std::int64_t blocks = packed.cols / packed.block;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int64_t row = record * slots + slot;
    for (std::int64_t col = 0; col < packed.cols; ++col) {
      const auto i = static_cast<std::size_t>(slot * packed.cols + col);
      const int code = packed.code(row, col);
      const bool lsb =
          layout.encoding == Encoding::kLsb || layout.encoding == Encoding::kLsbScaleMod4;
      if (lsb) out[i / 8] = static_cast<std::uint8_t>(out[i / 8] | (code & 1) << (i % 8));
      if (layout.encoding == Encoding::kCodes) {
        out[i / 2] = static_cast<std::uint8_t>(out[i / 2] | code << (i % 2 * 4));
      }
    }
    for (std::int64_t block = 0; block < blocks; ++block) {
      const auto j = static_cast<std::size_t>(slot * blocks + block);
      const int byte = packed.scales[static_cast<std::size_t>(row * blocks + block)];
      std::uint8_t* scales = out.data() + layout.element_bytes();
      if (layout.encoding == Encoding::kLsbScaleMod4) {
        scales[j / 4] = static_cast<std::uint8_t>(scales[j / 4] | (byte & 3) << (j % 4 * 2));
      } else {
        scales[j] = static_cast<std::uint8_t>(byte);
      }
    }
    if (layout.exponents > 0) {
      const int n = exponent_of(packed.global[static_cast<std::size_t>(row)]);
      out[out.size() - static_cast<std::size_t>(slots - slot)] = static_cast<std::uint8_t>(n);
    }
  }
  return out;
}

TEST(Quantize, RecordsHoldTheSameCodesInEveryEncoding) {
  // Three slots of five blocks: their residues begin within bytes.
  for (const std::int64_t slots : {1, 3}) {
    const std::int64_t tokens = 5;
    const std::int64_t cols = 80;
    auto x = random_values(static_cast<std::size_t>(tokens * slots * cols), 3, 6);
    for (const Encoding encoding :
         {Encoding::kScale, Encoding::kLsb, Encoding::kLsbScaleMod4, Encoding::kCodes}) {
      for (const std::int64_t exponents : {std::int64_t{0}, slots}) {
        const RowLayout layout = {encoding, static_cast<std::int32_t>(slots * cols), 16,
                                  static_cast<std::int32_t>(exponents)};
        std::vector<std::uint8_t> records(static_cast<std::size_t>(tokens * layout.bytes()), 0xFF);
        Packed out(tokens * slots, cols, 16);
        quantize({.x = matrix(x, tokens * slots, cols),
                  .rule = kLockstep,
                  .out = out.view(),
                  .layout = layout,
                  .records = matrix(records, tokens, layout.bytes())});
        for (std::int64_t token = 0; token < tokens; ++token) {
          const auto begin = records.begin() + token * layout.bytes();
          EXPECT_EQ(std::vector<std::uint8_t>(begin, begin + layout.bytes()),
                    slow_record(out, layout, token));
        }
      }
    }
  }
}

TEST(Quantize, R04_ZeroRowIsZeroAndLeavesTheOthersAlone) {
  const std::int64_t cols = 64;
  auto x = random_values(4 * cols, 5, 2);
  std::fill(x.begin() + 2 * cols, x.begin() + 3 * cols, Bf16{0});
  Packed out(4, cols, 16);
  quantize({.x = matrix(x, 4, cols), .rule = kLockstep, .out = out.view()});
  EXPECT_EQ(out.global[2], 1.0f);
  std::vector<Bf16> without(x.begin(), x.begin() + 2 * cols);
  without.insert(without.end(), x.begin() + 3 * cols, x.end());
  Packed others(3, cols, 16);
  quantize({.x = matrix(without, 3, cols), .rule = kLockstep, .out = others.view()});
  std::vector<float> back(4 * cols, 1.0f);
  std::vector<float> expected(3 * cols, 1.0f);
  dequantize({.codes = out.view(), .rule = kLockstep, .f32 = matrix(back, 4, cols)});
  dequantize({.codes = others.view(), .rule = kLockstep, .f32 = matrix(expected, 3, cols)});
  for (std::int64_t i = 2 * cols; i < 3 * cols; ++i) {
    EXPECT_EQ(float_bits(back[static_cast<std::size_t>(i)]), 0u);
  }
  back.erase(back.begin() + 2 * cols, back.begin() + 3 * cols);
  EXPECT_EQ(back, expected);
}

TEST(Quantize, RowsThatAreNotFiniteAreZeroFlaggedAndAlone) {
  const std::int64_t cols = 64;
  for (const Quantizer& rule : {kLockstep, mx_rule(ScaleRule::kMxEven)}) {
    for (const int bad : {0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81}) {
      auto x = random_values(3 * cols, 5, 2);
      const auto clean = x;
      x[cols + 17] = static_cast<Bf16>(static_cast<std::uint16_t>(bad));
      Packed out(3, cols, rule.block);
      std::vector<std::uint8_t> flags(3, 9);
      std::vector<std::int64_t> counts(kNumQuantizeCounts);
      quantize({.x = matrix(x, 3, cols),
                .rule = rule,
                .out = out.view(),
                .nonfinite = {flags.data(), {3}, {1}, {}},
                .counts = {counts.data(), {kNumQuantizeCounts}, {1}, {}}});
      QuantizeCounts none{};
      Packed expected = definition(clean, 3, cols, rule, 0, none);
      std::fill_n(expected.codes.begin() + cols / 2, cols / 2, std::uint8_t{0});
      std::fill_n(expected.scales.begin() + cols / rule.block, cols / rule.block, std::uint8_t{0});
      expected.global[1] = 1.0f;
      EXPECT_EQ(out, expected);
      EXPECT_EQ(flags, (std::vector<std::uint8_t>{0, 1, 0}));
      EXPECT_EQ(counts[kNonfiniteRows], 1);
    }
  }
}

TEST(Quantize, ANonfiniteRowDoesNotMoveAMatrixsExponent) {
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  std::vector<Bf16> x(3 * 16, to_bf16(2688.0f));
  x[20] = static_cast<Bf16>(std::uint16_t{0x7F80});
  Packed out(3, 16, 16);
  quantize({.x = matrix(x, 3, 16), .rule = rule, .out = out.view()});
  EXPECT_EQ(out.global, std::vector<float>(3, 1.0f));
  EXPECT_EQ(out.scales, (std::vector<std::uint8_t>{kE4m3Max, 0, kE4m3Max}));
}

TEST(Quantize, NoCodeIsNegativeZero) {
  std::vector<Bf16> x(64);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = to_bf16(i % 16 == 0 ? 6.0f : -1e-9f);
  for (const Quantizer& rule : {kLockstep, mx_rule(ScaleRule::kMxFloor)}) {
    Packed out(1, 64, rule.block);
    quantize({.x = matrix(x, 1, 64), .rule = rule, .out = out.view()});
    for (std::int64_t i = 0; i < 64; ++i) EXPECT_EQ(out.code(0, i), i % 16 == 0 ? 7 : 0);
  }
}

TEST(Quantize, TheCachesExponentIsGivenAndSaturationCounted) {
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kStatic;
  std::vector<Bf16> x(48, Bf16{0});
  x[0] = to_bf16(2784.0f);  // 464 * 6: rounds to 448
  x[16] = to_bf16(2800.0f);
  Packed out(1, 48, 16);
  std::vector<std::int64_t> counts(kNumQuantizeCounts);
  quantize({.x = matrix(x, 1, 48),
            .rule = rule,
            .exponent = 0,
            .out = out.view(),
            .counts = {counts.data(), {kNumQuantizeCounts}, {1}, {}}});
  EXPECT_EQ(out.scales, (std::vector<std::uint8_t>{kE4m3Max, kE4m3Max, 0}));
  EXPECT_EQ(counts, (std::vector<std::int64_t>{3, 1, 0, 1, 0}));
  // Codes and scales may lie in cache pages, where no global scale is kept.
  PackedView<std::uint8_t> page = out.view();
  page.global = {};
  quantize({.x = matrix(x, 1, 48), .rule = rule, .exponent = 3, .out = page});
  std::vector<float> back(48);
  dequantize({.codes = page, .rule = rule, .exponent = 3, .f32 = matrix(back, 1, 48)});
  EXPECT_EQ(back[0], 6 * 56 * 8.0f);  // 2784 / 48 = 58 rounds to 56
}

TEST(Quantize, WeightsAreRoundedToBf16FirstAndShareOneExponent) {
  const std::int64_t rows = 7;
  const std::int64_t cols = 48;
  std::vector<float> master(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < master.size(); ++i) master[i] = normal(11, i) * 0.02f;
  std::vector<Bf16> rounded(master.size());
  for (std::size_t i = 0; i < master.size(); ++i) rounded[i] = to_bf16(master[i]);
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  Packed out(rows, cols, 16);
  Packed expected(rows, cols, 16);
  quantize_weight(matrix(master, rows, cols), rule, out.view());
  quantize({.x = matrix(rounded, rows, cols), .rule = rule, .out = expected.view()});
  EXPECT_EQ(out, expected);
  const int n = global_exponent(row_amax(rounded.data(), rows * cols));
  for (const float global : out.global) EXPECT_EQ(global, power_of_two(n));
}

std::string message_of(const QuantizeArgs& args) {
  try {
    quantize(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Quantize, MistakesAreNamed) {
  std::vector<float> nan(16, 1.0f);
  nan[3] = std::numeric_limits<float>::quiet_NaN();
  Packed out(1, 16, 16);
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  try {
    quantize_weight(matrix(nan, 1, 16), rule, out.view());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "quantize: the weight at row 0, column 3 is not a finite BF16 number; it must be "
                 "before it can have codes");
  }
  std::vector<Bf16> x(60);
  EXPECT_EQ(message_of({.x = matrix(x, 1, 60), .rule = kLockstep}),
            "quantize: x has 60 columns, must be a multiple of 16, the block");
  EXPECT_EQ(message_of({.x = matrix(x, 1, 48), .rule = kLockstep, .out = out.view()}),
            "quantize: out.codes is [1, 8], must be [1, 24]");
  EXPECT_EQ(message_of({.x = matrix(x, 1, 48), .rule = Quantizer{}}),
            "quantize: rule.element is bf16, which has no codes");
}

std::string message_of(const DequantizeArgs& args) {
  try {
    dequantize(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// A view that is too small would be written past its end. What a global scale is counted in cannot
// be mistaken: its type says FP32, and any other number of them is refused.
TEST(Quantize, R07_ViewsOfAnotherSizeAreNamed) {
  std::vector<Bf16> x(4 * 32, to_bf16(1.0f));
  Packed out(4, 32, 16);
  std::array<float, 4> global{};
  std::vector<std::uint8_t> flags(3);
  std::vector<std::int64_t> counts(4);
  QuantizeArgs args = {.x = matrix(x, 4, 32), .rule = kLockstep, .out = out.view()};
  static_assert(std::is_same_v<decltype(args.out.global), TensorView<float, 1>>);
  const auto with_global = [&](GlobalScale kind, TensorView<float, 1> view) {
    QuantizeArgs with = args;
    with.rule.global = kind;
    with.out.global = view;
    return message_of(with);
  };
  EXPECT_EQ(with_global(GlobalScale::kPerToken, {global.data(), {3}, {1}}),
            "quantize: out.global is [3] of stride 1, under a per-token global scale it must be "
            "[4] and apart");
  EXPECT_EQ(with_global(GlobalScale::kPerToken, {global.data(), {4}, {0}}),
            "quantize: out.global is [4] of stride 0, under a per-token global scale it must be "
            "[4] and apart");
  EXPECT_EQ(with_global(GlobalScale::kPerTensor, {}),
            "quantize: out.global is empty, under a per-tensor global scale it must not be");
  EXPECT_EQ(with_global(GlobalScale::kStatic, {global.data(), {5}, {1}}),
            "quantize: out.global is [5], must be [4] or [1]");
  for (const TensorView<float, 1> one : {TensorView<float, 1>{global.data(), {1}, {1}},
                                         TensorView<float, 1>{global.data(), {4}, {0}}}) {
    global = {-1, -1, -1, -1};
    EXPECT_EQ(with_global(GlobalScale::kPerTensor, one), "");
    EXPECT_EQ(with_global(GlobalScale::kStatic, one), "");
    EXPECT_EQ(global, (std::array<float, 4>{1, -1, -1, -1}));
  }
  args.nonfinite = {flags.data(), {3}, {1}};
  EXPECT_EQ(message_of(args), "quantize: nonfinite is [3], must be [4]");
  args.nonfinite = {};
  args.counts = {counts.data(), {4}, {1}};
  EXPECT_EQ(message_of(args), "quantize: counts is [4], must be [5]");

  std::vector<float> back(4 * 32);
  DequantizeArgs worth = {.codes = out.view(), .rule = kLockstep, .f32 = matrix(back, 4, 32)};
  worth.codes.global.shape = {3};
  EXPECT_EQ(message_of(worth), "dequantize: global is [3], must be [4], [1] or empty");
  worth.codes.global = {};
  worth.rule.scale = ScaleFormat::kNone;
  EXPECT_EQ(message_of(worth),
            "dequantize: rule.element is e2m1, rule.scale is none; e2m1 codes need e4m3 or e8m0 "
            "scales");
}

// R19: a rule for which there is no code is refused by name, in a build without assertions too; one
// that is taken gives codes whose values are near the numbers. None gives zeros.
TEST(Quantize, R19_WhatIsNotSupportedIsRefusedAndNeverZeros) {
  std::vector<Bf16> x = random_values(4 * 128, 11, 0);
  for (Bf16& value : x) {
    if (to_float(value) == 0.0f) value = to_bf16(0.5f);
  }
  int taken = 0, refused = 0;
  const auto attempt = [&](const Quantizer& rule) {
    Packed out(4, 128, rule);
    std::vector<float> back(x.size());
    const std::string message = message_of({.x = matrix(x, 4, 128),
                                            .rule = rule,
                                            .exponent = -6,
                                            .static_amax = 4.0f,
                                            .out = out.view()});
    if (!message.empty()) {
      ++refused;
      EXPECT_EQ(message.rfind("quantize: rule.", 0), 0u) << message;
      return;
    }
    ++taken;
    dequantize({.codes = out.view(), .rule = rule, .exponent = -6, .f32 = matrix(back, 4, 128)});
    double lost = 0, all = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double value = to_float(x[i]), d = static_cast<double>(back[i]) - value;
      lost += d * d;
      all += value * value;
    }
    EXPECT_LT(lost, 0.1 * all) << name_of(rule.element) << " " << name_of(rule.scale) << " "
                               << name_of(rule.scale_rule) << " " << name_of(rule.code_rule) << " "
                               << name_of(rule.global);
  };
  for (const Element element : {Element::kBf16, Element::kE4m3, Element::kE2m1}) {
    for (const ScaleFormat scale : {ScaleFormat::kNone, ScaleFormat::kE4m3, ScaleFormat::kE8m0}) {
      for (int order = 0; order <= static_cast<int>(ScaleRule::kGgml); ++order) {
        for (const GlobalScale global : {GlobalScale::kNone, GlobalScale::kStatic,
                                         GlobalScale::kPerTensor, GlobalScale::kPerToken}) {
          for (int code = 0; code <= static_cast<int>(CodeRule::kTorchao); ++code) {
            for (const bool power : {false, true}) {
              attempt({.element = element,
                       .block = scale == ScaleFormat::kE8m0 ? 32 : 16,
                       .scale = scale,
                       .scale_rule = static_cast<ScaleRule>(order),
                       .code_rule = static_cast<CodeRule>(code),
                       .global = global,
                       .global_is_power_of_two = power});
            }
          }
        }
      }
    }
  }
  EXPECT_GT(taken, 100);
  EXPECT_GT(refused, 1500);
}

// Every value of a scale that a quantizer writes is a finite BF16 number, and no other is taken.
TEST(Dequantize, AScaleThatNoQuantizerWroteIsDamage) {
  const Quantizer mxfp4 = mx_rule(ScaleRule::kMxRceil);
  Quantizer mxfp8 = mxfp4;
  mxfp8.element = Element::kE4m3;
  for (const Quantizer& rule : {kLockstep, mxfp4, mxfp8}) {
    Packed out(1, 32, rule);
    std::fill(out.codes.begin(), out.codes.end(),
              static_cast<std::uint8_t>(rule.is_wide() ? 0x7E : 0x77));
    out.global[0] = 1.0f;
    std::vector<float> back(32);
    for (int byte = 0; byte < 256; ++byte) {
      std::fill(out.scales.begin(), out.scales.end(), static_cast<std::uint8_t>(byte));
      const std::string message =
          message_of({.codes = out.view(), .rule = rule, .f32 = matrix(back, 1, 32)});
      if (byte <= most_scale_byte(rule)) {
        EXPECT_EQ(message, "");
        EXPECT_TRUE(is_finite(to_bf16(back[31]))) << byte;
      } else {
        EXPECT_EQ(message,
                  cat({"dequantize: the scale byte of row 0, block 0 is ", byte,
                       ", must be at most ", int{most_scale_byte(rule)}, "; the data is damaged"}));
      }
    }
  }
}

TEST(Quantize, R34_AWidthThatIsNoMultipleOfTheBlockIsRefused) {
  for (const std::int64_t cols : {1, 60, 472}) {
    std::vector<Bf16> x(static_cast<std::size_t>(cols));
    EXPECT_NE(message_of({.x = matrix(x, 1, cols), .rule = kLockstep}).find("multiple of 16"),
              std::string::npos);
  }
}

// Under the address sanitizer: every buffer ends where the last number does.
TEST(Quantize, R43_TailsAreNotReadOrWrittenPast) {
  for (const std::int64_t cols : {16, 48, 80, 176, 1040}) {
    const auto values = random_values(static_cast<std::size_t>(cols), 4, 3);
    const auto x = std::make_unique<Bf16[]>(static_cast<std::size_t>(cols));
    std::copy(values.begin(), values.end(), x.get());
    Packed out(1, cols, 16);
    out.codes.shrink_to_fit();
    out.scales.shrink_to_fit();
    const auto back = std::make_unique<float[]>(static_cast<std::size_t>(cols));
    quantize({.x = {x.get(), {1, cols}, {cols, 1}, {}}, .rule = kLockstep, .out = out.view()});
    dequantize(
        {.codes = out.view(), .rule = kLockstep, .f32 = {back.get(), {1, cols}, {cols, 1}, {}}});
    QuantizeCounts counts{};
    EXPECT_EQ(out, definition(values, 1, cols, kLockstep, 0, counts));
  }
}

TEST(Quantize, NoRowsAndNoColumnsAreNoWork) {
  std::vector<Bf16> x;
  Packed out(0, 32, 16);
  quantize({.x = matrix(x, 0, 32), .rule = kLockstep, .out = out.view()});
  Packed narrow(2, 0, 16);
  narrow.codes.reserve(1);
  narrow.scales.reserve(1);
  x.reserve(1);
  quantize({.x = matrix(x, 2, 0), .rule = kLockstep, .out = narrow.view()});
  EXPECT_EQ(narrow.global, std::vector<float>(2, 1.0f));
}

}  // namespace
}  // namespace lockstep::kernels
