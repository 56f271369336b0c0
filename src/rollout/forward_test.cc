#include "rollout/forward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <tuple>

#include "base/error.h"
#include "base/parallel.h"
#include "rollout/door.h"
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
  if (arm == "mxfp4" || arm == "w4a8" || arm == "fp8") {
    contract = contracts::preset(arm == "fp8" ? "fp8" : "mx-rceil", 3);
    if (arm == "w4a8") {
      contract.activation = contracts::format("mxfp8", contracts::Tensor::kActivation);
    }
    contract.kv_exponents.assign(6, -5);
  }
  if (arm == "upper_layers") contract.layers = LayerSet::range(1, 3);
  return contract;
}

using ArmOn = std::tuple<Device, const char*>;

class ForwardArms : public testing::TestWithParam<ArmOn> {
 protected:
  void SetUp() override {
    fixture::device_under_test() = std::get<0>(GetParam());
    const Agreement agreement{.model = small_model(), .contract = contract, .guide = {}, .seed = 0};
    try {
      require_runs(agreement, {}, fixture::device_under_test());
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  void TearDown() override { fixture::device_under_test() = {}; }

  Contract contract = arm_contract(std::get<1>(GetParam()));
};

std::string name_of_arm(const testing::TestParamInfo<ArmOn>& info) {
  const bool cuda = std::get<0>(info.param).kind == Device::Kind::kCuda;
  return std::string(std::get<1>(info.param)) + (cuda ? "_cuda" : "_cpu");
}

INSTANTIATE_TEST_SUITE_P(Forward, ForwardArms,
                         testing::Combine(testing::ValuesIn(devices()),
                                          testing::Values("bf16", "w4a16", "w4a4", "upper_layers",
                                                          "mxfp4", "w4a8", "fp8")),
                         name_of_arm);

using ForwardOn = fixture::OnDevice;

INSTANTIATE_TEST_SUITE_P(Devices, ForwardOn, testing::ValuesIn(devices()), name_of_device);

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

TEST_P(ForwardOn, QuadsRowsDoNotDependOnTheBatch) {
  Options options;
  options.residual = Residual::kChannels;
  options.drift.split_k = !on_cuda();
  Runner runner(arm_contract("w4a4"), options);
  const auto tokens = random_tokens(50, runner.agreement.model, 4);
  const auto whole = runner.prefill(tokens, 50, 16);
  EXPECT_EQ(whole, runner.prefill(tokens, 3, 16));
  if (on_cuda()) return;
  options.drift.split_k = false;
  Runner exact(arm_contract("w4a4"), options);
  EXPECT_NE(whole, exact.prefill(tokens, 50, 16)) << "split sums are another rounding";
}

TEST_P(ForwardOn, NoiseFollowsTheSeedOfTheRun) {
  Options options;
  options.drift.noise = 0.01f;
  Runner noisy(contracts::bf16(), options), quiet(contracts::bf16());
  const auto tokens = random_tokens(20, noisy.agreement.model, 5);
  const auto a = noisy.prefill(tokens, 20, 16);
  EXPECT_EQ(a, noisy.prefill(tokens, 4, 16));
  const auto b = quiet.prefill(tokens, 20, 16);
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  const double relative = std::sqrt(difference / size);
  EXPECT_GT(relative, 0.001);
  EXPECT_LT(relative, 0.1) << "of the order of sigma";
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_P(ForwardOn, StopsWithLayerAndTokenWhereANumberIsNotFinite) {
  Runner runner(arm_contract("w4a4"));
  for (auto& w : runner.weights) {
    // Finite weights whose product is not: up to 3e38 * 3e38 in the second layer.
    if (w.id == WeightId{WeightId::Role::kO, {1}, {}}) {
      std::fill(w.plain.begin(), w.plain.end(), to_bf16(3e38f));
    }
    if (w.id == WeightId{WeightId::Role::kV, {1}, {}}) {
      for (Bf16& x : w.plain) x = to_bf16(to_float(x) * 1e20f);
    }
  }
  fixture::load(runner.forward.weights(), runner.weights, runner.agreement.contract, 2);
  const auto tokens = random_tokens(5, runner.agreement.model, 6);
  const std::string message = message_of([&] { runner.prefill(tokens, 5, 16); });
  EXPECT_NE(message.find("layer 1"), std::string::npos) << message;
  EXPECT_NE(message.find("token " + std::to_string(tokens[0])), std::string::npos) << message;
  EXPECT_NE(message.find("position 0"), std::string::npos) << message;
}

TEST_P(ForwardOn, RefusesWhatItCannotRun) {
  Runner runner(contracts::bf16());
  Cache cache(runner.agreement, 16, 4);
  cache.hold(0, 16);
  Pass pass;
  add_rows(pass, 0, {1, 50}, 0, 2);
  EXPECT_NE(message_of([&] { runner.run(pass, cache); }).find("token 50"), std::string::npos);
  Pass beyond;
  add_rows(beyond, 0, std::vector<Token>(17, 1), 16, 17);
  EXPECT_NE(message_of([&] { runner.run(beyond, cache); }).find("position 16"), std::string::npos);
  Pass empty;
  EXPECT_TRUE(runner.run(empty, cache).empty());
  ModelConfig odd = small_model();
  odd.expert_width = 40;
  const Agreement agreement{.model = odd, .contract = w4a4_contract(odd), .guide = {}, .seed = 0};
  EXPECT_NE(message_of([&] { Forward(agreement, {}, {}); }).find("expert_width is 40"),
            std::string::npos);
  Options options;
  options.residual_permille = 1001;
  EXPECT_THROW(Runner(w4a4_contract(small_model()), options), Error);
}

TEST_P(ForwardOn, CountsWhatQuantizationMet) {
  Runner runner(arm_contract("w4a4"));
  const auto tokens = random_tokens(30, runner.agreement.model, 7);
  runner.prefill(tokens, 30, 16);
  const Metrics metrics = runner.forward.metrics();
  ASSERT_EQ(metrics.count("fp4/scale/sat_frac"), 1u);
  EXPECT_GE(metrics.at("fp4/scale/sat_frac"), 0.0);
  EXPECT_LT(metrics.at("fp4/scale/underflow_frac"), 0.01);
  EXPECT_TRUE(runner.forward.metrics().empty()) << "since the last call";
  Runner plain(contracts::bf16());
  plain.prefill(tokens, 30, 16);
  EXPECT_TRUE(plain.forward.metrics().empty());
}

}  // namespace
}  // namespace lockstep::rollout
