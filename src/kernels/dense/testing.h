/// What the tests of this folder share.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/dense/vectors.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {

inline std::vector<Bf16> random_bf16(std::int64_t count, std::uint32_t seed, float spread = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss(0.0f, spread);
  std::vector<Bf16> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(to_bf16(gauss(random)));
  return values;
}

/// A test that runs on each set of instructions that this machine has.
class OnVectors : public testing::TestWithParam<Vectors> {
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

inline const auto kRowVectors =
    testing::Values(Vectors::kPortable, Vectors::kAvx2, Vectors::kAvx512);

}  // namespace lockstep::kernels
