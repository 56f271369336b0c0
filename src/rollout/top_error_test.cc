#include "rollout/top_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "contract/contract.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"
#include "numerics/bf16.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kRows = 3, kCols = 64;

/// Rows whose largest block is the second: an outlier beside what is as small as elsewhere.
std::vector<Bf16> outliers() {
  std::vector<Bf16> x;
  for (std::int64_t i = 0; i < kRows * kCols; ++i) {
    const bool top = i % kCols == 19;
    x.push_back(to_bf16(top ? 300.0f : 0.3f + 0.11f * static_cast<float>(i % 7)));
  }
  return x;
}

TEST(TopError, IsThatOfTheLargestBlock) {
  const std::vector<Bf16> x = outliers();
  const TensorView<const Bf16, 2> view = {x.data(), {kRows, kCols}, {kCols, 1}};
  for (const Quantizer& rule :
       {contracts::lockstep(1).activation, contracts::preset("mx-even", 1).activation}) {
    std::vector<std::uint8_t> codes(kRows * kCols / 2), scales(kRows * kCols / 16);
    std::vector<float> global(kRows), values(kRows * kCols);
    const std::int64_t blocks = kCols / rule.block;
    const PackedView<std::uint8_t> packed = {{codes.data(), {kRows, kCols / 2}, {kCols / 2, 1}},
                                             {scales.data(), {kRows, blocks}, {blocks, 1}},
                                             {global.data(), {kRows}, {1}}};
    kernels::quantize({.x = view, .rule = rule, .out = packed});
    kernels::dequantize(
        {.codes = packed, .rule = rule, .f32 = {values.data(), {kRows, kCols}, {kCols, 1}}});
    double errors = 0, squares = 0;
    for (std::int64_t row = 0; row < kRows; ++row) {
      const std::int64_t first = row * kCols + 19 / rule.block * rule.block;
      for (std::int64_t i = first; i < first + rule.block; ++i) {
        const double value = static_cast<double>(to_float(x[static_cast<std::size_t>(i)]));
        errors += std::pow(static_cast<double>(values[static_cast<std::size_t>(i)]) - value, 2);
        squares += value * value;
      }
    }
    TopError top;
    top.add(view, rule, packed);
    const double expected = std::sqrt(errors / squares);
    EXPECT_GT(expected, 0.001);
    EXPECT_NEAR(top.take(), expected, 1e-12);
    EXPECT_EQ(top.take(), -1);
    top.add(view, Quantizer{}, packed);  // BF16 loses nothing
    EXPECT_EQ(top.take(), -1);
  }
}

}  // namespace
}  // namespace lockstep::rollout
