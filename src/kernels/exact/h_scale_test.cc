#include "kernels/exact/h_scale.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kRows = 24, kCols = 64;

Quantizer weight_rule() {
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  return rule;
}

struct Case {
  std::vector<float> w;
  std::vector<double> h;
  Packed plain{kRows, kCols, 16}, refined{kRows, kCols, 16};

  Case() {
    for (std::uint64_t i = 0; i < kRows * kCols; ++i) {
      w.push_back(to_float(to_bf16(normal(3, i) * (i % 37 == 0 ? 5.0f : 1.0f))));
    }
    for (std::uint64_t c = 0; c < kCols; ++c) h.push_back(std::exp(2.0 * normal(4, c)));
  }
  void run() {
    quantize_weight(matrix<const float>(), weight_rule(), plain.view());
    quantize_weight_h_scale(matrix<const float>(), h, weight_rule(), refined.view());
  }
  template <typename T>
  TensorView<T, 2> matrix() {
    return {w.data(), {kRows, kCols}, {kCols, 1}};
  }
  double loss(Packed& packed, std::int64_t row, std::int64_t block) {
    std::vector<float> back(w.size());
    dequantize({.codes = packed.view(),
                .rule = weight_rule(),
                .f32 = kernels::matrix(back, kRows, kCols)});
    double sum = 0;
    for (std::int64_t c = block * 16; c < block * 16 + 16; ++c) {
      const auto at = static_cast<std::size_t>(row * kCols + c);
      const double d = static_cast<double>(back[at]) - static_cast<double>(w[at]);
      sum += h[static_cast<std::size_t>(c)] * d * d;
    }
    return sum;
  }
};

TEST(HScale, NoBlockLosesMoreAndNoNeighbourLosesLess) {
  Case c;
  c.run();
  double plain = 0, refined = 0;
  int moved = 0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t j = 0; j < kCols / 16; ++j) {
      const auto at = static_cast<std::size_t>(row * (kCols / 16) + j);
      const double before = c.loss(c.plain, row, j), after = c.loss(c.refined, row, j);
      ASSERT_LE(after, before);
      plain += before;
      refined += after;
      const int from = c.plain.scales[at], to = c.refined.scales[at];
      ASSERT_LE(to, from + kHScaleUp);
      ASSERT_GE(to, from - kHScaleDown);
      moved += to != from;
      // Every candidate, codes by search over the grid.
      for (int code = std::max(from - 9, 1); code <= std::min(from + 6, 126); ++code) {
        const double scale = static_cast<double>(
            to_float(static_cast<E4m3>(static_cast<std::uint8_t>(code))) * c.plain.global[0]);
        double sum = 0;
        for (std::int64_t k = j * 16; k < j * 16 + 16; ++k) {
          const double a =
              std::abs(static_cast<double>(c.w[static_cast<std::size_t>(row * kCols + k)]));
          double least = a;
          for (const double v : {.5, 1., 1.5, 2., 3., 4., 6.}) {
            least = std::min(least, std::abs(v * scale - a));
          }
          sum += c.h[static_cast<std::size_t>(k)] * least * least;
        }
        ASSERT_GE(sum, after * (1 - 1e-12)) << row << " " << j << " " << code;
      }
    }
  }
  EXPECT_GT(moved, 40);
  EXPECT_LT(refined, 0.85 * plain);
}

TEST(HScale, ColumnsThatCountForNothingLeaveTheScale) {
  Case c;
  std::fill(c.h.begin() + 16, c.h.begin() + 48, 0.0);
  c.run();
  for (std::size_t at = 0; at < c.plain.scales.size(); ++at) {
    if (at % 4 == 1 || at % 4 == 2) {
      EXPECT_EQ(c.refined.scales[at], c.plain.scales[at]);
    }
  }
  EXPECT_NE(c.refined.scales, c.plain.scales);
}

TEST(HScale, NamesWhatIsWrong) {
  Case c;
  c.h.pop_back();
  EXPECT_THROW(c.run(), Error);
  c.h.push_back(-1.0);
  EXPECT_THROW(c.run(), Error);
}

}  // namespace
}  // namespace lockstep::kernels
