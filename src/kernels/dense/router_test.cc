#include "kernels/dense/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/dense/check.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

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

}  // namespace
}  // namespace lockstep::kernels
