#include "kernels/dense/lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

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

}  // namespace
}  // namespace lockstep::kernels
