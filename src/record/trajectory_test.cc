#include "record/trajectory.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "base/philox.h"

namespace lockstep {
namespace {

constexpr SpanId kPrompt = span_id(0, PromptId{7}, -1, 0);
constexpr SpanId kAnswer = span_id(0, PromptId{7}, 3, 0);

TEST(Trajectory, KeysCoverAllButTheLastToken) {
  const Trajectory trajectory = {
      .prompt = {7},
      .sample = 3,
      .tokens = std::vector<Token>(10),
      .path = {{.id = kPrompt, .first = 0, .count = 6}, {.id = kAnswer, .first = 6, .count = 3}}};
  const std::vector<TokenKey> all = keys(trajectory);
  ASSERT_EQ(all.size(), trajectory.tokens.size() - 1);  // R74
  for (std::size_t t = 0; t < all.size(); ++t) {
    EXPECT_EQ(all[t].position, static_cast<std::int32_t>(t));
    EXPECT_EQ(all[t].span, t < 6 ? kPrompt : kAnswer);
  }
}

TEST(Trajectory, SpansOfRanksPromptsSamplesAndTurnsHaveDifferentNames) {
  std::set<std::uint64_t> ids;
  for (const int rank : {0, 1, 65535}) {
    for (const std::int64_t prompt : {0, 1, 1 << 27}) {
      for (const int sample : {-1, 0, 16000}) {
        for (const int turn : {0, 1, 63}) {
          ids.insert(span_id(rank, PromptId{prompt}, sample, turn).value);
        }
      }
    }
  }
  EXPECT_EQ(ids.size(), 81u);
}

TEST(Trajectory, OneTokenInSoManyIsAudited) {
  for (const std::int32_t every : {2, 64, 512}) {
    const int n = 2000 * every / 8;
    int count = 0;
    for (int i = 0; i < n; ++i) count += audited(1, {SpanId{std::uint64_t(i % 97)}, i}, every);
    const double expected = static_cast<double>(n) / every;
    EXPECT_NEAR(count, expected, 4 * std::sqrt(expected)) << every;
  }
  EXPECT_FALSE(audited(1, {kAnswer, 0}, 0));
  EXPECT_TRUE(audited(1, {kAnswer, 0}, 1));
}

TEST(Trajectory, AuditFollowsFromSeedSpanAndPositionByTheRule) {
  int differ = 0;
  for (std::int32_t position = 0; position < 1000; ++position) {
    const auto word = philox(5, {static_cast<std::uint32_t>(kAnswer.value),
                                 static_cast<std::uint32_t>(kAnswer.value >> 32),
                                 static_cast<std::uint32_t>(position), 0})[0];
    EXPECT_EQ(audited(5, {kAnswer, position}, 512), word % 512 == 0);
    differ += audited(5, {kAnswer, position}, 4) != audited(6, {kAnswer, position}, 4);
  }
  EXPECT_GT(differ, 200);
}

}  // namespace
}  // namespace lockstep
