/// How far the trainer's log-probs are from the rollout's, arm by arm, at natural drift and before
/// any update: the same weights and tokens, two engines.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <string>

#include "data/arith.h"
#include "model/checkpoint.h"
#include "recipe/arm.h"
#include "rollout/engine.h"
#include "store/store.h"
#include "sync/refit.h"
#include "train/trainer.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kSeed = 3;

struct Gap {
  double mean = 0.0;
  double worst = 0.0;
  Metrics metrics;
};

class GapTest : public ::testing::Test {
 protected:
  GapTest()
      : checkpoint_("models/tiny-moe"),
        task_({}, value_or_throw(data::Tokenizer::load("models/tiny-moe"))),
        comm_(Comm::single()) {
    std::vector<std::vector<Token>> calibration;
    for (const data::Prompt& prompt : task_.evaluation(16)) calibration.push_back(prompt.tokens);
    for (const char* preset : {"lockstep", "fp8"}) {
      exponents_[preset] =
          rollout::calibrate_kv(checkpoint_.config(), checkpoint_, calibration,
                                contracts::preset(preset, checkpoint_.config().num_layers));
    }
  }

  Gap measure(ArmSpec spec) const {
    spec.kv_exponents = exponents_.at(spec.contract_kv == "fp8" ? "fp8" : "lockstep");
    spec.audit_every = 16;
    const Arm arm = bind(spec, checkpoint_.config());
    const Agreement agreement = {checkpoint_.config(), arm.contract, arm.guide, kSeed};
    store::Store store({.run = kSeed, .contract = arm.contract.id()});
    rollout::Engine engine(agreement, arm.rollout, Device{}, &store, *comm_);
    train::Trainer trainer(agreement, arm.qat, {}, Device{}, *comm_);
    WeightSink& masters = trainer.initial_weights();
    masters.begin(WeightVersion{0}, arm.contract.id());
    checkpoint_.each([&](const Weight& weight) { masters.put(weight); });
    masters.commit();
    sync::refit(trainer.weights(), engine.weights(), arm.contract, WeightVersion{0});

    std::vector<rollout::Request> requests;
    for (const data::Prompt& prompt : task_.evaluation(24)) {
      requests.push_back({.prefix = {.prompt = prompt.id,
                                     .tokens = prompt.tokens,
                                     .sampling = {.max_new_tokens = 64}},
                          .num_samples = 4,
                          .seed = kSeed});
    }
    const std::vector<Trajectory> batch = rollout::generate(engine, std::move(requests));
    Gap gap = compare(batch, trainer.logprobs(batch, &store));
    trainer.accumulate(batch, &store, [](std::size_t, auto, auto) { return 0.0; });
    trainer.update();
    gap.metrics = trainer.metrics();
    return gap;
  }

 private:
  static Gap compare(const std::vector<Trajectory>& batch, const PerToken& logp) {
    Gap gap;
    double tokens = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      for (std::size_t t = 0; t < batch[i].tokens.size(); ++t) {
        if (batch[i].response_mask[t] == 0) continue;
        const double d = std::abs(static_cast<double>(logp[i][t] - batch[i].rollout_logp[t]));
        gap.mean += d;
        gap.worst = std::max(gap.worst, d);
        tokens += 1;
      }
    }
    gap.mean /= tokens;
    return gap;
  }

  CheckpointSource checkpoint_;
  data::Arith task_;
  std::unique_ptr<Comm> comm_;
  std::map<std::string, std::vector<std::int8_t>> exponents_;
};

double metric(const Metrics& metrics, const std::string& name) {
  const auto found = metrics.find(name);
  return found == metrics.end() ? NAN : found->second;
}

TEST_F(GapTest, ArmsKeepTheirOrderAtNaturalDrift) {
  std::map<std::string, ArmSpec> arms;
  for (const std::string& name : arm_names()) arms[name] = arm_spec(name);
  arms["trace, all layers"] = arm_spec("trace");
  arms["trace, all layers"].layers = "all";
  arms["forced"] = arm_spec("trace_full");
  arms["forced"].mode = Guidance::kFullForced;
  arms["forced + w2_in"] = arms["forced"];
  arms["forced + w2_in"].sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV};

  std::map<std::string, double> gap;
  std::printf("%-18s %10s %10s %10s %10s %10s %10s\n", "arm", "mean", "worst", "act flips",
              "act left", "kv flips", "kv left");
  for (const auto& [name, spec] : arms) {
    const Gap found = measure(spec);
    gap[name] = found.mean;
    std::printf(
        "%-18s %10.6f %10.4f %10.5f %10.5f %10.5f %10.5f\n", name.c_str(), found.mean, found.worst,
        metric(found.metrics, "fp4/act/flip_frac"), metric(found.metrics, "fp4/act/residual_frac"),
        metric(found.metrics, "fp4/kv/flip_frac"), metric(found.metrics, "fp4/kv/residual_frac"));
  }
  EXPECT_LT(gap["bf16"], 1e-3);
  EXPECT_GT(gap["naive"], 10 * gap["bf16"]);
  for (const char* arm : {"trace", "trace_mod4", "trace_full", "forced", "forced + w2_in"}) {
    EXPECT_LT(gap[arm], gap["naive"] / 3) << arm;
    EXPECT_LT(gap[arm], gap["w4a4"]) << arm;
  }
  EXPECT_LE(gap["forced + w2_in"], 1.5 * gap["bf16"]);
  // What the trainer does not imitate of the cache's K, no treatment of the experts takes away.
  for (const char* arm : {"w4a16", "quads"}) {
    EXPECT_LT(gap[arm], 1.1 * gap["naive"]) << arm;
    EXPECT_GT(gap[arm], 10 * gap["w4a4"]) << arm;
  }
  EXPECT_LT(gap["quads"], gap["w4a16"]);
  for (const char* form : {"resq_2_4", "resq_blocks", "resq_channels", "resq_dense"}) {
    EXPECT_LT(gap[form], gap["quads"]) << form;  // w2_in compensated too
  }
  EXPECT_LT(gap["trace_mod4"], 2 * gap["trace"]);
  EXPECT_LT(gap["trace_46"], gap["four_over_six"] / 3);
  for (const std::string family : {"mxfp4", "mxfp4_w4a8"}) {
    EXPECT_LT(gap[family + "_qat"], gap[family + "_naive"] / 3) << family;
    EXPECT_LT(gap[family + "_trace"], gap[family + "_qat"]) << family;
  }
  // Products imitated and the cache not: FP8's gap is the cache's.
  EXPECT_LT(gap["jet_rl"], gap["fp8"] / 10);
  EXPECT_LT(gap["fp8_trace"], gap["jet_rl"]);
}

}  // namespace
}  // namespace lockstep
