// A recipe on a CUDA device beside the same on a CPU, step by step. Two runs of their own part
// after a few steps, as they do under two seeds: tokens are drawn from other log-probs, and an
// update by Adam makes a difference in the last bit of a small gradient a whole step of a weight.
// So each step begins on both sides at the CPU's state, and a third engine samples the answers that
// both read. All else is each side's own: the weights' codes, log-probs and records of its rollout,
// its trainer's log-probs, loss, gradient and update.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/folder_testing.h"
#include "cli/subject.h"
#include "device/testing.h"
#include "rl/objective.h"
#include "store/store.h"
#include "sync/refit.h"
#include "train/trainer.h"

namespace lockstep {
namespace {

/// The CPU beside itself shows that the test compares like with like.
std::int64_t steps_on(Device device) { return device.kind == Device::Kind::kCpu ? 2 : 4; }

/// What one side saw of a step.
struct Seen {
  std::vector<Trajectory> answers;  // with its rollout's log-probs
  PerToken trained{};               // its trainer's log-probs, before the update
  double loss = 0, grad_norm = 0;
};

/// Engine, records and trainer on one device.
class Side {
 public:
  Side(const cli::Subject& subject, Device device)
      : subject_(subject),
        trainer_(subject.agreement, subject.arm.qat, subject.recipe.trainer, device, *comm_),
        store_({.run = 1, .contract = subject.arm.contract.id()}),
        engine_(subject.agreement, subject.arm.rollout, device, &store_, *comm_) {
    cli::load(*subject.policy.weights, trainer_.initial_weights());
  }

  void save(const std::filesystem::path& state) const { trainer_.save(state); }
  void load(const std::filesystem::path& state) { trainer_.load(state); }

  Seen step(std::int64_t step, std::span<const Trajectory> given, std::span<const float> rewards) {
    const WeightVersion now{step};
    sync::refit(trainer_.weights(), engine_.weights(), subject_.arm.contract, now);
    store_.retire(now);
    Seen seen = {.answers = engine_.rescore(given)};
    seen.trained = trainer_.logprobs(seen.answers, &store_);
    PerToken old;
    for (const Trajectory& t : seen.answers) old.push_back(t.rollout_logp);
    rl::Objective objective(
        subject_.arm.rl,
        {.trajectories = seen.answers,
         .rewards = rewards,
         .old_logp = old,
         .group_size = static_cast<std::size_t>(subject_.recipe.schedule.samples_per_prompt)},
        *comm_);
    std::vector<Trajectory> live;
    for (const std::size_t i : objective.live()) live.push_back(seen.answers[i]);
    seen.loss =
        trainer_.accumulate(live, &store_, [&](std::size_t i, const auto& p, const auto& d) {
          return objective(objective.live()[i], p, d);
        });
    trainer_.update();
    seen.grad_norm = trainer_.metrics().at("actor/grad_norm");
    return seen;
  }

  const WeightSource& weights() const { return trainer_.weights(); }

 private:
  const cli::Subject& subject_;
  std::unique_ptr<Comm> comm_ = Comm::single();
  train::Trainer trainer_;
  store::Store store_;
  rollout::Engine engine_;
};

using Numbers = std::vector<float>;

Numbers numbers_of(const WeightSource& source) {
  Numbers all;
  source.each([&](const Weight& weight) {
    const auto& view = std::get<TensorView<const float, 2>>(weight.value);
    const std::size_t at = all.size();
    const std::int64_t count = view.shape[0] * view.shape[1];
    all.resize(at + static_cast<std::size_t>(count));
    copy_bytes(all.data() + at, {}, view.data, view.device, count * 4);
    synchronize(view.device);
  });
  return all;
}

double distance(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return std::sqrt(sum);
}

/// Mean |a - b| over the tokens of the responses.
double mean_gap(const std::vector<Trajectory>& of, const PerToken& a, const PerToken& b) {
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < of.size(); ++i) {
    for (std::size_t t = 0; t < of[i].tokens.size(); ++t) {
      if (of[i].response_mask[t] == 0) continue;
      sum += std::abs(double{a[i][t]} - b[i][t]);
      ++count;
    }
  }
  return sum / count;
}

PerToken rollout_logp(const Seen& seen) {
  PerToken all;
  for (const Trajectory& t : seen.answers) all.push_back(t.rollout_logp);
  return all;
}

/// How far the two are from each other after a step.
struct Apart {
  double rollout = 0, trained = 0;  // mean |difference| of log-probs
  double gap = 0, cpu_gap = 0;      // of each side's own trainer from its rollout
  double loss = 0;                  // |difference|
  double grad_norm = 0;             // |difference|, of the CPU's
  double moved = 0;                 // how far the weights went, of how far the CPU's went
  double update = 0;                // distance of the weights, of the same
};

Apart compare(const Seen& here, const Seen& cpu) {
  const PerToken a = rollout_logp(here), b = rollout_logp(cpu);
  return {.rollout = mean_gap(cpu.answers, a, b),
          .trained = mean_gap(cpu.answers, here.trained, cpu.trained),
          .gap = mean_gap(cpu.answers, here.trained, a),
          .cpu_gap = mean_gap(cpu.answers, cpu.trained, b),
          .loss = std::abs(here.loss - cpu.loss),
          .grad_norm = std::abs(here.grad_norm / cpu.grad_norm - 1)};
}

/// Under CISPO, whose ratio weighs a token's gradient up to its clip and never takes it away: where
/// clipping does, tokens near its edge decide whether two gradients are alike.
std::vector<Apart> run(const std::string& arm, Device device) {
  const cli::Subject subject = cli::open_subject(
      "recipes/demo.toml",
      {"arm=" + arm, "schedule.prompts=8", "schedule.samples=4", "rl.surrogate=cispo"}, "", true);
  const Schedule& schedule = subject.recipe.schedule;
  Side here(subject, device), cpu(subject, {});
  const std::unique_ptr<Comm> comm = Comm::single();
  rollout::Engine sampler(subject.agreement, subject.arm.rollout, {}, nullptr, *comm);
  const TestFolder folder;
  const std::filesystem::path& state = folder.path();
  std::vector<Apart> steps;
  for (std::int64_t step = 0; step < steps_on(device); ++step) {
    sync::refit(cpu.weights(), sampler.weights(), subject.arm.contract, WeightVersion{step});
    const std::vector<data::Prompt> prompts =
        subject.task->prompts(step, schedule.prompts_per_step);
    const std::vector<Trajectory> answers = cli::answer(
        sampler, prompts, schedule.samples_per_prompt, schedule.sampling, schedule.seed);
    std::vector<float> rewards;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      const data::Prompt& prompt = prompts[i / schedule.group_size()];
      rewards.push_back(
          subject.task->reward(prompt, std::span(answers[i].tokens).subspan(prompt.tokens.size())));
    }
    const Numbers start = numbers_of(cpu.weights());
    if (step > 0) here.load(state);
    const Seen a = here.step(step, answers, rewards), b = cpu.step(step, answers, rewards);
    Apart apart = compare(a, b);
    const Numbers ours = numbers_of(here.weights()), theirs = numbers_of(cpu.weights());
    apart.moved = distance(ours, start) / distance(theirs, start);
    apart.update = distance(ours, theirs) / distance(theirs, start);
    cpu.save(state);
    std::printf(
        "%-8s step %d: log-probs apart %.2e (rollout), %.2e (trainer); gap %.2e, the CPU's %.2e; "
        "loss %.1e, gradient %.1e; weights moved %.2f, update apart %.2f\n",
        arm.c_str(), static_cast<int>(step) + 1, apart.rollout, apart.trained, apart.gap,
        apart.cpu_gap, apart.loss, apart.grad_norm, apart.moved, apart.update);
    steps.push_back(apart);
  }
  return steps;
}

class Parity : public ::testing::TestWithParam<Device> {};

/// CUDA first: torch takes no other device once a CPU has trained.
std::vector<Device> cuda_first() {
  std::vector<Device> all = devices();
  std::reverse(all.begin(), all.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Devices, Parity, ::testing::ValuesIn(cuda_first()), name_of_device);

TEST_P(Parity, StepsOfARecipeStayTogether) {
  // docs/tolerances.md has what was seen. A side that stood still would have moved 0 and be 1
  // apart.
  const struct {
    const char* arm;
    double rollout, trained, gap, loss, grad_norm, update;
  } bounds[] = {{"bf16", 1e-3, 2e-3, 0.1, 2e-3, 0.1, 0.5},
                {"w4a4", 5e-3, 3e-2, 0.5, 1e-2, 3.0, 0.8},
                {"trace", 5e-3, 3e-2, 0.5, 1e-2, 3.0, 0.8}};
  for (const auto& most : bounds) {
    const std::vector<Apart> steps = run(most.arm, GetParam());
    double update = 0;
    for (const Apart& step : steps) {
      if (GetParam().kind == Device::Kind::kCpu) {  // the same bits
        EXPECT_EQ(step.rollout, 0.0);
        EXPECT_EQ(step.trained, 0.0);
        EXPECT_EQ(step.update, 0.0);
      }
      EXPECT_LT(step.rollout, most.rollout) << most.arm;
      EXPECT_LT(step.trained, most.trained) << most.arm;
      EXPECT_LT(std::abs(step.gap / step.cpu_gap - 1), most.gap) << most.arm;
      EXPECT_LT(step.loss, most.loss) << most.arm;
      EXPECT_LT(step.grad_norm, most.grad_norm) << most.arm;
      EXPECT_LT(std::abs(step.moved - 1), 0.05) << most.arm;
      update += step.update / static_cast<double>(steps.size());
    }
    EXPECT_LT(update, most.update) << most.arm;
  }
}

}  // namespace
}  // namespace lockstep
