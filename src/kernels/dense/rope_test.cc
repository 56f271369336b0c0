#include "kernels/dense/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/error.h"
#include "kernels/dense/check.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

using RopeOn = OnVectors;

INSTANTIATE_TEST_SUITE_P(Vectors, RopeOn, kRowVectors);

TEST_P(RopeOn, TurnsEachPairByItsAngle) {
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

TEST_P(RopeOn, NormalizesHeadsFirst) {
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

}  // namespace
}  // namespace lockstep::kernels
