#include "kernels/dense/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/philox.h"
#include "kernels/dense/check.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

using ElementwiseOn = OnVectors;

INSTANTIATE_TEST_SUITE_P(Vectors, ElementwiseOn, kRowVectors);

TEST_P(ElementwiseOn, ResidualAddNamesTheFirstRowThatIsNotFinite) {
  const std::int64_t rows = 300, cols = 33;
  const auto x = random_bf16(rows * cols, 7), h = random_bf16(rows * cols, 8);
  auto sum = h;
  EXPECT_EQ(residual_add(rows_of(x.data(), rows, cols), rows_of(sum.data(), rows, cols)), -1);
  for (std::size_t i = 0; i < sum.size(); ++i) {
    ASSERT_EQ(bits_of(sum[i]), bits_of(to_bf16(to_float(x[i]) + to_float(h[i]))));
  }
  auto bad = x;
  bad[static_cast<std::size_t>(290 * cols + 5)] = to_bf16(INFINITY);
  bad[static_cast<std::size_t>(41 * cols + 32)] = to_bf16(NAN);
  EXPECT_EQ(first_nonfinite(rows_of(x.data(), rows, cols)), -1);
  EXPECT_EQ(first_nonfinite(rows_of(bad.data(), rows, cols)), 41);
  EXPECT_EQ(residual_add(rows_of(bad.data(), rows, cols), rows_of(sum.data(), rows, cols)), 41);
}

TEST_P(ElementwiseOn, CombineAddsSlotsInOrder) {
  const std::int64_t rows = 5, slots = 3, cols = 150;
  std::mt19937 random(9);
  std::normal_distribution<float> gauss;
  std::vector<float> y, gates;
  for (std::int64_t i = 0; i < rows * slots * cols; ++i) y.push_back(gauss(random));
  for (std::int64_t i = 0; i < rows * slots; ++i) gates.push_back(std::abs(gauss(random)));
  std::vector<Bf16> out(static_cast<std::size_t>(rows * cols));
  combine({.y = rows_of(y.data(), rows * slots, cols),
           .gates = rows_of(gates.data(), rows, slots),
           .out = rows_of(out.data(), rows, cols)},
          {});
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < cols; ++i) {
      float sum = 0;
      for (std::int64_t s = 0; s < slots; ++s) {
        sum += gates[static_cast<std::size_t>(row * slots + s)] *
               y[static_cast<std::size_t>((row * slots + s) * cols + i)];
      }
      ASSERT_EQ(bits_of(out[static_cast<std::size_t>(row * cols + i)]), bits_of(to_bf16(sum)));
    }
  }
}

struct Noised {
  std::vector<Bf16> x, y;
};

Noised noised(std::int64_t rows, std::int64_t cols, float sigma, std::uint32_t site,
              std::uint64_t first_stream = 1) {
  Noised result{random_bf16(rows * cols, 10), {}};
  std::vector<std::uint64_t> streams;
  std::vector<std::int32_t> positions;
  for (std::int64_t row = 0; row < rows; ++row) {
    streams.push_back(first_stream + static_cast<std::uint64_t>(row / 10));
    positions.push_back(static_cast<std::int32_t>(row % 10));
  }
  result.y = result.x;
  drift_noise({.x = rows_of(result.y.data(), rows, cols),
               .sigma = sigma,
               .seed = 99,
               .streams = streams,
               .positions = positions,
               .site = site},
              {});
  return result;
}

/// x + sigma / sqrt 2 (rms e1 + x e2): mean 0, variance sigma^2 / 2 (rms^2 + x^2), and Gaussian in
/// its fourth moment. BF16's own rounding is kept small against sigma.
TEST_P(ElementwiseOn, DriftNoiseHasTheSpreadItDeclares) {
  const std::int64_t rows = 2000, cols = 160;
  const float sigma = 0.2f;
  const Noised n = noised(rows, cols, sigma, 3);
  double mean = 0, second = 0, fourth = 0, neighbours = 0, last = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (std::int64_t i = 0; i < cols; ++i) {
      const double v = to_float(n.x[static_cast<std::size_t>(row * cols + i)]);
      squares += v * v / static_cast<double>(cols);
    }
    for (std::int64_t i = 0; i < cols; ++i) {
      const auto at = static_cast<std::size_t>(row * cols + i);
      const double v = to_float(n.x[at]);
      const double z = (to_float(n.y[at]) - v) / (sigma * std::sqrt((squares + v * v) / 2));
      mean += z;
      second += z * z;
      fourth += z * z * z * z;
      neighbours += z * last;
      last = z;
    }
  }
  const auto count = static_cast<double>(rows * cols);
  const double error = 1 / std::sqrt(count);  // 320,000 draws: .0018
  EXPECT_NEAR(mean / count, 0, 5 * error);
  EXPECT_NEAR(second / count, 1, 5 * 1.5 * error);
  EXPECT_NEAR(fourth / count, 3, 5 * 10 * error);
  EXPECT_NEAR(neighbours / count, 0, 5 * error);
}

TEST_P(ElementwiseOn, DriftNoiseFollowsTheNameOfARowAlone) {
  const Noised all = noised(40, 97, 0.1f, 4);
  auto one = std::vector<Bf16>(all.x.begin() + 23 * 97, all.x.begin() + 24 * 97);
  const std::vector<std::uint64_t> stream = {1 + 2};
  const std::vector<std::int32_t> position = {3};
  drift_noise({.x = rows_of(one.data(), 1, 97),
               .sigma = 0.1f,
               .seed = 99,
               .streams = stream,
               .positions = position,
               .site = 4},
              {});
  EXPECT_TRUE(one == std::vector<Bf16>(all.y.begin() + 23 * 97, all.y.begin() + 24 * 97));
  EXPECT_FALSE(all.y == noised(40, 97, 0.1f, 5).y) << "another site, another draw";
  EXPECT_FALSE(all.y == noised(40, 97, 0.1f, 4, 1000).y) << "another span, another draw";
  EXPECT_TRUE(all.x == noised(40, 97, 0.0f, 4).y) << "sigma 0 adds nothing";
}

/// The draw that the header names, computed apart from the op: philox(), then Box and Muller in
/// double.
TEST_P(ElementwiseOn, DriftNoiseIsTheDrawThatItsHeaderNames) {
  const std::int64_t cols = 70;
  const Noised n = noised(25, cols, 0.5f, 6);
  const std::int64_t row = 17;
  double squares = 0;
  for (std::int64_t i = 0; i < cols; ++i) {
    const double v = to_float(n.x[static_cast<std::size_t>(row * cols + i)]);
    squares += v * v / static_cast<double>(cols);
  }
  for (std::int64_t i = 0; i < cols; ++i) {
    const PhiloxWords words =
        philox(99, philox_counter(2, 7, (6u << 16) + static_cast<std::uint32_t>(i / 2)));
    const std::uint32_t a = words[i % 2 == 0 ? 0 : 2], b = words[i % 2 == 0 ? 1 : 3];
    const double radius = std::sqrt(-2 * std::log(((a >> 8) + 0.5) * 0x1p-24));
    const double angle = 2 * 3.14159265358979323846 * b * 0x1p-32;
    const double v = to_float(n.x[static_cast<std::size_t>(row * cols + i)]);
    const double exact = v + 0.5 / std::sqrt(2.0) * radius *
                                 (std::sqrt(squares) * std::cos(angle) + v * std::sin(angle));
    ASSERT_NEAR(to_float(n.y[static_cast<std::size_t>(row * cols + i)]), exact,
                0x1p-8 * std::abs(exact) + 1e-5);
  }
}

}  // namespace
}  // namespace lockstep::kernels
