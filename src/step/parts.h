/// The smaller parts of a step; step.cc shows how they follow each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rl/batch.h"
#include "step/step.h"

namespace lockstep::step {

/// The trainer's state after that step, from its checkpoint. Throws Error with what to do where it
/// is damaged.
void load_state(Loop& loop, std::int64_t step);

/// Gives up what an interrupted run left: its steps begin anew.
void forget_records(store::Store& store);

/// This rank's prompts. All samples of a prompt stay on one rank: they share its records there,
/// and their advantages need no other rank. Throws Error where one does not fit the model.
std::vector<data::Prompt> my_prompts(const Loop& loop, std::int64_t step);

std::vector<rollout::Request> requests(const Loop& loop, std::span<const data::Prompt> prompts);

std::vector<float> score(const Loop& loop, std::span<const data::Prompt> prompts,
                         std::span<const Trajectory> trajectories);

PerToken rollout_logp(std::span<const Trajectory> trajectories);

/// The trainer's log-probs, guided, of the trajectories that the loss can move, and the experts of
/// that pass where the arm's updates take them; the others' rows are empty.
struct OldPolicy {
  PerToken logp{};
  train::Routes routes{};  // empty: updates take none of these
};
OldPolicy old_policy(const Loop& loop, const TraceSource& records,
                     std::span<const Trajectory> trajectories, std::span<const std::uint8_t> moves);

/// [trajectories] 1 where the loss can move: its group has an advantage, or there is a KL term.
std::vector<std::uint8_t> movable(const Loop& loop, std::span<const float> rewards);

/// Gives up the records of what cannot move, before they reach the disk.
void release(const Loop& loop, std::span<const Trajectory> trajectories,
             std::span<const std::uint8_t> moves);

/// The oldest weights whose records this step follows.
WeightVersion oldest_followed(const Loop& loop, std::int64_t step);

/// Where guide.fallback is rescore, has the engine read again what stems from older weights, so
/// that its records are of the present ones. The log-probs that sampling gave stay.
void renew_stale(const Loop& loop, std::int64_t step, std::span<const std::uint8_t> moves,
                 std::vector<Trajectory>& trajectories, Metrics& metrics);

/// [trajectories] 1 where a K or V record is lost: every later token of the sample follows what the
/// trainer no longer knows, so it is masked. Adds what is covered to `metrics`; throws Error where
/// that is less than the schedule's min_coverage.
std::vector<std::uint8_t> taints(const Loop& loop, std::int64_t step,
                                 std::span<const Trajectory> trajectories,
                                 std::span<const std::uint8_t> moves, Metrics& metrics);

/// What the store did in this step, the spans included that it now gives up as older than `newest`.
Metrics close_records(store::Store& store, WeightVersion newest);

/// The first prompts' samples, of those whose records are still there and not tainted.
std::vector<Trajectory> audited_groups(const Loop& loop, std::span<const Trajectory> trajectories,
                                       std::span<const std::uint8_t> moves,
                                       std::span<const std::uint8_t> tainted);

/// Sums over the step: seconds, tokens, tokens/s.
void put_totals(std::span<const Trajectory> trajectories, Metrics& metrics);

/// Has the engine read some samples again with its new weights and the experts that these choose,
/// and compares the trainer's log-probs with and without guidance, both under the recorded experts:
/// once weights move, guidance toward old codes could hide it. Nothing where no token is compared.
Metrics rescore(const Loop& loop, const TraceSource& records,
                std::span<const Trajectory> trajectories);

}  // namespace lockstep::step
