#include "record/coverage.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "base/error.h"

namespace lockstep {
namespace {

/// Everything is there but what is lost.
class Lossy final : public TraceSource {
 public:
  std::size_t read(std::span<const TokenKey> tokens, ContractId, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override {
    std::size_t found = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      present[i] = !lost.contains({tokens[i], rows.place});
      found += present[i];
    }
    return found;
  }
  void prefetch(std::span<const TokenKey>) const override {}

  std::set<std::pair<TokenKey, Place>> lost;
};

constexpr SpanId kPrompt = span_id(0, PromptId{1}, -1, 0);

SpanId answer(int sample) { return span_id(0, PromptId{1}, sample, 0); }

/// Four samples of a prompt of five tokens; 4 + sample more tokens have records.
class CoverageTest : public ::testing::Test {
 protected:
  CoverageTest() {
    agreement_.model = {.num_layers = 4,
                        .hidden = 64,
                        .expert_width = 32,
                        .num_experts = 8,
                        .experts_per_token = 2,
                        .num_heads = 2,
                        .num_kv_heads = 1,
                        .head_dim = 32};
    agreement_.contract = contracts::lockstep(4);
    agreement_.guide = {.mode = Guidance::kLsb,
                        .sites = {Site::kW13In, Site::kK, Site::kV},
                        .layers = LayerSet::range(2, 4),
                        .replay_experts = true};
    for (int sample = 0; sample < 4; ++sample) {
      batch_.push_back(
          {.prompt = {1},
           .sample = sample,
           .tokens = std::vector<Token>(static_cast<std::size_t>(10 + sample)),
           .path = {{.id = kPrompt, .first = 0, .count = 5, .version = {1}},
                    {.id = answer(sample), .first = 5, .count = 4 + sample, .version = {1}}}});
    }
  }
  Coverage cover(std::int64_t newest = 1) const {
    return lockstep::cover(batch_, agreement_, trace_, WeightVersion{newest});
  }
  std::string refused(double least) const {
    try {
      require_coverage(cover(), least);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  Agreement agreement_;
  std::vector<Trajectory> batch_;
  Lossy trace_;
};

TEST_F(CoverageTest, WholeTracesAreCovered) {
  const Coverage coverage = cover();
  constexpr int kTokens = 4 * 5 + 4 + 5 + 6 + 7;
  EXPECT_EQ(coverage.tokens, kTokens);
  EXPECT_EQ(coverage.sites[0].present, 2 * kTokens);  // w13_in in two layers
  EXPECT_EQ(coverage.sites[1].present, 0);            // w2_in is not recorded
  EXPECT_EQ(coverage.sites[4].present, 4 * kTokens);  // routes in all
  EXPECT_EQ(coverage.fraction(), 1.0);
  EXPECT_EQ(coverage.tainted_samples(), 0);
  EXPECT_EQ(coverage.fraction(Site::kK), 1.0);
  EXPECT_EQ(metrics(coverage).at("fp4/guide/unguided_tokens"), 0.0);
  EXPECT_EQ(refused(1.0), "");
}

TEST_F(CoverageTest, ALostActivationRecordLeavesOneTokenUnguided) {
  trace_.lost = {{{answer(2), 7}, {Layer{2}, Site::kW13In}},
                 {{answer(2), 7}, {Layer{3}, Site::kW13In}}};
  const Coverage coverage = cover();
  EXPECT_EQ(coverage.unguided_tokens, 1);
  EXPECT_EQ(coverage.sites[0].absent, 2);
  EXPECT_EQ(coverage.tainted_samples(), 0);
}

TEST_F(CoverageTest, ALostCacheRecordTaintsItsSample) {
  trace_.lost = {{{answer(1), 6}, {Layer{3}, Site::kV}}};
  EXPECT_EQ(cover().tainted, (std::vector<std::uint8_t>{0, 1, 0, 0}));
  EXPECT_EQ(cover().unguided_tokens, 0);
}

TEST_F(CoverageTest, ALostCacheRecordOfTheSharedPromptTaintsAll) {
  trace_.lost = {{{kPrompt, 3}, {Layer{2}, Site::kK}}};
  EXPECT_EQ(cover().tainted_samples(), 4);
}

TEST_F(CoverageTest, RecordsWhereNothingIsFollowedAreNotMissed) {
  trace_.lost = {{{kPrompt, 3}, {Layer{1}, Site::kK}}, {{kPrompt, 3}, {Layer{2}, Site::kW2In}}};
  EXPECT_EQ(cover().fraction(), 1.0);
}

TEST_F(CoverageTest, OlderWeightsThanAllowedAreUnguidedAndCounted) {
  for (Trajectory& trajectory : batch_) trajectory.path[1].version = {3};
  EXPECT_EQ(cover(3).stale_tokens, 20);  // the prompt's, under version 1
  EXPECT_EQ(cover(3).unguided_tokens, 20);
  EXPECT_EQ(cover(3).tainted_samples(), 0);
  EXPECT_EQ(cover(3).sites[0].absent, 40);
  agreement_.guide.max_version_diff = 2;
  EXPECT_EQ(cover(3).stale_tokens, 0);
}

TEST_F(CoverageTest, TooLittleIsOneLine) {
  for (int p = 0; p < 5; ++p) trace_.lost.insert({{kPrompt, p}, {Layer{2}, Site::kK}});
  EXPECT_EQ(refused(0.7), "");
  const std::string line = refused(0.8);
  EXPECT_NE(line.find("records of k cover 0.76"), std::string::npos) << line;
  EXPECT_NE(line.find("(20 of 84 are absent), guide.min_coverage is 0.8"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
