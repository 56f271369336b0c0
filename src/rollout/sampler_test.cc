#include "rollout/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "rollout/softmax.h"

namespace lockstep::rollout {
namespace {

std::vector<float> random_logits(std::size_t count, std::uint64_t seed, float spread) {
  std::vector<float> logits(count);
  for (std::size_t i = 0; i < count; ++i) {
    const PhiloxWords words = philox(seed, philox_counter(i, 0, 0));
    logits[i] = spread * static_cast<float>(unit(words[0], words[1]) - 0.5);
  }
  return logits;
}

double log_softmax(const std::vector<float>& logits, double temperature, std::size_t token) {
  double most = -1e300, sum = 0.0;
  for (const float x : logits) most = std::max(most, static_cast<double>(x) / temperature);
  for (const float x : logits) sum += std::exp(static_cast<double>(x) / temperature - most);
  return static_cast<double>(logits[token]) / temperature - most - std::log(sum);
}

TEST(Top, TheLikeliestInFallingOrderAndOfEqualOnesTheFirst) {
  for (const std::size_t count : {1u, 5u, 300u, 4000u}) {
    std::vector<float> logits = random_logits(count, count, 20.0f);
    for (std::size_t i = 0; i < count; i += 3) logits[i] = std::round(logits[i]);  // many ties
    std::vector<Token> order(count);
    for (std::size_t i = 0; i < count; ++i) order[i] = static_cast<Token>(i);
    std::stable_sort(order.begin(), order.end(), [&](Token a, Token b) {
      return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
    });
    const Distribution distribution(logits, 0.7f);
    for (const std::size_t k : {std::size_t{0}, std::size_t{1}, count / 3, count}) {
      std::vector<Token> tokens(k);
      std::vector<float> logps(k);
      distribution.top(tokens, logps);
      EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), order.begin()));
      for (std::size_t i = 0; i < k; ++i) EXPECT_EQ(logps[i], distribution.logp(tokens[i]));
    }
  }
}

TEST(Sampling, TopLogprobsAreOfAllTokens) {
  EXPECT_NO_THROW(check_sampling({.top_logprobs = 8}, true));
  EXPECT_THROW(check_sampling({.top_logprobs = -1}, false), Error);
  EXPECT_THROW(check_sampling({.top_p = 0.9f, .top_logprobs = 8}, false), Error);
  EXPECT_THROW(check_sampling({.top_k = 5, .top_logprobs = 8}, false), Error);
}

TEST(Softmax, EveryInstructionSetGivesTheSameBits) {
  ASSERT_STREQ(all_softmax_ops()[0].name, "portable");
  for (const std::size_t count : {1u, 7u, 16u, 17u, 100u, 128u}) {
    std::vector<float> logits = random_logits(count, count, 60.0f);
    logits[count / 2] = -1e30f;
    const float most = all_softmax_ops()[0].max(logits.data(), static_cast<std::int64_t>(count));
    for (const float temperature : {1.0f, 0.6f, 1.7f}) {
      std::array<float, kSoftmaxBlock> expected, out;
      const float max = most / temperature;
      const double sum = all_softmax_ops()[0].exp(logits.data(), static_cast<std::int64_t>(count),
                                                  temperature, max, expected.data());
      for (const SoftmaxOps& ops : all_softmax_ops()) {
        SCOPED_TRACE(ops.name);
        EXPECT_EQ(ops.max(logits.data(), static_cast<std::int64_t>(count)), most);
        EXPECT_EQ(
            ops.exp(logits.data(), static_cast<std::int64_t>(count), temperature, max, out.data()),
            sum);
        EXPECT_EQ(std::memcmp(out.data(), expected.data(), sizeof out), 0);
      }
    }
  }
}

TEST(Softmax, ExpIsTwoUnitsInTheLastPlaceFromTheTruth) {
  std::array<float, kSoftmaxBlock> x, out;
  for (int piece = 0; piece < 800; ++piece) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = -87.0f * static_cast<float>(piece * kSoftmaxBlock + static_cast<int>(i)) /
             (800.0f * kSoftmaxBlock);
    }
    softmax_ops().exp(x.data(), kSoftmaxBlock, 1.0f, 0.0f, out.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double truth = std::exp(static_cast<double>(x[i]));
      ASSERT_NEAR(static_cast<double>(out[i]), truth, truth * 0x1p-22) << x[i];
    }
  }
}

// Log-probs are of softmax(logits / T): scaling the log-probs instead gives another number.
TEST(Sampler, R83_LogProbsAreTakenAfterTemperature) {
  const std::vector<float> logits = {2.0f, 1.0f, 0.0f};
  const Distribution half(logits, 0.5f);
  for (Token token = 0; token < 3; ++token) {
    EXPECT_NEAR(half.logp(token), log_softmax(logits, 0.5, static_cast<std::size_t>(token)), 1e-6);
  }
  EXPECT_NEAR(half.logp(0), -0.1429317, 1e-6);
  EXPECT_GT(std::abs(half.logp(0) - Distribution(logits, 1.0f).logp(0) / 0.5f), 0.1);
}

TEST(Sampler, LogProbsOfAWholeVocabularyAreExactTo1e6) {
  for (const std::size_t size : {512u, 151936u}) {
    const std::vector<float> logits = random_logits(size, 3, 30.0f);
    const Distribution distribution(logits, 0.8f);
    for (const std::size_t token : {std::size_t{0}, size / 3, size - 1}) {
      EXPECT_NEAR(distribution.logp(static_cast<Token>(token)), log_softmax(logits, 0.8, token),
                  2e-6);
    }
  }
}

TEST(Sampler, DrawsFollowTheProbabilities) {
  const std::vector<float> logits = random_logits(300, 5, 8.0f);
  const Distribution distribution(logits, 1.0f);
  std::vector<double> seen(logits.size());
  constexpr int kDraws = 60000;
  for (int i = 0; i < kDraws; ++i) {
    const Choice choice = distribution.sample({}, {9, PromptId{i % 7}, i / 7, 3});
    seen[static_cast<std::size_t>(choice.token)] += 1.0;
  }
  double chi_square = 0.0;
  int bins = 0;
  for (std::size_t t = 0; t < logits.size(); ++t) {
    const double expected = kDraws * std::exp(log_softmax(logits, 1.0, t));
    if (expected < 5.0) continue;
    chi_square += (seen[t] - expected) * (seen[t] - expected) / expected;
    ++bins;
  }
  EXPECT_LT(chi_square, bins + 5.0 * std::sqrt(2.0 * bins));
}

TEST(Sampler, DrawsFollowFromTheirNamesAlone) {
  const std::vector<float> logits = random_logits(5000, 6, 4.0f);
  const Distribution distribution(logits, 1.0f);
  const Draw draw = {1, PromptId{2}, 3, 4};
  const Token token = distribution.sample({}, draw).token;
  EXPECT_EQ(Distribution(logits, 1.0f).sample({}, draw).token, token);
  std::map<Token, int> others;
  for (const Draw& other : {Draw{2, PromptId{2}, 3, 4}, Draw{1, PromptId{3}, 3, 4},
                            Draw{1, PromptId{2}, 4, 4}, Draw{1, PromptId{2}, 3, 5}}) {
    ++others[distribution.sample({}, other).token];
  }
  EXPECT_EQ(others.size(), 4u);  // 5000 tokens: all equal would be no accident
}

TEST(Sampler, NearCertainTokensHaveFiniteLogProbs) {
  const std::vector<float> logits = {0.0f, 300.0f, -300.0f};
  const Distribution distribution(logits, 1.0f);
  const Choice choice = distribution.sample({}, {1, PromptId{0}, 0, 1});
  EXPECT_EQ(choice.token, 1);
  EXPECT_EQ(choice.logp, 0.0f);
  EXPECT_FLOAT_EQ(distribution.logp(2), -600.0f);
}

TEST(Sampler, TopKOneIsGreedyAndTiesGoToTheLowerToken) {
  std::vector<float> logits = random_logits(1000, 8, 4.0f);
  logits[700] = logits[300] = 9.0f;
  const Distribution distribution(logits, 1.0f);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(distribution.sample({.top_k = 1}, {4, PromptId{0}, i, 0}).token, 300);
  }
}

// The log-prob is that of the whole distribution, so a trainer that knows nothing of the cut reads
// a finite number.
TEST(Sampler, R84_TopKAndTopPKeepToTheLikeliest) {
  const std::vector<float> logits = {1.0f, 4.0f, 2.0f, 3.9f, -5.0f, 0.0f};
  const Distribution distribution(logits, 1.0f);
  std::map<Token, int> top_k, top_p;
  for (int i = 0; i < 400; ++i) {
    const Choice choice = distribution.sample({.top_k = 2}, {4, PromptId{0}, i, 0});
    ++top_k[choice.token];
    EXPECT_EQ(choice.logp, distribution.logp(choice.token));
    ++top_p[distribution.sample({.top_p = 0.95f}, {4, PromptId{0}, i, 0}).token];
  }
  EXPECT_EQ(top_k.size(), 2u);
  EXPECT_GT(top_k[1], 150);
  EXPECT_GT(top_k[3], 130);
  // .474 + .429 < .95: the third is in, the others are not.
  EXPECT_EQ(top_p.size(), 3u);
  EXPECT_GT(top_p[2], 0);
}

TEST(Sampler, R95_RefusesWhatIsOutOfRange) {
  EXPECT_NO_THROW(check_sampling({.top_p = 0.5f, .top_k = 3}, false));
  for (const Sampling& bad :
       {Sampling{.temperature = 0.0f}, Sampling{.temperature = -1.0f},
        Sampling{.temperature = std::nanf("")}, Sampling{.top_p = 0.0f}, Sampling{.top_p = 1.1f},
        Sampling{.top_k = -1}, Sampling{.max_new_tokens = 0}}) {
    EXPECT_THROW(check_sampling(bad, false), Error);
  }
  try {
    check_sampling({.temperature = 0.0f}, false);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("temperature is 0"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("top_k = 1"), std::string::npos);
  }
}

TEST(Sampler, R84_RefusesTopPAndTopKWhereRecordsAreKept) {
  EXPECT_THROW(check_sampling({.top_p = 0.9f}, true), Error);
  EXPECT_THROW(check_sampling({.top_k = 1}, true), Error);
  EXPECT_NO_THROW(check_sampling({.temperature = 0.7f}, true));
}

}  // namespace
}  // namespace lockstep::rollout
