/// dequantize() and the layouts of pack.h on every device, against formulas element by element.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/pack.h"
#include "kernels/exact/packed_matrix.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

template <typename T>
TensorView<T, 2> on(const Buffer& buffer, std::int64_t rows, std::int64_t cols) {
  return {buffer.as<T>(), {rows, cols}, {cols, 1}, buffer.device()};
}

std::uint8_t byte_at(std::uint64_t seed, std::size_t i) {
  return static_cast<std::uint8_t>(philox(seed, philox_counter(i, 0, 0))[0]);
}

std::vector<std::uint8_t> random_bytes(std::size_t count, std::uint64_t seed, int values = 256) {
  std::vector<std::uint8_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::uint8_t>(byte_at(seed, i) % values);
  }
  return bytes;
}

std::vector<Quantizer> decoders() {
  std::vector<Quantizer> rules = {kLockstep, mx_rule(ScaleRule::kMxEven)};
  for (const StoredGlobal stored :
       {StoredGlobal::kDecode, StoredGlobal::kEncode, StoredGlobal::kAmax}) {
    Quantizer rule = kLockstep;
    rule.global_is_power_of_two = false;
    rule.stored_global = stored;
    rules.push_back(rule);
  }
  Quantizer none = kLockstep;
  none.global = GlobalScale::kNone;
  none.global_is_power_of_two = false;
  Quantizer mxfp8 = mx_rule(ScaleRule::kMxEven);
  mxfp8.element = Element::kE4m3;
  Quantizer tiles = mxfp8;
  tiles.block = tiles.block_rows = 128;
  const Quantizer cache = {
      .element = Element::kE4m3, .global = GlobalScale::kStatic, .global_is_power_of_two = true};
  rules.insert(rules.end(), {none, mxfp8, tiles, cache});
  return rules;
}

class LayoutOn : public testing::TestWithParam<Device> {};

TEST_P(LayoutOn, DequantizeIsCodeTimesFactorUnderEveryRule) {
  for (const Quantizer& rule : decoders()) {
    for (const std::int64_t cols : {32, 96, 768, 2080}) {
      const std::int64_t rows = 37;
      Packed packed(rows, cols, rule);
      packed.codes = random_bytes(packed.codes.size(), 1);
      if (rule.is_wide()) {
        for (std::uint8_t& code : packed.codes) code &= 0xFD;  // no NaN
      }
      packed.scales = random_bytes(packed.scales.size(), 2, most_scale_byte(rule) + 1);
      for (std::size_t i = 0; i < packed.global.size(); ++i) {
        const int n = static_cast<int>(i * 5 % 60) - 30;
        packed.global[i] = power_of_two(n) * (rule.global_is_power_of_two ? 1.0f : 1.37f);
      }
      std::vector<float> f32;
      std::vector<Bf16> bf16;
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t col = 0; col < cols; ++col) {
          const auto r = static_cast<std::size_t>(row);
          const std::size_t scale = static_cast<std::size_t>(
              row / rule.block_rows * packed.scale_cols + col / rule.block);
          const float factor = decode_factor(
              rule, rule.scale == ScaleFormat::kNone ? std::uint8_t{0} : packed.scales[scale],
              packed.global[r]);
          const float value = rule.is_wide()
                                  ? to_float(static_cast<E4m3>(
                                        packed.codes[static_cast<std::size_t>(row * cols + col)]))
                                  : to_float(static_cast<E2m1>(packed.code(row, col)));
          f32.push_back(value * factor);
          bf16.push_back(to_bf16(value * factor));
        }
      }
      const Device device = GetParam();
      const Buffer codes = to_device(packed.codes, device);
      const Buffer scales = to_device(packed.scales, device);
      const Buffer global = to_device(packed.global, device);
      for (const int outputs : {1, 2, 3}) {
        const Buffer out_bf16 = to_device(std::vector<Bf16>(bf16.size(), Bf16{0x7FC0}), device);
        const Buffer out_f32 = to_device(std::vector<float>(f32.size(), -7.0f), device);
        DequantizeArgs args{
            .codes = {on<const std::uint8_t>(codes, rows, packed.code_cols),
                      on<const std::uint8_t>(scales, packed.bands, packed.scale_cols),
                      {global.as<const float>(), {rows}, {1}, device}},
            .rule = rule};
        if ((outputs & 1) != 0) args.bf16 = on<Bf16>(out_bf16, rows, cols);
        if ((outputs & 2) != 0) args.f32 = on<float>(out_f32, rows, cols);
        dequantize(args);
        synchronize(device);
        const std::string what = std::to_string(cols) + " columns, outputs " +
                                 std::to_string(outputs) + ", " + std::string(name_of(rule.scale));
        if ((outputs & 1) != 0) {
          ASSERT_EQ(to_host<Bf16>(out_bf16), bf16) << what;
        }
        if ((outputs & 2) == 0) continue;
        const auto got = to_host<float>(out_f32);
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(float_bits(got[i]), float_bits(f32[i])) << what << " at " << i;
        }
      }
    }
  }
}

TEST_P(LayoutOn, DequantizeTakesTheExponentWhereNoGlobalScaleIsKept) {
  const Device device = GetParam();
  const Buffer codes = to_device(std::vector<std::uint8_t>(8, 0x29), device);  // -.5, 1
  const Buffer scales = to_device(std::vector<std::uint8_t>{0x40}, device);    // 2
  const Buffer out(device, 32);
  dequantize(
      {.codes = {on<const std::uint8_t>(codes, 1, 8), on<const std::uint8_t>(scales, 1, 1), {}},
       .rule = kLockstep,
       .exponent = 3,
       .bf16 = on<Bf16>(out, 1, 16)});
  synchronize(device);
  const auto values = to_host<Bf16>(out);
  EXPECT_EQ(to_float(values[0]), -8.0f);
  EXPECT_EQ(to_float(values[15]), 16.0f);
}

// A grid has 65535 blocks along its second dimension: longer rows take several launches.
TEST_P(LayoutOn, DequantizeTakesRowsLongerThanAGrid) {
  const Device device = GetParam();
  Quantizer mxfp8 = mx_rule(ScaleRule::kMxEven);
  mxfp8.element = Element::kE4m3;
  const std::int64_t of_grid = std::int64_t{65535} * 256;
  for (const bool wide : {true, false}) {
    const Quantizer rule = wide ? mxfp8 : mx_rule(ScaleRule::kMxEven);
    const std::int64_t per_thread = wide ? 1 : 8;  // elements
    const std::int64_t cols = per_thread * (of_grid + 512), code_cols = wide ? cols : cols / 2;
    const Buffer codes(device, code_cols), scales(device, cols / 32), out(device, cols * 2);
    fill_bytes(codes.as<void>(), device, wide ? 0x38 : 0x22, codes.bytes());  // 1
    fill_bytes(scales.as<void>(), device, 127, scales.bytes());               // 1
    fill_bytes(out.as<void>(), device, 0xFF, out.bytes());
    // Other numbers about the last column of the first launch, and in the last block.
    const std::int64_t edge = per_thread * of_grid / 32;
    for (const std::int64_t block : {edge - 1, edge, cols / 32 - 1}) {
      const auto scale = static_cast<std::uint8_t>(128 + block % 3);
      copy_bytes(scales.as<std::uint8_t>() + block, device, &scale, {}, 1);
    }
    synchronize(device);
    dequantize({.codes = {on<const std::uint8_t>(codes, 1, code_cols),
                          on<const std::uint8_t>(scales, 1, cols / 32),
                          {}},
                .rule = rule,
                .bf16 = on<Bf16>(out, 1, cols)});
    synchronize(device);
    for (const std::int64_t block :
         {std::int64_t{0}, edge - 2, edge - 1, edge, edge + 1, cols / 32 - 2, cols / 32 - 1}) {
      const bool other = block == edge - 1 || block == edge || block == cols / 32 - 1;
      const float expected = other ? power_of_two(static_cast<int>(1 + block % 3)) : 1.0f;
      std::vector<Bf16> values(32);
      copy_bytes(values.data(), {}, out.as<Bf16>() + block * 32, device, 64);
      synchronize(device);
      for (const Bf16 value : values) ASSERT_EQ(to_float(value), expected) << wide << " " << block;
    }
  }
}

TEST_P(LayoutOn, ScalesThatNoQuantizerWroteAreNaNOrRefused) {
  const Device device = GetParam();
  const Buffer codes = to_device(std::vector<std::uint8_t>(16, 0x22), device);
  const Buffer scales = to_device(std::vector<std::uint8_t>{0x7E, 0x80}, device);
  const Buffer out(device, 64);
  const DequantizeArgs args{
      .codes = {on<const std::uint8_t>(codes, 1, 16), on<const std::uint8_t>(scales, 1, 2), {}},
      .rule = kLockstep,
      .bf16 = on<Bf16>(out, 1, 32)};
  if (device.kind == Device::Kind::kCpu) {
    EXPECT_THROW(dequantize(args), Error);
    return;
  }
  dequantize(args);
  synchronize(device);
  const auto values = to_host<Bf16>(out);
  EXPECT_EQ(to_float(values[15]), 448.0f);
  EXPECT_FALSE(is_finite(values[16]));
  EXPECT_FALSE(is_finite(values[31]));
}

TEST_P(LayoutOn, ScalesGoToTheirPlacesAndBackAndPaddingIsZero) {
  for (const ScaleLayout layout : {ScaleLayout::kLinear, ScaleLayout::k128x4, ScaleLayout::k8x4}) {
    for (const std::int64_t rows : {1, 127, 128, 129, 300}) {
      for (const std::int64_t blocks : {1, 3, 4, 5, 48}) {
        const Device device = GetParam();
        const auto scales = random_bytes(static_cast<std::size_t>(rows * blocks), 3);
        const auto size = static_cast<std::size_t>(scale_layout_bytes(layout, rows, blocks));
        std::vector<std::uint8_t> expected(size, 0);
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t block = 0; block < blocks; ++block) {
            expected[static_cast<std::size_t>(scale_offset(layout, row, block, blocks))] =
                scales[static_cast<std::size_t>(row * blocks + block)];
          }
        }
        const Buffer from = to_device(scales, device);
        const Buffer out = to_device(std::vector<std::uint8_t>(size, 0x7F), device);
        swizzle_scales(on<const std::uint8_t>(from, rows, blocks), layout,
                       {out.as<std::uint8_t>(), size});
        synchronize(device);
        ASSERT_EQ(to_host<std::uint8_t>(out), expected) << rows << " by " << blocks;
        const Buffer back = to_device(std::vector<std::uint8_t>(scales.size(), 0x7F), device);
        unswizzle_scales({out.as<const std::uint8_t>(), size}, layout,
                         on<std::uint8_t>(back, rows, blocks));
        synchronize(device);
        ASSERT_EQ(to_host<std::uint8_t>(back), scales) << rows << " by " << blocks;
      }
    }
  }
}

template <typename Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_P(LayoutOn, CodesAndValuesArePackedAndTheFirstMistakeIsNamed) {
  const Device device = GetParam();
  const std::int64_t rows = 5;
  const std::int64_t cols = 34;
  auto codes = random_bytes(static_cast<std::size_t>(rows * cols), 4, 16);
  for (std::uint8_t& code : codes) code = code == 8 ? 0 : code;
  std::vector<std::uint8_t> packed;
  std::vector<float> values;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    values.push_back(to_float(static_cast<E2m1>(codes[i])));
    if (i % 2 == 0) packed.push_back(static_cast<std::uint8_t>(codes[i] | codes[i + 1] << 4));
  }
  const Buffer from = to_device(codes, device);
  const Buffer numbers = to_device(values, device);
  const Buffer out = to_device(std::vector<std::uint8_t>(packed.size(), 0xEE), device);
  pack_codes(on<const std::uint8_t>(from, rows, cols), on<std::uint8_t>(out, rows, cols / 2));
  EXPECT_EQ(to_host<std::uint8_t>(out), packed);
  fill_bytes(out.as<void>(), device, 0xEE, out.bytes());
  pack_values(on<const float>(numbers, rows, cols), on<std::uint8_t>(out, rows, cols / 2));
  EXPECT_EQ(to_host<std::uint8_t>(out), packed);
  const Buffer back(device, rows * cols);
  unpack_codes(on<const std::uint8_t>(out, rows, cols / 2), on<std::uint8_t>(back, rows, cols));
  synchronize(device);
  EXPECT_EQ(to_host<std::uint8_t>(back), codes);

  codes[2 * 34 + 7] = 16;
  codes[4 * 34 + 1] = 99;
  values[3 * 34 + 9] = 5.0f;
  const Buffer bad = to_device(codes, device);
  const Buffer bad_numbers = to_device(values, device);
  EXPECT_EQ(message_of([&] {
              pack_codes(on<const std::uint8_t>(bad, rows, cols),
                         on<std::uint8_t>(out, rows, cols / 2));
            }),
            "pack: the code of row 2, column 7 is 16, must be at most 15");
  EXPECT_EQ(message_of([&] {
              pack_values(on<const float>(bad_numbers, rows, cols),
                          on<std::uint8_t>(out, rows, cols / 2));
            }),
            "pack: the value of row 3, column 9 is 5, must be one of 0, .5, 1, 1.5, 2, 3, 4, 6 or "
            "their negatives");
}

TEST_P(LayoutOn, GgmlBlocksHoldTheSameCodesThereAndBack) {
  const Device device = GetParam();
  for (const Quantizer& rule : {kLockstep, mx_rule(ScaleRule::kMxFloor)}) {
    const std::int64_t rows = 3;
    const std::int64_t cols = 192;
    const std::int64_t group = rule.block;
    const std::int64_t groups = rule.is_mx() ? 1 : 4;
    const std::int64_t width = ggml_row_bytes(rule, cols);
    const std::int64_t blocks = cols / group;
    const auto codes = random_bytes(static_cast<std::size_t>(rows * cols / 2), 6);
    const auto scales = random_bytes(static_cast<std::size_t>(rows * blocks), 7);
    std::vector<std::uint8_t> expected(static_cast<std::size_t>(rows * width), 0);
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      const std::int64_t row = i / cols;
      const std::int64_t which = i % cols / group;
      const std::int64_t j = i % group;
      const std::int64_t at = row * width + which / groups * (groups + group * groups / 2);
      expected[static_cast<std::size_t>(at + which % groups)] =
          scales[static_cast<std::size_t>(row * blocks + which)];
      const int code = codes[static_cast<std::size_t>(i / 2)] >> (i % 2 * 4) & 15;
      auto& byte = expected[static_cast<std::size_t>(at + groups + which % groups * group / 2 +
                                                     j % (group / 2))];
      byte = static_cast<std::uint8_t>(byte | code << (j / (group / 2) * 4));
    }
    const Buffer from = to_device(codes, device);
    const Buffer from_scales = to_device(scales, device);
    const Buffer out = to_device(std::vector<std::uint8_t>(expected.size(), 0xEE), device);
    pack_ggml({on<const std::uint8_t>(from, rows, cols / 2),
               on<const std::uint8_t>(from_scales, rows, blocks),
               {}},
              rule, on<std::uint8_t>(out, rows, width));
    synchronize(device);
    EXPECT_EQ(to_host<std::uint8_t>(out), expected);
    const Buffer back(device, rows * cols / 2);
    const Buffer back_scales(device, rows * blocks);
    unpack_ggml(
        on<const std::uint8_t>(out, rows, width), rule,
        {on<std::uint8_t>(back, rows, cols / 2), on<std::uint8_t>(back_scales, rows, blocks), {}});
    synchronize(device);
    EXPECT_EQ(to_host<std::uint8_t>(back), codes);
    EXPECT_EQ(to_host<std::uint8_t>(back_scales), scales);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, LayoutOn, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::kernels
