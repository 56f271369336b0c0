#include "kernels/dense/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/dense/check.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

using RmsNormOn = OnVectors;

INSTANTIATE_TEST_SUITE_P(Vectors, RmsNormOn, kRowVectors);

TEST_P(RmsNormOn, IsWithinTwoRoundings) {
  for (const std::int64_t cols : {7, 16, 128, 160, 1000}) {
    const std::int64_t rows = 9;
    const auto x = random_bf16(rows * cols, 1, 3.0f), w = random_bf16(cols, 2);
    const auto run = [&] {
      std::vector<Bf16> y(x.size());
      rms_norm(
          {.x = rows_of(x.data(), rows, cols), .weight = w, .y = rows_of(y.data(), rows, cols)},
          {});
      return y;
    };
    const auto y = run();
    for (std::int64_t row = 0; row < rows; ++row) {
      double squares = 0;
      for (std::int64_t i = 0; i < cols; ++i) {
        const double v = to_float(x[static_cast<std::size_t>(row * cols + i)]);
        squares += v * v;
      }
      const double inverse = 1 / std::sqrt(squares / static_cast<double>(cols) + 1e-6);
      for (std::int64_t i = 0; i < cols; ++i) {
        const auto at = static_cast<std::size_t>(row * cols + i);
        const double exact = to_float(x[at]) * inverse * to_float(w[static_cast<std::size_t>(i)]);
        // Two roundings to BF16 (2^-8 each) and an FP32 sum.
        ASSERT_LE(std::abs(to_float(y[at]) - exact), 0x1.02p-7 * std::abs(exact));
      }
    }
    expect_definition(run);
  }
}

}  // namespace
}  // namespace lockstep::kernels
