#include "sync/reweigh.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "sync/testing.h"

namespace lockstep::sync {
namespace {

const testing::Masters kMasters(testing::small_model(512), 0.5f);

using Values = std::map<WeightId, std::vector<float>>;

Values values(const WeightSource& source) {
  Values all;
  source.each([&](const Weight& weight) {
    const auto& view = std::get<TensorView<const float, 2>>(weight.value);
    all[weight.id].assign(view.data, view.data + view.shape[0] * view.shape[1]);
  });
  return all;
}

TEST(NoiseSigma, TenStagesOfWhichTheFirstIsQuiet) {
  const Noise qerl = {.start = 1e-2, .end = 1e-4, .stages = 10};
  EXPECT_EQ(noise_sigma(qerl, 0, 100), 0);
  EXPECT_EQ(noise_sigma(qerl, 9, 100), 0);
  EXPECT_DOUBLE_EQ(noise_sigma(qerl, 10, 100), 1e-2);
  EXPECT_DOUBLE_EQ(noise_sigma(qerl, 50, 100), 1e-3);  // i = 4 of 8
  EXPECT_NEAR(noise_sigma(qerl, 99, 100), 1e-4, 1e-18);
  EXPECT_NEAR(noise_sigma(qerl, 100, 100), 1e-4, 1e-18);  // weights behind the last step
  EXPECT_EQ(noise_sigma({}, 50, 100), 0);
  const Noise each_step = {.start = 1e-2, .end = 1e-3, .stages = 0};
  EXPECT_DOUBLE_EQ(noise_sigma(each_step, 0, 21), 1e-2);
  EXPECT_NEAR(noise_sigma(each_step, 10, 21), std::sqrt(1e-5), 1e-12);
  EXPECT_NEAR(noise_sigma(each_step, 20, 21), 1e-3, 1e-12);
}

TEST(Noised, NormsGetFreshGaussianNoiseThatNeverPilesUp) {
  const Values plain = values(kMasters);
  const Noised first(kMasters, NoiseOn::kNorms, 0.01, 5, WeightVersion{1});
  const Values once = values(first);
  EXPECT_EQ(once, values(first));  // added to the masters' own numbers each time
  const Values next = values(Noised(kMasters, NoiseOn::kNorms, 0.01, 5, WeightVersion{2}));
  const Values other = values(Noised(kMasters, NoiseOn::kNorms, 0.01, 6, WeightVersion{1}));
  double sum = 0, square = 0, cross = 0, n = 0;
  for (const auto& [id, before] : plain) {
    const bool noisy = is_vector(id.role) && id.role != WeightId::Role::kQNorm &&
                       id.role != WeightId::Role::kKNorm;
    EXPECT_EQ(once.at(id) != before, noisy) << to_string(id);
    EXPECT_EQ(once.at(id) != next.at(id), noisy);
    EXPECT_EQ(once.at(id) != other.at(id), noisy);
    for (std::size_t i = 0; noisy && i < before.size(); ++i) {
      const double e = (once.at(id)[i] - before[i]) / 0.01, f = (next.at(id)[i] - before[i]) / 0.01;
      sum += e, square += e * e, cross += e * f, n += 1;
    }
  }
  EXPECT_EQ(n, 5 * 512);
  EXPECT_NEAR(sum / n, 0, 0.06);
  EXPECT_NEAR(square / n, 1, 0.09);
  EXPECT_NEAR(cross / n, 0, 0.06);
}

TEST(Noised, ExpertsGetNoiseOfTheirOwnSize) {
  const Values plain = values(kMasters);
  const Values noisy = values(Noised(kMasters, NoiseOn::kExperts, 0.1, 5, WeightVersion{1}));
  for (const auto& [id, before] : plain) {
    EXPECT_EQ(noisy.at(id) != before, of_expert(id.role));
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < before.size(); ++i) {
      error += std::pow(noisy.at(id)[i] - before[i], 2), norm += std::pow(before[i], 2);
    }
    if (of_expert(id.role)) {
      EXPECT_NEAR(std::sqrt(error / norm), 0.1, 0.01) << to_string(id);
    }
  }
}

TEST(Rescaled, DividesWhatTheNormMultiplies) {
  const Values plain = values(kMasters), scaled = values(Rescaled(kMasters, 1.5));
  for (const auto& [id, before] : plain) {
    const auto role = id.role;
    const float factor = role == WeightId::Role::kMlpNorm ? 1.5f
                         : role == WeightId::Role::kRouter || role == WeightId::Role::kGateUp
                             ? 1 / 1.5f
                             : 1.0f;
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_NEAR(scaled.at(id)[i], before[i] * factor, 1e-7) << to_string(id);
    }
  }
  EXPECT_EQ(values(Rescaled(kMasters, 1.0)), plain);
}

}  // namespace
}  // namespace lockstep::sync
