// The widest and the largest that the W4A4 product takes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/w4a4.h"

namespace lockstep::kernels {
namespace {

/// A row of one code under one scale byte.
Packed flat(std::int32_t cols, std::uint8_t code, std::uint8_t scale) {
  Packed row(1, cols, 16);
  std::fill(row.codes.begin(), row.codes.end(), static_cast<std::uint8_t>(code * 17));
  std::fill(row.scales.begin(), row.scales.end(), scale);
  row.global[0] = 1.0f;
  return row;
}

// Every code 6, every scale 448, and a residual that adds to it counted by half twice: no larger
// sum can come, and it fits 63 bits.
TEST(W4a4Limits, TheLargestSumFits) {
  constexpr std::int32_t kCols = 1 << 16;
  Packed a = flat(kCols, 0x7, 0x7E), w = flat(kCols, 0x7, 0x7E), r = flat(kCols, 0xF, 0x7E);
  std::vector<std::byte> memory(static_cast<std::size_t>(W4a4Weights::expert_bytes(1, kCols)) + 64);
  auto* aligned = reinterpret_cast<std::byte*>(
      (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
  const W4a4Weights weights = {aligned, 1, 1, kCols};
  w4a4_fill(weights, 0, 0, w.view());
  const double block = 2304.0 * 229376.0 * 229376.0;
  for (const std::int32_t halvings : {0, 1, 2}) {
    for (const Isa isa : {Isa::kPortable, best_isa()}) {
      float out = 0.0f;
      w4a4_on({.a = a.view(),
               .residual = r.view(),
               .w = weights,
               .out = {&out, {1, 1}, {1, 1}},
               .residual_halvings = halvings},
              isa);
      const double sum = ((4 << halvings) + 1) * block * (kCols / 16);
      ASSERT_LT(sum, 9.2e18);
      EXPECT_EQ(out, static_cast<float>(std::ldexp(sum, -22 - halvings)));
    }
  }
}

TEST(W4a4Limits, WiderIsRefused) {
  constexpr std::int32_t kCols = (1 << 16) + 16;
  Packed w = flat(kCols, 0x7, 0x7E);
  try {
    w4a4_fill({nullptr, 1, 1, kCols}, 0, 0, w.view());
    FAIL() << "a row that is too wide was taken";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "w4a4_fill: rows has 65552 columns, must be a multiple of 16, at most 65536");
  }
}

}  // namespace
}  // namespace lockstep::kernels
