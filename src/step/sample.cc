#include "step/sample.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "base/timer.h"
#include "rl/batch.h"
#include "step/parts.h"

namespace lockstep::step {
namespace {

/// Moves the groups of `from` that `keep` names to the end of `to`; the others' records go.
void take(const Loop& loop, std::vector<Trajectory> from, std::span<const float> scores,
          std::span<const std::uint8_t> keep, Sampled& to) {
  std::vector<std::uint8_t> kept;
  for (std::size_t i = 0; i < from.size(); ++i) {
    kept.push_back(keep[i / loop.schedule.group_size()]);
  }
  release(loop, from, kept);
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (kept[i] == 0) continue;
    to.trajectories.push_back(std::move(from[i]));
    to.scores.push_back(scores[i]);
  }
}

/// [ranks] how many groups each has.
std::vector<double> groups_by_rank(const Loop& loop, const Sampled& sampled) {
  std::vector<double> groups(static_cast<std::size_t>(loop.comm.size()));
  groups[static_cast<std::size_t>(loop.comm.rank())] =
      static_cast<double>(sampled.trajectories.size() / loop.schedule.group_size());
  loop.comm.sum(groups);
  return groups;
}

/// Leaves prompts_per_step groups over all ranks, the lower ranks' first.
void drop_surplus(const Loop& loop, std::span<const double> groups, Sampled& sampled) {
  const auto before = std::accumulate(groups.begin(), groups.begin() + loop.comm.rank(), 0.0);
  const auto room = static_cast<std::size_t>(
      std::max(0.0, static_cast<double>(loop.schedule.prompts_per_step) - before));
  const std::size_t most = room * loop.schedule.group_size();
  if (sampled.trajectories.size() <= most) return;
  const std::span surplus = std::span(sampled.trajectories).subspan(most);
  release(loop, surplus, std::vector<std::uint8_t>(surplus.size()));
  sampled.trajectories.resize(most);
  sampled.scores.resize(most);
}

}  // namespace

Sampled sample(const Loop& loop, std::int64_t step, Metrics& metrics) {
  const Schedule& schedule = loop.schedule;
  const bool selects = schedule.max_gen_batches > 1;
  Sampled sampled;
  std::array<double, 2> raw = {};  // sum of scores, of how many
  Timer timer;
  for (std::int32_t round = 0;; ++round) {
    const std::vector<data::Prompt> prompts =
        my_prompts(loop, step * schedule.max_gen_batches + round);
    std::vector<Trajectory> answers = rollout::generate(loop.engine, requests(loop, prompts));
    metrics["timing_s/gen"] += timer.lap();
    const std::vector<float> scores = score(loop, prompts, answers);
    raw[0] += std::accumulate(scores.begin(), scores.end(), 0.0);
    raw[1] += static_cast<double>(scores.size());
    std::vector<std::uint8_t> keep(prompts.size(), 1);
    if (selects) {
      keep = rl::flat_groups(scores, schedule.group_size());
      for (std::uint8_t& flag : keep) flag ^= 1;
    }
    take(loop, std::move(answers), scores, keep, sampled);
    metrics["timing_s/reward"] += timer.lap();
    metrics["train/num_gen_batches"] = round + 1;
    if (!selects) break;
    const std::vector<double> groups = groups_by_rank(loop, sampled);
    const double found = std::accumulate(groups.begin(), groups.end(), 0.0);
    if (found >= schedule.prompts_per_step) {
      drop_surplus(loop, groups, sampled);
      break;
    }
    if (round + 1 == schedule.max_gen_batches) {
      throw Error(cat({"only ", found, " of ", schedule.prompts_per_step, " groups of step ",
                       step + 1, " had samples of different scores after ", round + 1,
                       " rounds: raise schedule.max_gen_batches, lower "
                       "schedule.prompts, or give prompts that are neither too easy nor too "
                       "hard"}));
    }
  }
  loop.comm.sum(raw);
  metrics["rollout/raw_reward"] = raw[1] > 0 ? raw[0] / raw[1] : 0;
  sampled.rewards = rl::shaped_rewards(loop.arm.rl, sampled.trajectories, sampled.scores);
  return sampled;
}

}  // namespace lockstep::step
