/// quantize() on every device against the definition's bytes: quantize_block.h row by row, and
/// records by write_record().
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize_rows.h"
#include "kernels/exact/record_row.h"

namespace lockstep::kernels {
namespace {

struct Named {
  std::string name;
  Quantizer rule;
};

Quantizer dialect(ScaleRule scale, CodeRule code, StoredGlobal stored, ZeroBlock zero,
                  SignOfZero sign) {
  return {.element = Element::kE2m1,
          .scale = ScaleFormat::kE4m3,
          .scale_rule = scale,
          .code_rule = code,
          .global = GlobalScale::kPerToken,
          .stored_global = stored,
          .zero_block = zero,
          .sign_of_zero = sign};
}

Quantizer with(Quantizer rule, GlobalScale global) {
  rule.global = global;
  return rule;
}

/// The rules of all contracts.
std::vector<Named> rules() {
  Quantizer ggml = with(kLockstep, GlobalScale::kNone);
  ggml.global_is_power_of_two = false;
  ggml.scale_rule = ScaleRule::kGgml;
  ggml.tie = Tie::kTowardZero;
  Quantizer mx_ggml = mx_rule(ScaleRule::kMxFloor);
  mx_ggml.tie = Tie::kTowardZero;
  Quantizer mxfp8 = mx_rule(ScaleRule::kMxRceil);
  mxfp8.element = Element::kE4m3;
  Quantizer wide = mxfp8;
  wide.block = 128;
  const Quantizer fixed_e4m3 = {
      .element = Element::kE4m3, .global = GlobalScale::kStatic, .global_is_power_of_two = true};
  const Quantizer te = dialect(ScaleRule::kTe, CodeRule::kTe, StoredGlobal::kAmax, ZeroBlock::kZero,
                               SignOfZero::kKept);
  const Quantizer modelopt =
      dialect(ScaleRule::kModelOpt, CodeRule::kModelOpt, StoredGlobal::kDecode, ZeroBlock::kOne,
              SignOfZero::kNegativesKept);
  const Quantizer compressed =
      dialect(ScaleRule::kCompressedTensors, CodeRule::kCompressedTensors, StoredGlobal::kEncode,
              ZeroBlock::kEighth, SignOfZero::kNegativesKept);
  const Quantizer torchao = dialect(ScaleRule::kTorchao, CodeRule::kTorchao, StoredGlobal::kDecode,
                                    ZeroBlock::kSmallest, SignOfZero::kKept);
  return {
      {"lockstep", kLockstep},
      {"lockstep static", with(kLockstep, GlobalScale::kStatic)},
      {"lockstep per tensor", with(kLockstep, GlobalScale::kPerTensor)},
      {"4/6 mse", four_over_six(kLockstep, FourOverSix::kMse)},
      {"4/6 mae static", four_over_six(with(kLockstep, GlobalScale::kStatic), FourOverSix::kMae)},
      {"te", te},
      {"te static", with(te, GlobalScale::kStatic)},
      {"te per tensor", with(te, GlobalScale::kPerTensor)},
      {"modelopt", modelopt},
      {"modelopt per tensor", with(modelopt, GlobalScale::kPerTensor)},
      {"compressed-tensors", compressed},
      {"compressed-tensors per tensor", with(compressed, GlobalScale::kPerTensor)},
      {"torchao", torchao},
      {"torchao per tensor", with(torchao, GlobalScale::kPerTensor)},
      {"ggml", ggml},
      {"ggml-mxfp4", mx_ggml},
      {"mx-floor", mx_rule(ScaleRule::kMxFloor)},
      {"mx-even", mx_rule(ScaleRule::kMxEven)},
      {"mx-ceil", mx_rule(ScaleRule::kMxCeil)},
      {"mx-rceil", mx_rule(ScaleRule::kMxRceil)},
      {"mxfp8", mxfp8},
      {"fp8 activations", wide},
      {"fp8 cache", fixed_e4m3}};
}

/// All that quantize() writes.
struct Result {
  Packed out;
  std::vector<std::uint8_t> records;
  std::vector<std::uint8_t> nonfinite;
  std::vector<std::int64_t> counts;
  bool operator==(const Result&) const = default;
};

struct Case {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  Quantizer rule;
  RowLayout layout{};
  std::int8_t exponent = 0;
  float static_amax = 3.0f;
  bool amax_given = false;
};

Result untouched(const Case& c) {
  const std::int64_t slots = c.layout.encoding == Encoding::kNone ? 1 : c.layout.width / c.cols;
  return {
      Packed(c.rows, c.cols, c.rule),
      std::vector<std::uint8_t>(static_cast<std::size_t>(c.rows / slots * c.layout.bytes()), 0xCD),
      std::vector<std::uint8_t>(static_cast<std::size_t>(c.rows), 9),
      std::vector<std::int64_t>(kNumQuantizeCounts, 5)};
}

template <typename T>
Result definition(const Case& c, const std::vector<T>& x) {
  Result r = untouched(c);
  QuantizeCounts counts{};
  float most = 0.0f;
  for (std::int64_t row = 0; row < c.rows; ++row) {
    const float amax = row_amax(x.data() + row * c.cols, c.cols);
    if (is_finite(amax)) most = std::max(most, amax);
  }
  const GlobalNumbers whole = global_of_amax(c.rule, most);
  std::fill(r.records.begin(), r.records.end(), std::uint8_t{0});
  for (std::int64_t row = 0; row < c.rows; ++row) {
    const T* from = x.data() + row * c.cols;
    const float amax = row_amax(from, c.cols);
    const bool finite = is_finite(amax);
    const GlobalNumbers global =
        row_global(c.rule, finite ? amax : 0.0f, c.exponent, c.static_amax, whole);
    std::uint8_t* codes = r.out.codes.data() + row * r.out.code_cols;
    std::uint8_t* scales = r.out.scales.data() + row * r.out.scale_cols;
    std::fill_n(codes, r.out.code_cols, std::uint8_t{0});
    std::fill_n(scales, r.out.scale_cols, std::uint8_t{0});
    if (finite) {
      encode_row<T>({from, c.cols, global, codes, scales}, c.rule, counts);
    } else {
      ++counts[kNonfiniteRows];
    }
    const auto at = static_cast<std::size_t>(row);
    r.nonfinite[at] = finite ? 0 : 1;
    r.out.global[at] = stored_global(c.rule, global);
    if (c.layout.encoding == Encoding::kNone) continue;
    const std::int64_t slots = c.layout.width / c.cols;
    std::uint8_t* record = r.records.data() + row / slots * c.layout.bytes();
    const auto slot = static_cast<std::int32_t>(row % slots);
    if (c.layout.encoding == Encoding::kBf16) {
      if constexpr (std::is_same_v<T, Bf16>) {
        std::memcpy(record + slot * c.cols * 2, from, static_cast<std::size_t>(c.cols * 2));
      }
    } else {
      write_record({codes, scales, static_cast<std::int32_t>(c.cols),
                    static_cast<std::int8_t>(global.exponent), c.rule.is_wide()},
                   slot, c.layout, record);
    }
  }
  for (std::size_t i = 0; i < counts.size(); ++i) r.counts[i] += counts[i];
  return r;
}

template <typename T>
Result quantize_on(Device device, const Case& c, const std::vector<T>& x) {
  Result r = untouched(c);
  const Buffer from = to_device(x, device);
  const Buffer codes = to_device(r.out.codes, device);
  const Buffer scales = to_device(r.out.scales, device);
  const Buffer global = to_device(r.out.global, device);
  const Buffer records = to_device(r.records, device);
  const Buffer nonfinite = to_device(r.nonfinite, device);
  const Buffer counts = to_device(r.counts, device);
  std::vector<float> amaxes;
  for (std::int64_t row = 0; row < c.rows; ++row) {
    amaxes.push_back(row_amax(x.data() + row * c.cols, c.cols));
  }
  const Buffer amax = to_device(amaxes, device);
  QuantizeArgs args{
      .rule = c.rule,
      .exponent = c.exponent,
      .static_amax = c.static_amax,
      .out = {{codes.as<std::uint8_t>(), {c.rows, r.out.code_cols}, {r.out.code_cols, 1}, device},
              {scales.as<std::uint8_t>(),
               {r.out.bands, r.out.scale_cols},
               {r.out.scale_cols, 1},
               device},
              {global.as<float>(), {c.rows}, {1}, device}},
      .layout = c.layout,
      .records = {records.as<std::uint8_t>(),
                  {c.layout.bytes() > 0
                       ? static_cast<std::int64_t>(r.records.size()) / c.layout.bytes()
                       : 0,
                   c.layout.bytes()},
                  {c.layout.bytes(), 1},
                  device},
      .nonfinite = {nonfinite.as<std::uint8_t>(), {c.rows}, {1}, device},
      .counts = {counts.as<std::int64_t>(), {kNumQuantizeCounts}, {1}, device}};
  if constexpr (std::is_same_v<T, Bf16>) {
    args.x = {from.as<Bf16>(), {c.rows, c.cols}, {c.cols, 1}, device};
  } else {
    args.x_f32 = {from.as<float>(), {c.rows, c.cols}, {c.cols, 1}, device};
  }
  if (c.amax_given) args.amax = {amax.as<float>(), {c.rows}, {1}, device};
  quantize(args);
  synchronize(device);
  r.out.codes = to_host<std::uint8_t>(codes);
  r.out.scales = to_host<std::uint8_t>(scales);
  r.out.global = to_host<float>(global);
  r.records = to_host<std::uint8_t>(records);
  r.nonfinite = to_host<std::uint8_t>(nonfinite);
  r.counts = to_host<std::int64_t>(counts);
  return r;
}

void expect_same(const Result& got, const Result& expected, const std::string& what) {
  ASSERT_EQ(got.nonfinite, expected.nonfinite) << what;
  ASSERT_EQ(got.out.global, expected.out.global) << what;
  ASSERT_EQ(got.out.scales, expected.out.scales) << what;
  ASSERT_EQ(got.out.codes, expected.out.codes) << what;
  ASSERT_EQ(got.records, expected.records) << what;
  ASSERT_EQ(got.counts, expected.counts) << what;
}

std::vector<Bf16> with_bad_rows(std::vector<Bf16> x, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t row = 2; row < rows; row += 5) {
    x[static_cast<std::size_t>(row * cols + row * 7 % cols)] =
        static_cast<Bf16>(static_cast<std::uint16_t>(row % 2 == 0 ? 0xFF80 : 0x7FC1));
  }
  return x;
}

class QuantizeOn : public testing::TestWithParam<Device> {};

TEST_P(QuantizeOn, EveryRuleGivesTheDefinitionsBytesAndCounts) {
  for (const Named& named : rules()) {
    for (const std::int64_t cols : {32, 128, 512, 768, 2048, 2080, 4224, 9216, 33024}) {
      const std::int64_t rows = cols > 4000 ? 3 : 13;
      for (const int binades : {0, 6, 130}) {
        auto x = random_values(static_cast<std::size_t>(rows * cols), 11, binades);
        if (binades != 0) x = with_bad_rows(std::move(x), rows, cols);
        Case c = {.rows = rows, .cols = cols, .rule = named.rule, .exponent = -9};
        const std::string what = named.name + " of " + std::to_string(cols) + " columns over " +
                                 std::to_string(binades) + " binades";
        const Result expected = definition(c, x);
        expect_same(quantize_on(GetParam(), c, x), expected, what);
        c.amax_given = true;
        expect_same(quantize_on(GetParam(), c, x), expected, what + ", amax given");
        if (cols > 800) continue;
        std::vector<float> f32(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) {
          f32[i] = to_float(x[i]) * (is_finite(x[i]) && binades < 100 ? 1.0003f : 1.0f);
        }
        c.amax_given = false;
        expect_same(quantize_on(GetParam(), c, f32), definition(c, f32), what + ", FP32");
      }
    }
  }
}

TEST_P(QuantizeOn, RecordsHoldTheSameCodesInEveryEncoding) {
  for (const Named& named : rules()) {
    for (const std::int64_t cols : {80, 128, 768, 2048}) {
      if (cols % named.rule.block != 0) continue;
      for (const std::int64_t slots : {1, 3, 8}) {
        for (const Encoding encoding :
             {Encoding::kScale, Encoding::kLsbScaleMod4, Encoding::kLsb, Encoding::kCodes,
              Encoding::kCodes8, Encoding::kLsbScaleMod4Map, Encoding::kBf16}) {
          const bool mod4 =
              encoding == Encoding::kLsbScaleMod4 || encoding == Encoding::kLsbScaleMod4Map;
          if (mod4 && !named.rule.is_mx() && !named.rule.global_is_power_of_two) continue;
          if (named.rule.is_wide() != (encoding == Encoding::kCodes8) &&
              (encoding == Encoding::kCodes || encoding == Encoding::kCodes8)) {
            continue;
          }
          if (named.rule.is_wide() && encoding == Encoding::kLsbScaleMod4Map) continue;
          const std::int32_t block = named.rule.scale == ScaleFormat::kNone ? 0 : named.rule.block;
          const std::int64_t rows = 4 * slots;
          const Case c = {
              .rows = rows,
              .cols = cols,
              .rule = named.rule,
              .layout = {encoding, static_cast<std::int32_t>(slots * cols), block,
                         static_cast<std::int32_t>(encoding == Encoding::kLsb ? 0 : slots)},
              .exponent = 2};
          const auto x =
              with_bad_rows(random_values(static_cast<std::size_t>(rows * cols), 3, 6), rows, cols);
          expect_same(quantize_on(GetParam(), c, x), definition(c, x),
                      named.name + ", encoding " + std::to_string(static_cast<int>(encoding)) +
                          ", " + std::to_string(slots) + " slots of " + std::to_string(cols));
        }
      }
    }
  }
}

/// Blocks that begin with an element of `amax`, followed by what fits of `values`.
void append_blocks(std::vector<Bf16>& x, Bf16 amax, const std::vector<Bf16>& values,
                   std::int32_t block) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (x.size() % static_cast<std::size_t>(block) == 0) x.push_back(amax);
    x.push_back(values[i]);
  }
  while (x.size() % static_cast<std::size_t>(block) != 0) x.push_back(amax);
}

void check_blocks(Device device, const Quantizer& rule, std::vector<Bf16> x, std::int8_t n,
                  const std::string& what) {
  const std::int64_t cols = 512;
  while (x.size() % cols != 0) x.push_back(Bf16{0});
  const Case c = {.rows = static_cast<std::int64_t>(x.size()) / cols,
                  .cols = cols,
                  .rule = rule,
                  .layout = {Encoding::kLsb, cols, rule.block, 0},
                  .exponent = n};
  expect_same(quantize_on(device, c, x), definition(c, x), what);
}

// A power of two's scales are the same under every n, so that one n shows them all; the smallest
// and the largest show the ends of BF16.
TEST_P(QuantizeOn, EveryScaleMeetsEveryValueThatItCanMeet) {
  const Quantizer rule = with(kLockstep, GlobalScale::kStatic);
  for (const int n : {0, -116, 116}) {
    std::vector<Bf16> x;
    for (std::uint8_t s8 = 0; s8 <= kE4m3Max; ++s8) {
      // The largest amax of this scale, from which on is the next one's.
      float most = 0.0f;
      for (std::uint32_t bits = 0x3900; bits < 0x4580; ++bits) {  // 2^-13 to 2^12
        const float amax = to_float(static_cast<Bf16>(static_cast<std::uint16_t>(bits)));
        if (bits_of(block_scale(amax, 0)) == s8) most = amax;
      }
      const Bf16 amax = to_bf16(most * power_of_two(n));
      if (!is_finite(amax)) continue;
      std::vector<Bf16> values;
      const int step = n == 0 ? 1 : 7;
      for (int bits = 0; bits <= bits_of(amax); bits += step) {
        if (bits < 0x3000 + (n * 128) && bits % 64 != 0) continue;  // far below: a sample
        values.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(bits)));
        values.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(bits | 0x8000)));
      }
      append_blocks(x, amax, values, 16);
    }
    check_blocks(GetParam(), rule, std::move(x), static_cast<std::int8_t>(n),
                 "n = " + std::to_string(n));
  }
}

TEST_P(QuantizeOn, EveryAmaxGetsItsScaleUnderEveryRule) {
  for (const Named& named : rules()) {
    if (named.rule.is_wide()) continue;
    std::vector<Bf16> x;
    for (std::uint32_t bits = 0; bits < 0x7F80; ++bits) {
      const auto amax = static_cast<Bf16>(static_cast<std::uint16_t>(bits));
      std::vector<Bf16> values;
      for (std::int32_t i = 1; i < named.rule.block; ++i) {
        const std::uint32_t below = bits * static_cast<std::uint32_t>(i) / 32;
        const std::uint32_t value = i % 3 == 0 ? below : bits > i * 7u ? bits - i * 7u : 0u;
        values.push_back(
            static_cast<Bf16>(static_cast<std::uint16_t>(value | (i % 2 == 0 ? 0x8000u : 0u))));
      }
      append_blocks(x, amax, values, named.rule.block);
    }
    for (const int n : {0, 20}) {
      if (n != 0 && named.rule.global != GlobalScale::kStatic) continue;
      check_blocks(GetParam(), named.rule, x, static_cast<std::int8_t>(n), named.name);
    }
  }
}

TEST_P(QuantizeOn, ThresholdsAndTheirNeighboursUnderEveryRule) {
  for (const Named& named : rules()) {
    if (named.rule.is_wide()) continue;
    std::vector<Bf16> x;
    for (const int shift : {-120, -60, 0, 60, 118}) {
      for (int m = 8; m < 16; ++m) {
        for (const int up : {0, 3}) {
          const double scale = std::ldexp(m, shift + up - 7);
          std::vector<Bf16> values;
          for (const double middle : {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0}) {
            for (const int step : {-1, 0, 1}) {
              const int bits = bits_of(to_bf16(static_cast<float>(middle * scale))) + step;
              if (bits < 0 || bits >= 0x7F80) continue;
              values.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(bits)));
              values.push_back(static_cast<Bf16>(static_cast<std::uint16_t>(bits | 0x8000)));
            }
          }
          for (const double top : {6.0, 5.7, 6.3}) {
            const Bf16 amax = to_bf16(static_cast<float>(top * scale));
            if (is_finite(amax)) append_blocks(x, amax, values, named.rule.block);
          }
        }
      }
    }
    check_blocks(GetParam(), named.rule, std::move(x), 0, named.name);
  }
}

TEST_P(QuantizeOn, BlocksOfRowsGiveTheDefinitionsBytes) {
  Quantizer rule = mx_rule(ScaleRule::kMxRceil);
  rule.element = Element::kE4m3;
  rule.block = rule.block_rows = 128;
  for (const auto& [rows, cols] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {1, 16}, {128, 128}, {200, 312}, {260, 768}}) {
    const auto x =
        with_bad_rows(random_values(static_cast<std::size_t>(rows * cols), 5, 8), rows, cols);
    const Case c = {.rows = rows, .cols = cols, .rule = rule};
    // Blocks of rows have a definition of their own, the CPU's.
    expect_same(quantize_on(GetParam(), c, x), quantize_on(Device{}, c, x),
                std::to_string(rows) + " by " + std::to_string(cols));
  }
}

TEST_P(QuantizeOn, WeightsAreRoundedToBf16FirstAndWhatIsNotFiniteIsNamed) {
  const std::int64_t rows = 70;
  const std::int64_t cols = 96;
  std::vector<float> master(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < master.size(); ++i) master[i] = normal(11, i) * 0.02f;
  Packed on_host(rows, cols, 16);
  const Quantizer rule = with(kLockstep, GlobalScale::kPerTensor);
  quantize_weight(matrix(master, rows, cols), rule, on_host.view());
  for (const bool bad : {false, true}) {
    if (bad) master[69 * 96 + 5] = master[40 * 96 + 7] = 3.4e38f;
    const Device device = GetParam();
    const Buffer from = to_device(master, device);
    const Buffer codes(device, rows * cols / 2);
    const Buffer scales(device, rows * cols / 16);
    const Buffer global(device, rows * 4);
    const PackedView<std::uint8_t> out = {
        {codes.as<std::uint8_t>(), {rows, cols / 2}, {cols / 2, 1}, device},
        {scales.as<std::uint8_t>(), {rows, cols / 16}, {cols / 16, 1}, device},
        {global.as<float>(), {rows}, {1}, device}};
    std::string error;
    try {
      quantize_weight({from.as<float>(), {rows, cols}, {cols, 1}, device}, rule, out);
    } catch (const Error& e) {
      error = e.what();
    }
    EXPECT_EQ(error, bad ? "quantize: the weight at row 40, column 7 is not a finite BF16 number; "
                           "it must be before it can have codes"
                         : "");
    if (bad) return;
    EXPECT_EQ(to_host<std::uint8_t>(codes), on_host.codes);
    EXPECT_EQ(to_host<std::uint8_t>(scales), on_host.scales);
    EXPECT_EQ(to_host<float>(global), on_host.global);
  }
}

TEST_P(QuantizeOn, NoRowsAndNoColumnsAreNoWork) {
  for (const GlobalScale global : {GlobalScale::kPerToken, GlobalScale::kPerTensor}) {
    const Case none = {.rows = 0, .cols = 32, .rule = with(kLockstep, global)};
    expect_same(quantize_on(GetParam(), none, std::vector<Bf16>{}), untouched(none), "no rows");
  }
}

TEST_P(QuantizeOn, WhatLiesElsewhereIsRefused) {
  const Device device = GetParam();
  if (device.kind == Device::Kind::kCpu) return;
  std::vector<std::uint8_t> codes(8), scales(1);
  const Buffer x(device, 32);
  try {
    quantize({.x = {x.as<Bf16>(), {1, 16}, {16, 1}, device},
              .rule = kLockstep,
              .out = {matrix(codes, 1, 8), matrix(scales, 1, 1), {}}});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "quantize: out.codes is on another device than x");
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, QuantizeOn, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::kernels
