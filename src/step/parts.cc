#include "step/parts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "record/coverage.h"
#include "record/fresh.h"

namespace lockstep::step {
namespace {

/// Mean |a - b| over the tokens that the policy chose; NaN where there are none.
double mean_abs_diff(std::span<const Trajectory> trajectories, const PerToken& a,
                     const PerToken& b) {
  double sum = 0, tokens = 0;
  for (std::size_t i = 0; i < trajectories.size(); ++i) {
    for (std::size_t t = 0; t < trajectories[i].tokens.size(); ++t) {
      if (trajectories[i].response_mask[t] == 0 || trajectories[i].rewritten(t)) continue;
      sum += std::abs(static_cast<double>(a[i][t]) - static_cast<double>(b[i][t]));
      tokens += 1;
    }
  }
  return sum / tokens;
}

std::vector<Trajectory> chosen(std::span<const Trajectory> trajectories,
                               std::span<const std::uint8_t> moves) {
  std::vector<Trajectory> some;
  for (std::size_t i = 0; i < trajectories.size(); ++i) {
    if (moves[i] != 0) some.push_back(trajectories[i]);
  }
  return some;
}

/// A metric under another name.
void rename(Metrics& metrics, const std::string& from, const std::string& to) {
  auto node = metrics.extract(from);
  if (node.empty()) return;
  node.key() = to;
  metrics.insert(std::move(node));
}

}  // namespace

void load_state(Loop& loop, std::int64_t step) {
  const std::filesystem::path folder = loop.run_dir.checkpoint(step);
  try {
    loop.trainer.load(folder / "training_state");
  } catch (const Error& error) {
    const std::vector<std::int64_t> steps = loop.run_dir.checkpoints();
    const auto behind = std::lower_bound(steps.begin(), steps.end(), step);
    const std::string next =
        behind == steps.begin()
            ? "to begin anew at step 1, for there is no other"
            : cat({"to go on from the one before it, of step ", *std::prev(behind)});
    throw Error(cat({error.what(), "; delete ", folder.string(), " ", next,
                     ", or give this run another name"}));
  }
}

void forget_records(store::Store& store) {
  std::vector<SpanId> spans;
  for (const Span& span : store.spans()) spans.push_back(span.id);
  store.release(spans);
  store.metrics();  // what happened to them is no step's
}

std::vector<data::Prompt> my_prompts(const Loop& loop, std::int64_t step) {
  const std::int32_t room = loop.model.max_positions - loop.schedule.sampling.max_new_tokens;
  std::vector<data::Prompt> mine;
  for (data::Prompt& prompt : loop.task.prompts(step, loop.schedule.prompts_per_step)) {
    if (static_cast<std::int64_t>(prompt.tokens.size()) > room) {
      throw Error(cat({"prompt ", prompt.id.value, " has ", prompt.tokens.size(), " tokens; with ",
                       loop.schedule.sampling.max_new_tokens, " new ones the model takes at most ",
                       room, ": shorten it, or lower rollout.max_new_tokens"}));
    }
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

OldPolicy old_policy(const Loop& loop, const TraceSource& records,
                     std::span<const Trajectory> trajectories,
                     std::span<const std::uint8_t> moves) {
  if (loop.arm.rl.bypass) return {.logp = rollout_logp(trajectories)};
  train::Routes routes;
  PerToken read = loop.trainer.logprobs(chosen(trajectories, moves), &records,
                                        loop.arm.own_routes ? &routes : nullptr);
  OldPolicy old = {.logp = PerToken(trajectories.size())};
  if (loop.arm.own_routes) old.routes.resize(trajectories.size());
  for (std::size_t i = 0, next = 0; i < trajectories.size(); ++i) {
    if (moves[i] == 0) continue;
    if (loop.arm.own_routes) old.routes[i] = std::move(routes[next]);
    old.logp[i] = std::move(read[next++]);
  }
  return old;
}

std::vector<std::uint8_t> movable(const Loop& loop, std::span<const float> rewards) {
  std::vector<std::uint8_t> moves(rewards.size(), 1);
  if (loop.arm.rl.kl_weight > 0) return moves;
  const std::vector<std::uint8_t> flat = rl::flat_groups(rewards, loop.schedule.group_size());
  for (std::size_t i = 0; i < moves.size(); ++i) {
    if (flat[i / loop.schedule.group_size()] != 0) moves[i] = 0;
  }
  return moves;
}

void release(const Loop& loop, std::span<const Trajectory> trajectories,
             std::span<const std::uint8_t> moves) {
  std::vector<SpanId> spans;
  for (std::size_t i = 0; i < trajectories.size(); ++i) {
    if (moves[i] != 0) continue;
    for (const Span& span : trajectories[i].path) spans.push_back(span.id);
  }
  std::sort(spans.begin(), spans.end());
  spans.erase(std::unique(spans.begin(), spans.end()), spans.end());
  loop.store.release(spans);
}

WeightVersion oldest_followed(const Loop& loop, std::int64_t step) {
  return WeightVersion{step - loop.arm.guide.max_version_diff};
}

void renew_stale(const Loop& loop, std::int64_t step, std::span<const std::uint8_t> moves,
                 std::vector<Trajectory>& trajectories, Metrics& metrics) {
  if (loop.arm.guide.fallback != Fallback::kRescore) return;
  std::vector<std::size_t> places;
  std::vector<Trajectory> stale;
  for (std::size_t i = 0; i < trajectories.size(); ++i) {
    if (moves[i] == 0 || !is_stale(trajectories[i], oldest_followed(loop, step))) continue;
    places.push_back(i);
    stale.push_back(trajectories[i]);
  }
  metrics["fp4/guide/rescored_samples"] = static_cast<double>(stale.size());
  if (stale.empty()) return;
  std::vector<Trajectory> read = loop.engine.rescore(stale);
  loop.engine.metrics();  // no step counts these passes
  for (std::size_t i = 0; i < places.size(); ++i) {
    trajectories[places[i]].path = std::move(read[i].path);
  }
}

std::vector<std::uint8_t> taints(const Loop& loop, std::int64_t step,
                                 std::span<const Trajectory> trajectories,
                                 std::span<const std::uint8_t> moves, Metrics& metrics) {
  const Agreement agreement = {loop.model, loop.arm.contract, loop.arm.guide, loop.schedule.seed};
  const Coverage coverage =
      cover(chosen(trajectories, moves), agreement, loop.store, WeightVersion{step});
  metrics.merge(lockstep::metrics(coverage));
  require_coverage(coverage, loop.schedule.min_coverage);
  std::vector<std::uint8_t> tainted(trajectories.size());
  for (std::size_t i = 0, next = 0; i < trajectories.size(); ++i) {
    if (moves[i] != 0) tainted[i] = coverage.tainted[next++];
  }
  return tainted;
}

std::vector<Trajectory> audited_groups(const Loop& loop, std::span<const Trajectory> trajectories,
                                       std::span<const std::uint8_t> moves,
                                       std::span<const std::uint8_t> tainted) {
  const std::size_t most =
      static_cast<std::size_t>(loop.schedule.rescore_groups) * loop.schedule.group_size();
  std::vector<Trajectory> some;
  for (std::size_t i = 0; i < trajectories.size() && some.size() < most; ++i) {
    if (moves[i] != 0 && tainted[i] == 0) some.push_back(trajectories[i]);
  }
  return some;
}

void put_totals(std::span<const Trajectory> trajectories, Metrics& metrics) {
  double seconds = 0, tokens = 0;
  for (const auto& [name, value] : metrics) {
    if (name.starts_with("timing_s/")) seconds += value;
  }
  for (const Trajectory& t : trajectories) tokens += static_cast<double>(t.tokens.size());
  // What a clock, a disk or another thread has a say in stands under timing_s/ or perf/: the rest
  // of a line is the same whenever the run is repeated.
  rename(metrics, "rollout/seconds", "timing_s/rollout");
  rename(metrics, "rollout/tokens_per_s", "perf/rollout_tokens_per_s");
  rename(metrics, "fp4/refit/seconds", "timing_s/refit");
  metrics["timing_s/step"] = seconds;
  metrics["perf/time_per_step"] = seconds;
  metrics["perf/total_num_tokens"] = tokens;
  metrics["perf/throughput"] = tokens / std::max(seconds, 1e-9);
}

Metrics close_records(store::Store& store, WeightVersion newest) {
  Metrics metrics = store.metrics();
  store.retire(newest);
  const Metrics given_up = store.metrics();
  const std::string name = "fp4/trace/spans_given_up";
  if (given_up.contains(name)) metrics[name] += given_up.at(name);
  return metrics;
}

Metrics rescore(const Loop& loop, const TraceSource& records,
                std::span<const Trajectory> trajectories) {
  if (trajectories.empty()) return {};
  const std::vector<Trajectory> truth = loop.engine.rescore(trajectories);
  // Nobody trains on these records, and no step counts these passes.
  release(loop, truth, std::vector<std::uint8_t>(truth.size()));
  loop.engine.metrics();
  loop.engine.rest(loop.trainer.may_take());  // the trainer's turn, as behind a rollout
  const PerToken engine = rollout_logp(truth);
  const PerToken guided = loop.trainer.logprobs(trajectories, &records);
  const RoutesTrace routes(records);
  const PerToken unguided = loop.trainer.logprobs(trajectories, &routes);
  loop.trainer.rest(loop.engine.owed());
  const double guided_diff = mean_abs_diff(trajectories, guided, engine);
  if (std::isnan(guided_diff)) return {};
  return {{"fp4/rescore/guided_abs_diff", guided_diff},
          {"fp4/rescore/unguided_abs_diff", mean_abs_diff(trajectories, unguided, engine)},
          {"fp4/rescore/moved_abs_diff",
           mean_abs_diff(trajectories, rollout_logp(trajectories), engine)}};
}

}  // namespace lockstep::step
