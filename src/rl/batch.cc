#include "rl/batch.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::rl {
namespace {

template <typename T>
std::span<T> part_of(std::span<T> all, std::size_t first, std::size_t size) {
  return all.empty() ? all : all.subspan(first, size);
}

void check_lengths(const Batch& batch, std::span<const std::vector<float>> values,
                   const char* name) {
  if (values.size() != batch.size()) {
    throw Error(cat({name, " has ", values.size(), " rows for ", batch.size(), " trajectories"}));
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    // An empty row stands for a trajectory that needs none: one of a flat group.
    if (!values[i].empty() && values[i].size() != batch.trajectories[i].tokens.size()) {
      throw Error(cat({name, " of trajectory ", i, " has ", values[i].size(), " values for ",
                       batch.trajectories[i].tokens.size(), " tokens"}));
    }
  }
}

}  // namespace

Batch Batch::part(std::size_t u, std::size_t n) const {
  const std::size_t groups = size() / group_size;
  if (groups < n) {
    throw Error(cat({"schedule.updates_per_step is ", n, ", but a step has only ", groups,
                     " groups: lower it or raise schedule.prompts_per_step"}));
  }
  const std::size_t first = groups * u / n * group_size;
  const std::size_t count = groups * (u + 1) / n * group_size - first;
  Batch part = *this;
  part.trajectories = part_of(trajectories, first, count);
  part.rewards = part_of(rewards, first, count);
  part.old_logp = part_of(old_logp, first, count);
  part.reference_logp = part_of(reference_logp, first, count);
  part.tainted = part_of(tainted, first, count);
  part.scores = part_of(scores, first, count);
  return part;
}

void Batch::check() const {
  if (group_size == 0 || size() % group_size != 0) {
    throw Error(cat({size(), " trajectories are not whole groups of ", group_size}));
  }
  if (rewards.size() != size()) {
    throw Error(cat({rewards.size(), " rewards for ", size(), " trajectories"}));
  }
  if (!tainted.empty() && tainted.size() != size()) {
    throw Error(cat({tainted.size(), " taints for ", size(), " trajectories"}));
  }
  if (!scores.empty() && scores.size() != size()) {
    throw Error(cat({scores.size(), " scores for ", size(), " trajectories"}));
  }
  for (std::size_t i = 0; i < size(); ++i) {
    const Trajectory& t = trajectories[i];
    if (t.response_mask.size() != t.tokens.size() || t.rollout_logp.size() != t.tokens.size()) {
      throw Error(
          cat({"trajectory ", i, " has ", t.tokens.size(), " tokens, ", t.response_mask.size(),
               " mask values and ", t.rollout_logp.size(), " log-probs"}));
    }
    if (std::count(t.response_mask.begin(), t.response_mask.end(), 1) == 0) {
      throw Error(cat({"trajectory ", i, " has no response token"}));
    }
    if (std::cmp_greater(t.rewritten_from, t.tokens.size())) {
      throw Error(cat({"trajectory ", i, " was rewritten from ", t.rewritten_from, " on and has ",
                       t.tokens.size(), " tokens"}));
    }
    if (!std::isfinite(rewards[i])) {
      throw Error(cat({"the reward of trajectory ", i, " is ", rewards[i]}));
    }
  }
  check_lengths(*this, old_logp, "old_logp");
  if (!reference_logp.empty()) check_lengths(*this, reference_logp, "reference_logp");
}

std::vector<double> group_advantages(std::span<const float> rewards, std::size_t group_size,
                                     Advantage advantage) {
  std::vector<double> advantages;
  advantages.reserve(rewards.size());
  for (std::size_t first = 0; first < rewards.size(); first += group_size) {
    const auto group = rewards.subspan(first, group_size);
    double mean = 0, square = 0, deviation = 1;
    if (group_size > 1) {
      for (const float r : group) mean += static_cast<double>(r) / static_cast<double>(group_size);
      for (const float r : group) square += (r - mean) * (r - mean);
      deviation = std::sqrt(square / static_cast<double>(group_size - 1));
    }
    // Equal rewards leave exactly nothing: not what rounding left in the mean, over 1e-6.
    const bool flat = group_size > 1 && std::equal(group.begin() + 1, group.end(), group.begin());
    const double unit = advantage == Advantage::kDrGrpo ? 1.0 : deviation + 1e-6;
    for (const float r : group) advantages.push_back(flat ? 0.0 : (r - mean) / unit);
  }
  return advantages;
}

std::vector<std::uint8_t> flat_groups(std::span<const float> rewards, std::size_t group_size) {
  std::vector<std::uint8_t> flat;
  for (std::size_t first = 0; group_size > 1 && first < rewards.size(); first += group_size) {
    const auto group = rewards.subspan(first, group_size);
    flat.push_back(std::equal(group.begin() + 1, group.end(), group.begin()) ? 1 : 0);
  }
  if (group_size == 1) {
    for (const float r : rewards) flat.push_back(r == 0.0f ? 1 : 0);
  }
  return flat;
}

std::vector<float> shaped_rewards(const Options& options, std::span<const Trajectory> trajectories,
                                  std::span<const float> scores) {
  std::vector<float> rewards(scores.begin(), scores.end());
  if (options.overlong_buffer_len == 0) return rewards;
  const auto buffer = static_cast<double>(options.overlong_buffer_len);
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    const Trajectory& t = trajectories[i];
    const auto length =
        static_cast<double>(std::count(t.response_mask.begin(), t.response_mask.end(), 1));
    const double expected = t.sampling.max_new_tokens - buffer;
    const double penalty = std::min(0.0, (expected - length) / buffer);
    rewards[i] = static_cast<float>(scores[i] + penalty * options.overlong_penalty_factor);
  }
  return rewards;
}

}  // namespace lockstep::rl
