// The loop over its real parts, at the smallest size: arms, records, resume.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>

#include "base/error.h"
#include "base/parallel.h"
#include "cli/random_weights.h"
#include "cli/session.h"
#include "record/fresh.h"
#include "step/parts.h"
#include "step/step.h"
#include "sync/refit.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr ModelConfig kModel = {.num_layers = 3,
                                .hidden = 32,
                                .expert_width = 32,
                                .num_experts = 4,
                                .experts_per_token = 2,
                                .num_heads = 2,
                                .num_kv_heads = 1,
                                .head_dim = 32,
                                .vocabulary = 16,
                                .max_positions = 64};

/// A third of the answer's tokens are below 8: enough for every group to differ within.
class CountSmall : public data::Task {
 public:
  explicit CountSmall(std::int64_t dies_at = -1) : dies_at_(dies_at) {}

  std::vector<data::Prompt> prompts(std::int64_t step, std::int32_t count) const override {
    if (step == dies_at_) throw std::runtime_error("killed");
    std::vector<data::Prompt> all;
    for (std::int64_t n = step * count; n < (step + 1) * count; ++n) {
      all.push_back({.id = PromptId{n}, .tokens = {1, 2, static_cast<Token>(n % 16)}});
    }
    return all;
  }
  std::vector<data::Prompt> evaluation(std::int32_t count) const override {
    return prompts(1000, count);
  }
  std::int64_t evaluation_size() const override { return 100; }
  float reward(const data::Prompt&, std::span<const Token> response) const override {
    float small = 0;
    for (const Token token : response) small += token < 8 ? 1.0f : 0.0f;
    return small / static_cast<float>(response.size());
  }

 private:
  std::int64_t dies_at_;
};

/// What a run is made of, over random weights.
struct Parts {
  Parts(Arm a, const Schedule& schedule, const fs::path& folder, const store::Options& options = {},
        const train::Options& training = {})
      : arm(std::move(a)),
        agreement{kModel, arm.contract, arm.guide, schedule.seed},
        run_dir(folder, *comm),
        store(options),
        engine(agreement, arm.rollout, Device{}, &store, *comm),
        trainer(agreement, arm.qat, training, Device{}, *comm) {
    cli::load(cli::RandomWeights(kModel, 0.3f, 7), trainer.initial_weights());
  }

  step::Loop loop(const Schedule& schedule, const data::Task& task) {
    return {.arm = arm,
            .schedule = schedule,
            .task = task,
            .engine = engine,
            .store = store,
            .trainer = trainer,
            .reference = nullptr,
            .run_dir = run_dir,
            .comm = *comm,
            .model = kModel};
  }

  const std::unique_ptr<Comm> comm = Comm::single();
  Arm arm;
  Agreement agreement;
  step::RunDir run_dir;
  store::Store store;
  rollout::Engine engine;
  train::Trainer trainer;
};

constexpr std::int32_t kPrompts = 4, kSamples = 3, kNew = 6;
const Schedule kSchedule = {.steps = 5,
                            .prompts_per_step = kPrompts,
                            .samples_per_prompt = kSamples,
                            .updates_per_step = 2,
                            .save_every = 2,
                            .rescore_every = 2,
                            .seed = 3,
                            .sampling = {.max_new_tokens = kNew}};

class Loop : public testing::Test {
 protected:
  void SetUp() override { fs::remove_all(root_); }
  void TearDown() override { fs::remove_all(root_); }

  /// The arm, with exponents that suit small random weights and no audit tokens.
  static Arm arm_of(const std::string& name) {
    ArmSpec spec = arm_spec(name);
    spec.audit_every = 0;
    if (spec.contract != "bf16") {
      const bool fp8 = spec.contract_kv == "fp8";
      spec.kv_exponents.assign(2 * static_cast<std::size_t>(kModel.num_layers), fp8 ? -5 : -8);
    }
    return bind(spec, kModel, {.cache_bytes = 1 << 20, .tokens_per_pass = 64});
  }

  /// Runs the arm, or goes on with a run of that name.
  void run(const Arm& arm, const std::string& name, const CountSmall& task = CountSmall()) {
    const fs::path folder = root_ / name;
    Parts parts(arm, schedule_, folder, {.folder = folder / "trace", .ram_bytes = store_ram_},
                trainer_);
    parts.run_dir.begin("# contract 1\n");
    step::Loop loop = parts.loop(schedule_, task);
    loop.evaluate = [&](std::int64_t) {
      if (probes_) scales_ = scales_of(parts.agreement, parts.engine, parts.store);
      return Metrics{};
    };
    step::run(loop);
  }

  /// The records of some answers under the present weights: of all that is quantized, with its
  /// scales. The step's own metrics do not tell of them.
  static std::vector<std::byte> scales_of(const Agreement& agreement, rollout::Engine& engine,
                                          store::Store& store) {
    const std::vector<Trajectory> answers =
        rollout::generate(engine, {{.prefix = {.prompt = PromptId{900},
                                               .tokens = {1, 2, 3},
                                               .sampling = {.max_new_tokens = kNew}},
                                    .num_samples = kSamples}});
    std::vector<std::byte> all;
    for (const Trajectory& t : answers) {
      const std::vector<TokenKey> rows = keys(t);
      for (const Site site : {Site::kW13In, Site::kK, Site::kV}) {
        const Place place = {Layer{2}, site};
        const RowLayout layout = agreement.layout(place, agreement.encoding(place));
        std::vector<std::byte> bytes(rows.size() * static_cast<std::size_t>(layout.bytes()));
        std::vector<std::uint8_t> present(rows.size());
        EXPECT_EQ(
            store.read(rows, agreement.contract.id(), {place, layout, std::span(bytes)}, present),
            rows.size());
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    }
    engine.metrics();
    store.metrics();
    return all;
  }

  std::string text(const fs::path& path) const {
    std::ifstream in(root_ / path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// metrics.jsonl without what the clock says.
  std::string metrics(const std::string& name) const {
    std::string kept;
    const std::string all = text(fs::path(name) / "metrics.jsonl");
    for (std::size_t at = 0; at < all.size();) {
      const std::size_t end = std::min(all.find_first_of(",\n", at), all.size() - 1) + 1;
      const std::string item = all.substr(at, end - at);
      const bool timed = item.find("\"timing_s/") != std::string::npos ||
                         item.find("\"perf/") != std::string::npos;
      if (!timed) kept += item;
      at = end;
    }
    return kept;
  }
  /// The first item in which two such texts differ; "" where they are the same.
  static std::string difference(const std::string& a, const std::string& b) {
    std::size_t at = 0;
    while (at < a.size() && at < b.size() && a[at] == b[at]) ++at;
    if (at == a.size() && at == b.size()) return "";
    const std::size_t from = std::min(a.rfind('"', at) - 40, a.size());
    return a.substr(from, 120) + "\n" + b.substr(std::min(from, b.size()), 120);
  }
  static double last(const std::string& metrics, const std::string& name) {
    const std::string key = "\"" + name + "\": ";
    const std::size_t at = metrics.rfind(key);
    if (at == std::string::npos) throw std::runtime_error("no metric " + name);
    return std::stod(metrics.substr(at + key.size()));
  }

  Schedule schedule_ = kSchedule;
  train::Options trainer_{.lr = 2e-3};
  std::int64_t store_ram_ = 1ll << 30;
  bool probes_ = false;
  std::vector<std::byte> scales_;  // at the end of the run, where probes_ says so
  const fs::path root_ =           // Its own: tests of one fixture run side by side.
      fs::temp_directory_path() / ("lockstep_loop_test_" + std::to_string(getpid()));
};

constexpr const char* kGap = "train/train_rollout_logprob_abs_diff";

TEST_F(Loop, ArmsAreValues) {
  std::map<std::string, double> gap;
  for (const std::string& name : arm_names()) {
    run(arm_of(name), name);
    const std::string all = metrics(name);
    gap[name] = last(all.substr(0, all.find('\n')), kGap);
    EXPECT_EQ(std::count(all.begin(), all.end(), '\n'), schedule_.steps) << name;
  }
  // What the trainer does not imitate shows as a gap; what it imitates, guided or not, does not
  // where nothing has drifted.
  for (const char* apart : {"naive", "w4a16", "quads", "qurl"})
    EXPECT_GT(gap[apart], 1e-3) << apart;
  for (const char* apart : {"mxfp4_naive", "mxfp4_w4a8_naive"})
    EXPECT_GT(gap[apart], 1e-3) << apart;
  for (const char* apart : {"fp8_naive", "fp8"}) EXPECT_GT(gap[apart], 3e-4) << apart;
  for (const char* close :
       {"bf16", "w4a4", "qerl", "trace", "trace_mod4", "trace_full", "mxfp4_qat", "mxfp4_trace",
        "mxfp4_w4a8_qat", "mxfp4_w4a8_trace", "jet_rl", "fp8_trace"}) {
    EXPECT_LT(gap[close], 1e-4) << close;
  }
}

TEST_F(Loop, R55_FlipsOfTheCacheAreCountedApartFromThoseOfInputs) {
  Arm arm = arm_of("fp8_naive");
  arm.guide.audit_every = 1;
  run(arm, "both");
  const std::string both = metrics("both");
  EXPECT_GT(last(both, "fp4/kv/flip_frac"), 0);
  EXPECT_GT(last(both, "fp4/act/flip_frac"), 0);
  arm.contract.k = arm.contract.v = Quantizer{};
  arm.contract.kv_exponents.clear();
  run(arm, "inputs");
  EXPECT_EQ(metrics("inputs").find("fp4/kv/flip_frac"), std::string::npos);
  EXPECT_GT(last(metrics("inputs"), "fp4/act/flip_frac"), 0);
  // The cache adds to the gap that the products leave.
  EXPECT_GT(last(both.substr(0, both.find('\n')), kGap),
            last(metrics("inputs").substr(0, metrics("inputs").find('\n')), kGap));
}

TEST_F(Loop, SamplesShareTheirPromptsRecords) {
  run(arm_of("trace"), "trace");
  // A prompt has 3 tokens; each of its samples feeds all but the last that it was given. Routes are
  // recorded in all three layers, w13_in, K and V in the two of the latter half.
  const int tokens = kPrompts * (3 + kSamples * (kNew - 1));
  const int rows = 3 + 3 * 2;
  const std::string all = metrics("trace");
  EXPECT_EQ(last(all.substr(0, all.find('\n')), "fp4/trace/rows_written"), tokens * rows);
}

TEST_F(Loop, EveryPassFindsEveryRecord) {
  run(arm_of("trace"), "trace");
  const std::string all = metrics("trace");
  EXPECT_EQ(last(all, "fp4/trace/rows_absent"), 0);
  EXPECT_EQ(last(all, "fp4/guide/covered_frac"), 1);
  EXPECT_EQ(last(all, "fp4/guide/tainted_samples"), 0);
  // pi_old and pi_theta read the same rows; prompts are read once a sample.
  const int read = kPrompts * kSamples * (3 + kNew - 1) * (3 + 3 * 2);
  EXPECT_GE(last(all.substr(0, all.find('\n')), "fp4/trace/rows_read"), 2 * read);
}

TEST_F(Loop, R65_ResumedRunEqualsTheUninterrupted) {
  for (const char* name : {"trace", "quads"}) {
    const std::string killed = std::string(name) + "_killed", whole = std::string(name) + "_whole";
    EXPECT_THROW(run(arm_of(name), killed, CountSmall(3)), std::runtime_error);
    run(arm_of(name), killed);
    run(arm_of(name), whole);
    EXPECT_EQ(difference(metrics(killed), metrics(whole)), "");
    const fs::path state = "checkpoints/step_5/training_state/trainer_state.bin";
    EXPECT_TRUE(text(killed / state) == text(whole / state));
    EXPECT_GT(text(whole / state).size(), 1000u);
  }
}

TEST_F(Loop, R26_AResumedRunQuantizesAtTheSameScales) {
  probes_ = true;
  const Arm arm = arm_of("trace");
  run(arm, "whole");
  const std::vector<std::byte> whole = scales_;
  ASSERT_GT(whole.size(), 400u);
  EXPECT_THROW(run(arm, "killed", CountSmall(3)), std::runtime_error);
  EXPECT_NE(scales_, whole);  // of other weights
  run(arm, "killed");
  EXPECT_EQ(scales_, whole);
}

TEST_F(Loop, NoMetricHangsOnHowFarTheStoresThreadIs) {
  const Arm arm = arm_of("trace");
  const fs::path state = "checkpoints/step_5/training_state/trainer_state.bin";
  run(arm, "roomy");
  store_ram_ = 3000;  // a part of a step's records: the rest goes to the disk
  run(arm, "short");
  EXPECT_GT(last(text("short/metrics.jsonl"), "perf/trace/spilled_bytes"), 0);
  EXPECT_GT(last(text("short/metrics.jsonl"), "perf/trace/disk_bytes_read"), 0);
  run(arm, "again");
  EXPECT_EQ(difference(metrics("again"), metrics("short")), "");
  EXPECT_THROW(run(arm, "killed", CountSmall(3)), std::runtime_error);
  run(arm, "killed");
  EXPECT_EQ(difference(metrics("killed"), metrics("short")), "");
  EXPECT_TRUE(text("short" / state) == text("roomy" / state));
}

TEST_F(Loop, MetricsDoNotDependOnTheNumberOfThreads) {
  trainer_.tokens_per_pass = 16;  // a trajectory a pass, so that threads race for each loss
  schedule_.prompts_per_step = 8;
  schedule_.steps = 3;
  const Arm arm = arm_of("trace");
  set_threads(1);
  run(arm, "one");
  set_threads(4);
  for (const char* again : {"four", "four again"}) {
    run(arm, again);
    EXPECT_EQ(difference(metrics("one"), metrics(again)), "");
  }
  set_threads(0);
}

TEST_F(Loop, AStepsMetricsAreOfAllItsUpdates) {
  trainer_.lr = 0;  // so that each update sees the policy that a single one does
  schedule_.steps = 1;
  for (const std::int32_t updates : {1, 2}) {
    schedule_.updates_per_step = updates;
    run(arm_of("naive"), "updates_" + std::to_string(updates));
  }
  const std::string one = metrics("updates_1"), two = metrics("updates_2");
  for (const char* name : {"actor/entropy", "actor/ppo_kl", "fp4/routes/mismatch_frac",
                           "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_max"}) {
    EXPECT_NEAR(last(one, name), last(two, name), 1e-9) << name;
  }
  EXPECT_EQ(last(one, "actor/grad_norm"), last(one, "actor/grad_norm/max"));
  EXPECT_LT(last(two, "actor/grad_norm"), last(two, "actor/grad_norm/max"));
}

TEST_F(Loop, R2_TakesTheOldPolicysExpertsAndRecordsNone) {
  Arm arm = arm_of("w4a4");
  arm.guide.replay_experts = false;
  arm.own_routes = true;
  run(arm, "r2");
  const std::string all = metrics("r2");
  EXPECT_EQ(last(all, "fp4/routes/absent_frac"), 0);
  EXPECT_EQ(last(all, "fp4/trace/rows_written"), 0);
  arm.own_routes = false;
  run(arm, "none");
  EXPECT_EQ(metrics("none").find("fp4/routes/absent_frac"), std::string::npos);
}

TEST_F(Loop, QerlsNoiseFollowsItsScheduleAndStaysOffTheTrainer) {
  Arm arm = arm_of("qerl");
  arm.sync.noise = {.start = 0.2, .end = 0.05, .stages = 5};
  run(arm, "qerl");
  const std::string all = metrics("qerl");
  const std::vector<double> sigma = {0, 0.2, 0.2 * std::pow(0.25, 1.0 / 3),
                                     0.2 * std::pow(0.25, 2.0 / 3), 0.05};
  std::vector<double> gap;
  std::size_t from = 0;
  for (const double expected : sigma) {
    const std::size_t end = all.find('\n', from) + 1;
    const std::string line = all.substr(from, end - from);
    EXPECT_NEAR(last(line, "rollout/noise_sigma"), expected, 1e-9);
    gap.push_back(last(line, kGap));
    from = end;
  }
  EXPECT_LT(gap[0], 1e-4);  // weights alone are quantized, alike on both sides
  EXPECT_GT(gap[1], 1e-2);
  EXPECT_LT(gap[4], gap[1]);
}

TEST_F(Loop, DynamicSamplingFillsTheStepOrSaysWhy) {
  // Of every third prompt no answer earns anything: such a group has no advantage.
  class Often0 final : public CountSmall {
   public:
    float reward(const data::Prompt& prompt, std::span<const Token> response) const override {
      return prompt.id.value % 3 == 0 ? 0.0f : CountSmall::reward(prompt, response);
    }
  };
  schedule_.steps = 1;
  run(arm_of("trace"), "as_they_come", Often0());
  EXPECT_GT(last(metrics("as_they_come"), "rollout/zero_std/fraction"), 0);
  EXPECT_LT(last(metrics("as_they_come"), kGap), 1e-4);  // with a flat group before two updates
  schedule_.max_gen_batches = 6;
  run(arm_of("trace"), "selected", Often0());
  const std::string all = metrics("selected");
  EXPECT_EQ(last(all, "rollout/zero_std/fraction"), 0);
  EXPECT_GT(last(all, "train/num_gen_batches"), 1);
  EXPECT_EQ(last(all, "fp4/trace/rows_absent"), 0);
  EXPECT_LT(last(all, "rollout/raw_reward"), last(all, "critic/score/mean"));

  class Never final : public CountSmall {
   public:
    float reward(const data::Prompt&, std::span<const Token>) const override { return 0; }
  };
  try {
    run(arm_of("trace"), "hopeless", Never());
    FAIL() << "filled a step with nothing";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("raise schedule.max_gen_batches"), std::string::npos);
  }
}

TEST_F(Loop, RescoredSamplesAreNearestToTheGuidedTrainerWhenNothingMoved) {
  Arm arm = arm_of("trace_full");
  arm.rollout.drift.split_k = true;  // so that codes flip, alike in both of the engine's passes
  schedule_.rescore_groups = kPrompts;
  trainer_.lr = 0;
  run(arm, "still");
  const std::string still = metrics("still");
  EXPECT_EQ(last(still, "fp4/rescore/moved_abs_diff"), 0);
  EXPECT_GT(last(still, "fp4/rescore/guided_abs_diff"), 0);
  EXPECT_LT(last(still, "fp4/rescore/guided_abs_diff"),
            0.7 * last(still, "fp4/rescore/unguided_abs_diff"));
  trainer_.lr = 2e-3;
  run(arm, "moved");
  EXPECT_GT(last(metrics("moved"), "fp4/rescore/moved_abs_diff"),
            last(metrics("moved"), "fp4/rescore/guided_abs_diff"));
}

TEST_F(Loop, WhereNothingIsToBeRescoredNothingIsTold) {
  class Never final : public CountSmall {
   public:
    float reward(const data::Prompt&, std::span<const Token>) const override { return 0; }
  };
  schedule_.steps = 2;  // the second rescores, and no group has an advantage
  run(arm_of("trace"), "flat", Never());
  EXPECT_EQ(metrics("flat").find("fp4/rescore/"), std::string::npos);
}

TEST_F(Loop, OnlyWholeSamplesAreRescored) {
  const CountSmall task;
  schedule_.rescore_groups = 2;
  Parts parts(arm_of("trace"), schedule_, root_ / "whole", {.folder = {}});
  const step::Loop loop = parts.loop(schedule_, task);
  std::vector<Trajectory> all(9);
  for (std::int32_t i = 0; i < 9; ++i) all[static_cast<std::size_t>(i)].sample = i;
  const std::vector<std::uint8_t> moves = {0, 0, 0, 1, 1, 1, 1, 1, 1};
  const std::vector<std::uint8_t> tainted = {0, 0, 0, 0, 1, 0, 0, 0, 1};
  std::vector<std::int32_t> found;
  for (const Trajectory& t : step::audited_groups(loop, all, moves, tainted)) {
    found.push_back(t.sample);
  }
  EXPECT_EQ(found, (std::vector<std::int32_t>{3, 5, 6, 7}));
}

TEST_F(Loop, RecordsOfOlderWeightsFallBackByName) {
  const CountSmall task;
  Arm drifting = arm_of("trace_full");
  drifting.rollout.drift.noise = 0.05f;  // so that following records makes a difference
  Parts parts(drifting, schedule_, root_ / "stale", {.folder = {}});
  auto& [comm, arm, agreement, run_dir, store, engine, trainer] = parts;
  const step::Loop loop = parts.loop(schedule_, task);
  const auto sync = [&](std::int64_t version) {
    sync::refit(trainer.weights(), engine.weights(), arm.contract, WeightVersion{version});
  };
  sync(0);
  std::vector<Trajectory> batch =
      rollout::generate(engine, {{.prefix = {.prompt = PromptId{0},
                                             .tokens = {1, 2, 3},
                                             .sampling = {.max_new_tokens = kNew}},
                                  .num_samples = kSamples}});
  const std::vector<std::uint8_t> moves(batch.size(), 1);
  sync(2);  // two versions on; the same weights, so that what is read again is known

  const auto read = [&] {
    const FreshTrace records(store, batch, step::oldest_followed(loop, 2));
    return trainer.logprobs(batch, &records);
  };
  Metrics metrics;
  const auto stale = [&] {
    metrics.clear();
    const auto tainted = step::taints(loop, 2, batch, moves, metrics);
    EXPECT_EQ(std::count(tainted.begin(), tainted.end(), 1), 0);
    return metrics.at("fp4/guide/stale_tokens");
  };
  schedule_.min_coverage = 0;
  const PerToken guided = trainer.logprobs(batch, &store), alone = trainer.logprobs(batch, nullptr);
  ASSERT_NE(guided, alone);
  arm.guide.max_version_diff = 2;
  EXPECT_EQ(stale(), 0);
  EXPECT_EQ(read(), guided);
  arm.guide.max_version_diff = 1;
  EXPECT_GT(stale(), 0);
  EXPECT_EQ(read(), alone);

  step::renew_stale(loop, 2, moves, batch, metrics);  // unguided: nothing is read again
  EXPECT_EQ(read(), alone);
  arm.guide.fallback = Fallback::kRescore;
  step::renew_stale(loop, 2, moves, batch, metrics);
  EXPECT_EQ(metrics.at("fp4/guide/rescored_samples"), kSamples);
  EXPECT_EQ(stale(), 0);
  EXPECT_EQ(read(), trainer.logprobs(batch, &store));  // of the new path, all followed
  EXPECT_NE(read(), alone);
  step::renew_stale(loop, 2, moves, batch, metrics);
  EXPECT_EQ(metrics.at("fp4/guide/rescored_samples"), 0);

  schedule_.min_coverage = 0.5;
  arm.guide.max_version_diff = -1;
  try {
    step::taints(loop, 2, batch, moves, metrics);
    FAIL() << "went on with records that nobody follows";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("guide.max_version_diff"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep
