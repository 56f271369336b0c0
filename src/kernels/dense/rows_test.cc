/// The ops that take a row at a time: rms_norm, rope, router, and those of elementwise.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "kernels/dense/check.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/lanes.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "kernels/dense/router.h"
#include "kernels/dense/vectors.h"

namespace lockstep::kernels {
namespace {

std::vector<Bf16> random_bf16(std::int64_t count, std::uint32_t seed, float spread = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss(0.0f, spread);
  std::vector<Bf16> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(to_bf16(gauss(random)));
  return values;
}

class RowsOn : public testing::TestWithParam<Vectors> {
 protected:
  void SetUp() override {
    if (GetParam() > best_vectors()) GTEST_SKIP() << "this machine has no such instructions";
    set_vectors(GetParam());
  }
  void TearDown() override { set_vectors(best_vectors()); }

  /// What `run` returns is the same bits on these instructions and by the definition.
  template <typename Run>
  void expect_definition(const Run& run) {
    const auto mine = run();
    set_vectors(Vectors::kPortable);
    EXPECT_TRUE(mine == run());
    set_vectors(GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Vectors, RowsOn,
                         testing::Values(Vectors::kPortable, Vectors::kAvx2, Vectors::kAvx512));

TEST_P(RowsOn, RmsNormIsWithinTwoRoundings) {
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

TEST_P(RowsOn, RopeTurnsEachPairByItsAngle) {
  const std::int32_t dim = 32;
  RopeTable table(1e4, dim);
  table.grow(2000);
  const std::vector<std::int32_t> positions = {0, 1, 7, 1999};
  const std::int64_t rows = 4, cols = 3 * dim;
  const auto x = random_bf16(rows * cols, 3);
  const auto run = [&] {
    auto y = x;
    rope({.x = rows_of(y.data(), rows, cols),
          .head_dim = dim,
          .positions = positions,
          .table = &table},
         {});
    return y;
  };
  const auto y = run();
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < cols; ++i) {
      const std::int64_t c = i % dim, pair = c % 16;
      const double angle =
          positions[static_cast<std::size_t>(row)] * std::pow(1e4, -static_cast<double>(pair) / 16);
      const double mine = to_float(x[static_cast<std::size_t>(row * cols + i)]);
      const std::int64_t partner = c < 16 ? i + 16 : i - 16;
      const double other = to_float(x[static_cast<std::size_t>(row * cols + partner)]);
      const double exact = mine * std::cos(angle) + (c < 16 ? -other : other) * std::sin(angle);
      const double got = to_float(y[static_cast<std::size_t>(row * cols + i)]);
      ASSERT_LE(std::abs(got - exact),
                0x1p-8 * std::abs(exact) + 0x1p-21 * (std::abs(mine) + std::abs(other)));
      ASSERT_TRUE(row != 0 || got == mine) << "position 0 turns nothing";
    }
  }
  expect_definition(run);
}

TEST_P(RowsOn, RopeNormalizesHeadsFirst) {
  const std::int32_t dim = 16;
  RopeTable table(1e4, dim);
  table.grow(50);
  const std::vector<std::int32_t> positions = {3, 49};
  const auto x = random_bf16(2 * 64, 4), w = random_bf16(dim, 5);
  auto fused = x, apart = x;
  rope({.x = rows_of(fused.data(), 2, 64),
        .head_dim = dim,
        .positions = positions,
        .table = &table,
        .norm = w},
       {});
  rms_norm({.x = rows_of(apart.data(), 8, dim), .weight = w, .y = rows_of(apart.data(), 8, dim)},
           {});
  rope(
      {.x = rows_of(apart.data(), 2, 64), .head_dim = dim, .positions = positions, .table = &table},
      {});
  EXPECT_TRUE(fused == apart);
}

TEST(Rope, RefusesAPositionItHasNoAngleFor) {
  RopeTable table(1e4, 16);
  table.grow(10);
  std::vector<Bf16> x(16);
  const std::vector<std::int32_t> beyond = {10};
  EXPECT_THROW(
      rope({.x = rows_of(x.data(), 1, 16), .head_dim = 16, .positions = beyond, .table = &table},
           {}),
      Error);
}

TEST(Router, TakesTheGreatestAndTheLowerOfTwoEqual) {
  const std::vector<float> logits = {1, 3, 3, 2, 3, 0, 0, 0, 0, 0, -5, 9, 9, 9, 9};
  std::vector<std::int32_t> experts(6);
  std::vector<float> gates(6);
  router({.logits = rows_of(logits.data(), 3, 5),
          .normalize = true,
          .experts = rows_of(experts.data(), 3, 2),
          .gates = rows_of(gates.data(), 3, 2)},
         {});
  EXPECT_EQ(experts, (std::vector<std::int32_t>{1, 2, 0, 1, 1, 2}));
  for (const float gate : gates) EXPECT_FLOAT_EQ(gate, 0.5f);
}

TEST(Router, GatesAreSoftmaxOverAllExperts) {
  std::mt19937 random(6);
  std::normal_distribution<float> gauss(0.0f, 3.0f);
  const std::int64_t rows = 50, count = 128, chosen = 8;
  std::vector<float> logits;
  for (std::int64_t i = 0; i < rows * count; ++i) logits.push_back(gauss(random));
  std::vector<std::int32_t> experts(static_cast<std::size_t>(rows * chosen));
  std::vector<float> plain(experts.size()), normal(experts.size());
  for (const bool normalize : {false, true}) {
    router({.logits = rows_of(logits.data(), rows, count),
            .normalize = normalize,
            .experts = rows_of(experts.data(), rows, chosen),
            .gates = rows_of((normalize ? normal : plain).data(), rows, chosen)},
           {});
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    std::vector<double> p;
    for (std::int64_t e = 0; e < count; ++e) {
      p.push_back(std::exp(static_cast<double>(logits[static_cast<std::size_t>(row * count + e)])));
    }
    double total = 0, kept = 0;
    for (const double x : p) total += x;
    std::vector<double> sorted = p;
    std::sort(sorted.rbegin(), sorted.rend());
    for (std::int64_t slot = 0; slot < chosen; ++slot) {
      const auto at = static_cast<std::size_t>(row * chosen + slot);
      const double mine = p[static_cast<std::size_t>(experts[at])];
      EXPECT_EQ(mine, sorted[static_cast<std::size_t>(slot)]);
      // exp to 2 ulp, a sum of 128 terms, one division: well within 2^-16.
      EXPECT_NEAR(plain[at], mine / total, mine / total * 0x1p-16);
      kept += mine;
    }
    for (std::int64_t slot = 0; slot < chosen; ++slot) {
      const auto at = static_cast<std::size_t>(row * chosen + slot);
      const double exact = p[static_cast<std::size_t>(experts[at])] / kept;
      EXPECT_NEAR(normal[at], exact, exact * 0x1p-16);
    }
  }
}

TEST(Lanes, ExpIsWithinThreeUnits) {
  double worst = 0;
  for (float x = -87.0f; x < 88.0f; x += 0.000371f) {
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(exp_fp32(x) - exact) / exact);
  }
  EXPECT_LT(worst, 3 * 0x1p-24);
  EXPECT_EQ(exp_fp32(0.0f), 1.0f);
  EXPECT_EQ(exp_fp32(-INFINITY), 0.0f);
  EXPECT_EQ(exp_fp32(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_fp32(NAN)));
}

TEST_P(RowsOn, ResidualAddNamesTheFirstRowThatIsNotFinite) {
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

TEST_P(RowsOn, CombineAddsSlotsInOrder) {
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
TEST_P(RowsOn, DriftNoiseHasTheSpreadItDeclares) {
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

TEST_P(RowsOn, DriftNoiseFollowsTheNameOfARowAlone) {
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
TEST_P(RowsOn, DriftNoiseIsTheDrawThatItsHeaderNames) {
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
