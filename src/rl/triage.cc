#include "rl/triage.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "rl/distribution.h"
#include "rl/ratio.h"

namespace lockstep::rl {
namespace {

constexpr double kSegment = 64;  // response tokens
constexpr double kNear = 0.05;

struct Segment {
  double tokens = 0, difference = 0, deep = 0;
};

/// Sums over tokens, and what the segments of all responses show.
struct Warnings {
  double tokens = 0, near = 0, deep = 0, widening = 0, narrowing = 0, deepest = 0;
  Distribution displacement;

  void close(Segment& segment) {
    if (segment.tokens == 0) return;
    displacement.add(std::abs(segment.difference) / segment.tokens);
    deepest = std::max(deepest, segment.deep / segment.tokens);
    segment = {};
  }
};

void add_response(const Options& options, const Trajectory& t, std::span<const float> train,
                  double advantage, Warnings& w) {
  Segment segment;
  for (std::size_t p = 0; p < t.tokens.size(); ++p) {
    const float a = train[p], b = t.rollout_logp[p];
    if (t.response_mask[p] == 0 || t.rewritten(p)) continue;
    if (!std::isfinite(a) || !std::isfinite(b)) continue;
    const double d = log_ratio(a, b);
    const bool deep = d < -options.triage_tail;
    w.tokens += 1, w.near += std::abs(d) < kNear, w.deep += deep;
    (advantage * d > 0 ? w.widening : w.narrowing) += std::abs(advantage * d);
    segment.tokens += 1, segment.difference += d, segment.deep += deep;
    if (segment.tokens == kSegment) w.close(segment);
  }
  w.close(segment);
}

}  // namespace

Metrics triage(const Options& options, const Batch& batch, const PerToken& train_logp, Comm& comm) {
  Warnings w;
  const std::vector<double> advantage =
      group_advantages(batch.rewards, batch.group_size, options.advantage);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (train_logp[i].empty() || batch.is_tainted(i)) continue;
    add_response(options, batch.trajectories[i], train_logp[i], advantage[i], w);
  }
  std::array<double, 5> sums = {w.tokens, w.near, w.deep, w.widening, w.narrowing};
  comm.sum(sums);
  std::array<double, 1> most = {w.deepest};
  comm.max(most);
  w.displacement.reduce(comm);
  Metrics metrics;
  if (sums[0] == 0) return metrics;
  metrics["triage/near_frac"] = sums[1] / sums[0];
  metrics["triage/deep_tail_frac"] = sums[2] / sums[0];
  metrics["triage/deep_tail_frac/max"] = most[0];
  // Where one of the two directions has no mass there is no ratio.
  if (sums[3] > 0 && sums[4] > 0) metrics["triage/rho_asym"] = sums[3] / sums[4];
  w.displacement.put("triage/displacement", metrics);
  return metrics;
}

}  // namespace lockstep::rl
