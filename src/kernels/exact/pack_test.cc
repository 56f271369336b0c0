#include "kernels/exact/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "numerics/e2m1.h"

namespace lockstep::kernels {
namespace {

std::vector<std::uint8_t> some_scales(std::int64_t rows, std::int64_t blocks) {
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows * blocks));
  for (std::size_t i = 0; i < scales.size(); ++i) {
    scales[i] = static_cast<std::uint8_t>(1 + i * 37 % 126);
  }
  return scales;
}

TEST(Pack, R37_SwizzleAndBackIsTheIdentityAndPaddingIsZero) {
  for (const ScaleLayout layout : {ScaleLayout::kLinear, ScaleLayout::k128x4, ScaleLayout::k8x4}) {
    for (const std::int64_t rows : {1, 127, 128, 129, 300}) {
      for (const std::int64_t blocks : {1, 3, 4, 5}) {
        auto scales = some_scales(rows, blocks);
        // R38: what lay there before must not stay, nor what lies beside it change.
        const std::int64_t size = scale_layout_bytes(layout, rows, blocks);
        std::vector<std::uint8_t> out(static_cast<std::size_t>(size) + 2, 0x7F);
        swizzle_scales(matrix(scales, rows, blocks), layout,
                       std::span(out).subspan(1, out.size() - 2));
        EXPECT_EQ(out.front(), 0x7F);
        EXPECT_EQ(out.back(), 0x7F);
        EXPECT_EQ(std::count_if(out.begin() + 1, out.end() - 1, [](int b) { return b != 0; }),
                  rows * blocks);
        EXPECT_EQ(std::accumulate(out.begin() + 1, out.end() - 1, 0),
                  std::accumulate(scales.begin(), scales.end(), 0));
        std::vector<std::uint8_t> back(scales.size(), 0xEE);
        unswizzle_scales(std::span(out).subspan(1, out.size() - 2), layout,
                         matrix(back, rows, blocks));
        EXPECT_EQ(back, scales);
      }
    }
  }
}

TEST(Pack, R38_PaddingOfAPoisonedBufferIsZero) {
  auto scales = some_scales(3, 2);
  std::vector<std::uint8_t> out(
      static_cast<std::size_t>(scale_layout_bytes(ScaleLayout::k128x4, 3, 2)), 0x7F);
  swizzle_scales(matrix(scales, 3, 2), ScaleLayout::k128x4, out);
  for (std::int64_t i = 0; i < 512; ++i) {
    const std::int64_t row = i / 16 + i % 16 / 4 * 32;
    const bool real = row < 3 && i % 4 < 2;
    EXPECT_EQ(out[static_cast<std::size_t>(i)],
              real ? scales[static_cast<std::size_t>(row * 2 + i % 4)] : 0);
  }
}

TEST(Pack, R39_SizesAndPlacesOfEachLayout) {
  EXPECT_EQ(scale_layout_bytes(ScaleLayout::kLinear, 130, 5), 650);
  EXPECT_EQ(scale_layout_bytes(ScaleLayout::k128x4, 130, 5), 256 * 8);
  EXPECT_EQ(scale_layout_bytes(ScaleLayout::k8x4, 130, 5), 136 * 8);
  EXPECT_EQ(scale_offset(ScaleLayout::kLinear, 3, 2, 5), 17);
  EXPECT_EQ(scale_offset(ScaleLayout::k128x4, 0, 4, 5), 512);
  EXPECT_EQ(scale_offset(ScaleLayout::k128x4, 128, 0, 5), 1024);
  EXPECT_EQ(scale_offset(ScaleLayout::k128x4, 33, 1, 5), 16 + 4 + 1);
  EXPECT_EQ(scale_offset(ScaleLayout::k8x4, 0, 4, 5), 32);
  EXPECT_EQ(scale_offset(ScaleLayout::k8x4, 8, 0, 5), 64);
  EXPECT_EQ(scale_offset(ScaleLayout::k8x4, 3, 2, 5), 14);
  for (const ScaleLayout layout : {ScaleLayout::kLinear, ScaleLayout::k128x4, ScaleLayout::k8x4}) {
    std::set<std::int64_t> seen;
    for (std::int64_t row = 0; row < 130; ++row) {
      for (std::int64_t block = 0; block < 5; ++block) {
        const std::int64_t at = scale_offset(layout, row, block, 5);
        EXPECT_LT(at, scale_layout_bytes(layout, 130, 5));
        EXPECT_TRUE(seen.insert(at).second);
      }
    }
  }
}

TEST(Pack, R20_StatisticsOfAPaddedPlaneAreThoseOfItsScales) {
  const std::int64_t rows = 130;
  const std::int64_t cols = 80;
  auto x = random_values(static_cast<std::size_t>(rows * cols), 2, 0);
  Packed out(rows, cols, 16);
  std::vector<std::int64_t> counts(kNumQuantizeCounts);
  quantize({.x = matrix(x, rows, cols),
            .rule = kLockstep,
            .out = out.view(),
            .counts = {counts.data(), {kNumQuantizeCounts}, {1}, {}}});
  EXPECT_EQ(counts[kBlocks], rows * 5);
  EXPECT_EQ(counts[kZeroBlocks] + counts[kUnderflowBlocks],
            std::count(out.scales.begin(), out.scales.end(), 0));
}

TEST(Pack, R42_OffsetsDoNotOverflow32Bits) {
  const std::int64_t row = 798916;
  const std::int64_t blocks = 2688;  // as wide as the report's K, so that the product passes 2^31
  EXPECT_EQ(scale_offset(ScaleLayout::kLinear, row, 0, blocks), 2147486208);
  EXPECT_EQ(scale_offset(ScaleLayout::k128x4, row, 0, blocks),
            row / 128 * (blocks / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4);
  EXPECT_GT(scale_layout_bytes(ScaleLayout::k8x4, row, blocks), 1ll << 31);
}

TEST(Pack, CodesGoTwoAByteTheEvenOneLow) {
  std::vector<std::uint8_t> codes = {1, 2, 15, 0, 7, 9};
  std::vector<std::uint8_t> packed(3, 0xEE);
  pack_codes(matrix(codes, 1, 6), matrix(packed, 1, 3));
  EXPECT_EQ(packed, (std::vector<std::uint8_t>{0x21, 0x0F, 0x97}));
  std::vector<std::uint8_t> back(6, 0xEE);
  unpack_codes(matrix(packed, 1, 3), matrix(back, 1, 6));
  EXPECT_EQ(back, codes);
}

template <typename T>
std::vector<std::uint8_t> packed_as() {
  std::vector<T> values;
  for (std::uint8_t code = 0; code < 16; ++code) {
    const float value = to_float(static_cast<E2m1>(code));
    if constexpr (std::is_same_v<T, Bf16>) {
      values.push_back(to_bf16(value));
    } else {
      values.push_back(static_cast<T>(value));
    }
  }
  std::vector<std::uint8_t> packed(8, 0xEE);
  const TensorView<const T, 2> view = matrix(values, 1, 16);
  pack_values(view, matrix(packed, 1, 8));
  return packed;
}

TEST(Pack, R21_TheSixteenValuesPackAlikeFromEveryType) {
  const std::vector<std::uint8_t> expected = {0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE};
  EXPECT_EQ(packed_as<float>(), expected);
  EXPECT_EQ(packed_as<double>(), expected);
  EXPECT_EQ(packed_as<Bf16>(), expected);
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Pack, MistakesAreNamed) {
  std::vector<std::uint8_t> codes = {1, 16};
  std::vector<std::uint8_t> packed(1);
  EXPECT_EQ(message_of([&] { pack_codes(matrix(codes, 1, 2), matrix(packed, 1, 1)); }),
            "pack: the code of row 0, column 1 is 16, must be at most 15");
  std::vector<float> values = {1.0f, 2.5f};
  const TensorView<const float, 2> view = matrix(values, 1, 2);
  EXPECT_NE(message_of([&] { pack_values(view, matrix(packed, 1, 1)); }).find("2.5"),
            std::string::npos);
  std::vector<std::uint8_t> out(3);
  EXPECT_EQ(message_of([&] { swizzle_scales(matrix(codes, 1, 2), ScaleLayout::k8x4, out); }),
            "swizzle: out holds 3 bytes, must hold 32");
}

TEST(Pack, GgmlBlocksHoldTheSameCodes) {
  for (const bool mx : {false, true}) {
    const Quantizer rule = mx ? mx_rule(ScaleRule::kMxFloor) : kLockstep;
    const std::int64_t cols = 128;
    Packed packed(2, cols, rule.block);
    for (std::size_t i = 0; i < packed.codes.size(); ++i) {
      packed.codes[i] = static_cast<std::uint8_t>(i * 29);
    }
    for (std::size_t i = 0; i < packed.scales.size(); ++i) {
      packed.scales[i] = static_cast<std::uint8_t>(i + 1);
    }
    const std::int64_t width = ggml_row_bytes(rule, cols);
    EXPECT_EQ(width, mx ? 4 * 17 : 2 * 36);
    std::vector<std::uint8_t> blocks(static_cast<std::size_t>(2 * width), 0xEE);
    pack_ggml(packed.view(), rule, matrix(blocks, 2, width));
    EXPECT_EQ(blocks[0], 1);
    const std::int64_t half = mx ? 16 : 8;
    EXPECT_EQ(blocks[mx ? 1 : 4], packed.code(0, 0) | packed.code(0, half) << 4);
    Packed back(2, cols, rule.block);
    back.global = packed.global;
    unpack_ggml(matrix(blocks, 2, width), rule, back.view());
    EXPECT_EQ(back, packed);
  }
}

}  // namespace
}  // namespace lockstep::kernels
