#include "device/cuda/law.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"

namespace lockstep::cuda {
namespace {

Law power(double exponent, double spread = 0) {
  Law law = {.cost = "time", .size = "tokens", .slope = 1, .within = 0.1};
  for (int i = 0; i < 4; ++i) {
    const double x = 1000 << i;
    law.add(x, 3 * std::pow(x, exponent) * (i % 2 ? 1 + spread : 1));
  }
  return law;
}

TEST(Law, FindsTheExponent) {
  for (const double exponent : {0.0, 0.5, 1.0, 2.0, -1.0}) {
    EXPECT_NEAR(slope_of(power(exponent)), exponent, 1e-12);
  }
}

TEST(Law, HoldsWithinItsTolerance) {
  EXPECT_TRUE(holds(power(1)));
  EXPECT_TRUE(holds(power(1.09)));
  EXPECT_TRUE(holds(power(0.91)));
  EXPECT_FALSE(holds(power(1.11)));
  EXPECT_FALSE(holds(power(0.5)));
  EXPECT_TRUE(holds(power(1, 0.05)));
  Law flat = power(0);
  EXPECT_FALSE(holds(flat));
  flat.slope = 0;
  EXPECT_TRUE(holds(flat));
}

TEST(Law, SaysItsPointsAndVerdict) {
  const std::string good = to_string(power(1)), bad = to_string(power(2));
  EXPECT_NE(good.find("time by tokens (1000: 3000, "), std::string::npos) << good;
  EXPECT_NE(good.find("+1.000"), std::string::npos) << good;
  EXPECT_NE(good.find(": holds"), std::string::npos) << good;
  EXPECT_NE(bad.find("DOES NOT HOLD"), std::string::npos) << bad;
}

TEST(Law, RefusesWhatHasNoSlope) {
  Law one = {.cost = "time", .size = "tokens"};
  EXPECT_THROW(slope_of(one), Error);
  one.add(1, 1);
  EXPECT_THROW(slope_of(one), Error);
  one.add(1, 2);
  EXPECT_THROW(slope_of(one), Error);
  one.add(2, 0);
  EXPECT_THROW(slope_of(one), Error);
}

}  // namespace
}  // namespace lockstep::cuda
