#include "step/step.h"

#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "base/timer.h"
#include "record/fresh.h"
#include "rl/diagnostics.h"
#include "rl/objective.h"
#include "step/parts.h"
#include "step/sample.h"
#include "sync/refit.h"
#include "sync/reweigh.h"

namespace lockstep::step {
namespace {

/// All updates on a batch. Each pass finds the records that the rollout left. `before` gets what
/// the trainer's log-probs were before the first update, where nobody has computed them yet.
Metrics update(Loop& loop, const TraceSource& records, const rl::Batch& batch,
               const train::Routes& routes, PerToken& before) {
  rl::Seen seen;
  const auto updates = static_cast<std::size_t>(loop.schedule.updates_per_step);
  for (std::size_t u = 0; u < updates; ++u) {
    const rl::Batch part = batch.part(u, updates);
    const auto first =
        static_cast<std::size_t>(part.trajectories.data() - batch.trajectories.data());
    rl::Objective objective(loop.arm.rl, part, loop.comm);
    const std::vector<std::size_t>& live = objective.live();
    std::vector<Trajectory> moved;
    train::Routes moved_routes;
    for (const std::size_t i : live) {
      moved.push_back(part.trajectories[i]);
      if (!routes.empty()) moved_routes.push_back(routes[first + i]);
    }
    const auto loss = [&](std::size_t i, const LogProbs& logp, const Slopes& dlogp) {
      std::vector<float>& row = before[first + live[i]];
      if (row.empty()) row.assign(logp.begin(), logp.end());
      return objective(live[i], logp, dlogp);
    };
    const double total =
        loop.trainer.accumulate(moved, &records, loss, routes.empty() ? nullptr : &moved_routes);
    if (!std::isfinite(total)) {
      throw Error(
          "the loss is not a number; lower trainer.lr, or look at the gap in metrics.jsonl");
    }
    loop.trainer.update();
    seen += objective.seen();
  }
  Metrics metrics = loop.trainer.metrics();
  metrics.merge(seen.metrics(loop.arm.rl, loop.comm));
  return metrics;
}

/// Gives the rollout the trainer's weights, quantized, with the noise that the arm adds to them.
Metrics sync_weights(Loop& loop, std::int64_t version) {
  const sync::Noise& noise = loop.arm.sync.noise;
  const sync::Noised weights(loop.trainer.weights(), noise.on,
                             sync::noise_sigma(noise, version, loop.schedule.steps),
                             loop.schedule.seed, WeightVersion{version});
  return sync::refit(weights, loop.engine.weights(), loop.arm.contract, WeightVersion{version});
}

Metrics one_step(Loop& loop, std::int64_t step) {
  Timer timer;

  // rollout -> record -> store
  Metrics metrics;
  Sampled sampled = sample(loop, step, metrics);
  metrics.merge(loop.engine.metrics());
  if (loop.arm.sync.noise.start > 0) {
    metrics["rollout/noise_sigma"] =
        sync::noise_sigma(loop.arm.sync.noise, step, loop.schedule.steps);
  }
  std::vector<Trajectory>& trajectories = sampled.trajectories;
  const std::vector<std::uint8_t> moves = movable(loop, sampled.rewards);
  timer.lap();
  release(loop, trajectories, moves);
  renew_stale(loop, step, moves, trajectories, metrics);
  const FreshTrace records(loop.store, trajectories, oldest_followed(loop, step));
  const std::vector<std::uint8_t> tainted = taints(loop, step, trajectories, moves, metrics);
  metrics["timing_s/reward"] += timer.lap();

  loop.engine.rest(loop.trainer.may_take());
  metrics["timing_s/gen"] += timer.lap();

  // -> train: the policy as it was, following the records; the reference policy follows none
  const OldPolicy old = old_policy(loop, records, trajectories, moves);
  PerToken reference_logp;
  if (loop.reference) reference_logp = loop.reference->logprobs(trajectories, nullptr);
  metrics["timing_s/old_log_prob"] = timer.lap();

  // -> rl -> train
  const rl::Batch batch = {.trajectories = trajectories,
                           .rewards = sampled.rewards,
                           .old_logp = old.logp,
                           .reference_logp = reference_logp,
                           .group_size = loop.schedule.group_size(),
                           .tainted = tainted,
                           .scores = sampled.scores};
  PerToken train_logp = loop.arm.rl.bypass ? PerToken(trajectories.size()) : old.logp;
  metrics.merge(update(loop, records, batch, old.routes, train_logp));
  metrics.merge(rl::diagnostics(loop.arm.rl, batch, train_logp, loop.comm));
  metrics["timing_s/update_actor"] = timer.lap();

  // -> sync -> rollout; with the old weights go their records
  loop.trainer.rest(loop.engine.owed());
  metrics.merge(sync_weights(loop, step + 1));
  metrics["timing_s/update_weights"] = timer.lap();
  if (loop.schedule.rescore_every > 0 && (step + 1) % loop.schedule.rescore_every == 0) {
    metrics.merge(rescore(loop, records, audited_groups(loop, trajectories, moves, tainted)));
    metrics["timing_s/rescore"] = timer.lap();
  }
  metrics.merge(close_records(loop.store, WeightVersion{step + 1}));
  put_totals(trajectories, metrics);
  return metrics;
}

}  // namespace

void run(Loop loop) {
  // Prompts, seeds and noise follow from the step's number, and records live for one step: the
  // state of a run is the trainer's.
  const std::int64_t first = loop.run_dir.resume();
  if (first > 0) load_state(loop, first);
  sync_weights(loop, first);
  forget_records(loop.store);

  for (std::int64_t step = first; step < loop.schedule.steps; ++step) {
    Metrics metrics = one_step(loop, step);
    const std::int64_t done = step + 1;
    if (loop.evaluate) metrics.merge(loop.evaluate(done));
    loop.run_dir.append(done, metrics);
    if (loop.report) loop.report(done, metrics);
    if (done % loop.schedule.save_every == 0 || done == loop.schedule.steps) {
      loop.run_dir.save(done, loop.schedule.keep_checkpoints, [&](const auto& folder) {
        if (loop.export_model) loop.export_model(folder);
        std::filesystem::create_directories(folder / "training_state");
        loop.trainer.save(folder / "training_state");
      });
    }
  }
}

}  // namespace lockstep::step
