#include "step/step.h"

#include <utility>
#include <vector>

#include "base/timer.h"
#include "rl/objective.h"
#include "sync/refit.h"

namespace lockstep::step {
namespace {

/// This rank's prompts. All samples of a prompt stay on one rank: they share its records there,
/// and their advantages need no other rank.
std::vector<data::Prompt> my_prompts(const Loop& loop, std::int64_t step) {
  std::vector<data::Prompt> mine;
  for (data::Prompt& prompt : loop.task.prompts(step, loop.schedule.prompts_per_step)) {
    if (prompt.id.value % loop.comm.size() == loop.comm.rank()) mine.push_back(std::move(prompt));
  }
  return mine;
}

std::vector<rollout::Request> requests(const Loop& loop, std::span<const data::Prompt> prompts) {
  std::vector<rollout::Request> requests;
  for (const data::Prompt& prompt : prompts) {
    requests.push_back({.prefix = {.prompt = prompt.id,
                                   .tokens = prompt.tokens,
                                   .sampling = loop.schedule.sampling},
                        .num_samples = loop.schedule.samples_per_prompt,
                        .seed = loop.schedule.seed});
  }
  return requests;
}

std::vector<float> score(const Loop& loop, std::span<const data::Prompt> prompts,
                         std::span<const Trajectory> trajectories) {
  std::vector<float> rewards;
  for (std::size_t i = 0; i < trajectories.size(); ++i) {
    const data::Prompt& prompt = prompts[i / loop.schedule.group_size()];
    const std::span tokens(trajectories[i].tokens);
    rewards.push_back(loop.task.reward(prompt, tokens.subspan(prompt.tokens.size())));
  }
  return rewards;
}

PerToken rollout_logp(std::span<const Trajectory> trajectories) {
  PerToken logp;
  for (const Trajectory& trajectory : trajectories) logp.push_back(trajectory.rollout_logp);
  return logp;
}

/// All updates on a batch. Each pass finds the records that the rollout left.
Metrics update(Loop& loop, const rl::Batch& batch) {
  Metrics metrics;
  const auto updates = static_cast<std::size_t>(loop.schedule.updates_per_step);
  for (std::size_t u = 0; u < updates; ++u) {
    const rl::Batch part = batch.part(u, updates);
    const rl::Objective objective(loop.arm.rl, part, loop.comm);
    const double loss = loop.trainer.accumulate(part.trajectories, &loop.store, objective);
    metrics = loop.trainer.update();
    metrics["actor/pg_loss"] = loss;
  }
  return metrics;
}

/// Gives the rollout the trainer's weights, quantized; with the old weights go their records.
Metrics sync_weights(Loop& loop, WeightVersion version) {
  Metrics metrics =
      sync::refit(loop.trainer.weights(), loop.engine.weights(), loop.arm.contract, version);
  loop.store.retire(version);
  return metrics;
}

Metrics one_step(Loop& loop, std::int64_t step) {
  Timer timer;

  // rollout -> record -> store
  const std::vector<data::Prompt> prompts = my_prompts(loop, step);
  const std::vector<Trajectory> trajectories =
      rollout::generate(loop.engine, requests(loop, prompts));
  const std::vector<float> rewards = score(loop, prompts, trajectories);
  Metrics metrics = {{"timing_s/gen", timer.lap()}};

  // -> train: the policy as it was, following the records; the reference policy follows none
  const PerToken old_logp = loop.arm.rl.bypass ? rollout_logp(trajectories)
                                               : loop.trainer.logprobs(trajectories, &loop.store);
  PerToken reference_logp;
  if (loop.reference) reference_logp = loop.reference->logprobs(trajectories, nullptr);
  metrics["timing_s/old_log_prob"] = timer.lap();

  // -> rl -> train
  const rl::Batch batch = {.trajectories = trajectories,
                           .rewards = rewards,
                           .old_logp = old_logp,
                           .reference_logp = reference_logp,
                           .group_size = loop.schedule.group_size()};
  metrics.merge(rl::diagnostics(loop.arm.rl, batch, loop.comm));
  metrics.merge(update(loop, batch));
  metrics.merge(loop.store.metrics());
  metrics["timing_s/update_actor"] = timer.lap();

  // -> sync -> rollout
  metrics.merge(sync_weights(loop, WeightVersion{step + 1}));
  metrics["timing_s/update_weights"] = timer.lap();
  return metrics;
}

}  // namespace

void run(Loop loop) {
  // Prompts, seeds and noise follow from the step's number, and records live for one step: the
  // state of a run is the trainer's.
  const std::int64_t first = loop.run_dir.resume();
  if (first > 0) loop.trainer.load(loop.run_dir.checkpoint(first));
  sync_weights(loop, WeightVersion{first});

  for (std::int64_t step = first; step < loop.schedule.steps; ++step) {
    loop.run_dir.append(step, one_step(loop, step));
    const std::int64_t done = step + 1;
    if (done % loop.schedule.save_every == 0 || done == loop.schedule.steps) {
      loop.run_dir.save(done, [&](const auto& folder) { loop.trainer.save(folder); });
    }
  }
}

}  // namespace lockstep::step
