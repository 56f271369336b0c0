#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/dense/check.h"
#include "kernels/dense/sample.h"
#include "rollout/sampler.h"

namespace lockstep::rollout {
namespace {

struct Drawn {
  std::vector<std::int32_t> tokens;
  std::vector<float> logps;
};

/// What the kernel makes of these rows.
Drawn draw(const std::vector<float>& logits, std::int64_t rows, float temperature,
           const std::vector<Draw>& draws, const std::vector<std::int32_t>& given) {
  const Device device = kFirstCuda;
  std::vector<kernels::SampleName> names;
  for (const Draw& d : draws) {
    names.push_back({static_cast<std::uint64_t>(d.prompt.value),
                     static_cast<std::uint32_t>(d.position), draw_counter(d.sample)});
  }
  const auto count = static_cast<std::int64_t>(logits.size()) / rows;
  const Buffer from = to_device(logits, device), name = to_device(names, device);
  const Buffer token_given = to_device(given, device);
  const Buffer heat =
      to_device(std::vector<float>(static_cast<std::size_t>(rows), temperature), device);
  const Buffer tokens =
      to_device(std::vector<std::int32_t>(static_cast<std::size_t>(rows), -7), device);
  const Buffer logps(device, rows * 4);
  const Buffer workspace(device, kernels::sample_workspace(rows, count));
  const auto n = static_cast<std::size_t>(rows);
  kernels::sample({.logits = kernels::rows_of(from.as<const float>(), rows, count, device),
                   .temperatures = {heat.as<float>(), n},
                   .seed = draws[0].seed,
                   .names = {name.as<kernels::SampleName>(), n},
                   .given = {token_given.as<std::int32_t>(), given.size()},
                   .tokens = {tokens.as<std::int32_t>(), n},
                   .logps = {logps.as<float>(), n},
                   .workspace = {workspace.as<>(), static_cast<std::size_t>(workspace.bytes())}},
                  {});
  return {to_host<std::int32_t>(tokens), to_host<float>(logps)};
}

class SamplerOn : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "sampler_test.cc has the CPU's";
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, SamplerOn, testing::ValuesIn(devices()), name_of_device);

TEST_P(SamplerOn, DrawsTheCpusTokensAndLogProbs) {
  std::mt19937 random(3);
  std::normal_distribution<float> gauss(0.0f, 3.0f);
  for (const std::int64_t count : {1, 16, 127, 128, 300, 5000, 151936}) {
    const std::int64_t rows = count > 10000 ? 24 : 200;
    std::vector<float> logits;
    for (std::int64_t i = 0; i < rows * count; ++i) logits.push_back(gauss(random));
    for (std::int64_t i = 0; i < count; ++i) {
      logits[static_cast<std::size_t>(i)] = 1.5f;  // all alike
      const bool possible = i == count - 1 || i == count / 3;
      logits[static_cast<std::size_t>(count + i)] =
          possible ? 2.0f : -std::numeric_limits<float>::infinity();
      logits[static_cast<std::size_t>(2 * count + i)] = i == count / 2 ? 400.0f : -200.0f;
    }
    std::vector<Draw> draws;
    std::vector<std::int32_t> given;
    for (std::int64_t row = 0; row < rows; ++row) {
      draws.push_back({.seed = 0x1234567890ull,
                       .prompt = PromptId{row / 3 + (std::int64_t{1} << 33)},
                       .sample = static_cast<std::int32_t>(row % 3),
                       .position = static_cast<std::int32_t>(row * 17)});
      const auto token = static_cast<std::int32_t>(row * 7 % count);
      given.push_back(row % 4 == 0 ? token : row % 4 == 1 ? kernels::kLikeliest : -1);
    }
    for (const float temperature : {1.0f, 0.7f}) {
      for (const bool all_drawn : {true, false}) {
        const Drawn got =
            draw(logits, rows, temperature, draws, all_drawn ? std::vector<std::int32_t>{} : given);
        for (std::int64_t row = 0; row < rows; ++row) {
          const auto i = static_cast<std::size_t>(row);
          const Distribution cpu({logits.data() + row * count, static_cast<std::size_t>(count)},
                                 temperature);
          const bool greedy = !all_drawn && given[i] == kernels::kLikeliest;
          Choice wanted = cpu.sample({.top_k = greedy ? 1 : 0}, draws[i]);
          if (!all_drawn && given[i] >= 0) wanted = {given[i], cpu.logp(given[i])};
          ASSERT_EQ(got.tokens[i], wanted.token) << row << " of " << count;
          ASSERT_FLOAT_EQ(got.logps[i], wanted.logp) << row << " of " << count;
        }
      }
    }
  }
}

// Samples that share a prompt's row, each under its own request's seed.
TEST_P(SamplerOn, DrawsMoreThanOnceFromARow) {
  constexpr std::int64_t kRows = 3, kCount = 700;
  const Device device = GetParam();
  std::mt19937 random(8);
  std::normal_distribution<float> gauss(0.0f, 2.0f);
  std::vector<float> logits;
  for (std::int64_t i = 0; i < kRows * kCount; ++i) logits.push_back(gauss(random));
  const std::vector<std::int32_t> rows = {2, 2, 0, 1, 1, 1, 2};
  std::vector<std::uint64_t> seeds;
  std::vector<kernels::SampleName> names;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    seeds.push_back(i * 1000003);
    names.push_back({4, 9, draw_counter(static_cast<std::int32_t>(i))});
  }
  const auto n = rows.size();
  const Buffer from = to_device(logits, device), row = to_device(rows, device),
               seed = to_device(seeds, device), name = to_device(names, device),
               heat = to_device(std::vector<float>(n, 0.9f), device);
  const Buffer tokens = to_device(std::vector<std::int32_t>(n, -7), device);
  const Buffer logps = to_device(std::vector<float>(n), device);
  const Buffer workspace(device, kernels::sample_workspace(std::ssize(rows), kCount));
  kernels::sample({.logits = kernels::rows_of(from.as<const float>(), kRows, kCount, device),
                   .rows = {row.as<std::int32_t>(), n},
                   .temperatures = {heat.as<float>(), n},
                   .seeds = {seed.as<std::uint64_t>(), n},
                   .names = {name.as<kernels::SampleName>(), n},
                   .tokens = {tokens.as<std::int32_t>(), n},
                   .logps = {logps.as<float>(), n},
                   .workspace = {workspace.as<>(), static_cast<std::size_t>(workspace.bytes())}},
                  {});
  const std::vector<std::int32_t> got = to_host<std::int32_t>(tokens);
  const std::vector<float> logp = to_host<float>(logps);
  for (std::size_t i = 0; i < n; ++i) {
    const Distribution cpu({logits.data() + rows[i] * kCount, kCount}, 0.9f);
    const Choice wanted = cpu.sample({}, {.seed = seeds[i],
                                          .prompt = PromptId{4},
                                          .sample = static_cast<std::int32_t>(i),
                                          .position = 9});
    EXPECT_EQ(got[i], wanted.token);
    EXPECT_FLOAT_EQ(logp[i], wanted.logp);
  }
}

TEST_P(SamplerOn, TellsOfANan) {
  std::vector<float> logits(2 * 1000, 1.0f);
  logits[1777] = std::nanf("");
  const std::vector<Draw> draws(2, Draw{.seed = 5, .prompt = PromptId{1}});
  const Drawn got = draw(logits, 2, 1.0f, draws, {});
  EXPECT_GE(got.tokens[0], 0);
  EXPECT_EQ(got.tokens[1], -1);
  EXPECT_TRUE(std::isnan(got.logps[1]));
}

}  // namespace
}  // namespace lockstep::rollout
