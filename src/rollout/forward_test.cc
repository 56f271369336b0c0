#include "rollout/forward.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "rollout/forward_fixture.h"

namespace lockstep::rollout {
namespace {

using fixture::add_rows;
using fixture::Cache;
using fixture::random_tokens;
using fixture::Runner;
using fixture::small_model;
using fixture::w4a4_contract;

Contract arm_contract(const std::string& arm) {
  Contract contract = w4a4_contract(small_model());
  if (arm == "bf16") return contracts::bf16();
  if (arm == "w4a16") contract.activation = {};
  if (arm == "upper_layers") contract.layers = LayerSet::range(1, 3);
  return contract;
}

class ForwardArms : public testing::TestWithParam<const char*> {
 protected:
  Contract contract = arm_contract(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Forward, ForwardArms,
                         testing::Values("bf16", "w4a16", "w4a4", "upper_layers"));

TEST_P(ForwardArms, RowsDoNotDependOnChunksOrPages) {
  Runner runner(contract);
  const auto tokens = random_tokens(140, runner.agreement.model, 1);
  const auto whole = runner.prefill(tokens, 140, 16);
  ASSERT_EQ(whole.size(), 140u * 50);
  EXPECT_EQ(whole, runner.prefill(tokens, 1, 16)) << "token by token";
  EXPECT_EQ(whole, runner.prefill(tokens, 7, 16)) << "chunks of 7";
  EXPECT_EQ(whole, runner.prefill(tokens, 64, 5)) << "pages of 5";
}

TEST_P(ForwardArms, RowsDoNotDependOnTheBatchOrThreads) {
  Options options;
  options.drift.noise = 0.05f;
  Runner runner(contract, options);
  constexpr std::int32_t kSequences = 21, kTokens = 30;
  std::vector<std::vector<Token>> tokens;
  for (std::uint32_t s = 0; s < kSequences; ++s) {
    tokens.push_back(random_tokens(kTokens, runner.agreement.model, s + 10));
  }
  Cache cache(runner.agreement, 16, kSequences * 2);
  for (std::size_t s = 0; s < kSequences; ++s) cache.hold(s, kTokens);
  std::vector<float> last;  // of the last token of each, all side by side
  for (std::int32_t t = 0; t < kTokens; ++t) {
    Pass pass;
    for (std::int32_t s = 0; s < kSequences; ++s) {
      add_rows(pass, s, tokens[static_cast<std::size_t>(s)], t, t + 1);
    }
    last = runner.run(pass, cache);
  }
  set_threads(1);
  for (std::int32_t s = 0; s < kSequences; ++s) {
    Cache alone(runner.agreement, 16, 2 * kSequences);
    for (std::int32_t i = 0; i <= s; ++i) alone.hold(static_cast<std::size_t>(i), kTokens);
    Pass pass;
    add_rows(pass, s, tokens[static_cast<std::size_t>(s)], 0, kTokens);
    const auto logits = runner.run(pass, alone);
    const std::vector<float> mine(logits.end() - 50, logits.end());
    const std::vector<float> theirs(last.begin() + s * 50, last.begin() + (s + 1) * 50);
    EXPECT_EQ(mine, theirs) << "sequence " << s;
  }
  set_threads(0);
}

}  // namespace
}  // namespace lockstep::rollout
