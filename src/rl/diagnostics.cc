#include "rl/diagnostics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "base/vectors.h"
#include "rl/distribution.h"
#include "rl/ratio.h"
#include "rl/triage.h"

namespace lockstep::rl {
namespace {

/// The terms of the gap between two policies, added up over tokens and responses.
struct Gap {
  enum Term : std::size_t {
    kTokens,
    kSequences,
    kDifference,
    kK3,
    kReverseK3,
    kJs,
    kChi2,
    kTrain,
    kRollout,
    kOver05,
    kOver5,
    kOver2,
    kProb,
    kProb2,
    kPt,
    kPr,
    kPt2,
    kPr2,
    kPtPr,
    kSeqTrain,
    kSeqRollout,
    kSeqPplTrain,
    kSeqPplRollout,
    kSeqPplRatio,
    kSeqAbs,
    kSeqChi2,
    kQuadrants,  // 4: advantage and d positive, +-, -+, --
    kCount = kQuadrants + 4
  };
  std::array<double, kCount> sums = {};
  std::array<double, 3> most = {0, -1e300, -1e300};  // see put_gap()
  Distribution absolute, multiplicative;
};

void add_token(double advantage, float train, float rollout, Gap& gap) {
  auto& s = gap.sums;
  const double d = log_ratio(train, rollout);
  const double e = std::exp(d);
  const double pt = std::exp(static_cast<double>(train)),
               pr = std::exp(static_cast<double>(rollout));
  s[Gap::kTokens] += 1;
  s[Gap::kDifference] += d;
  s[Gap::kK3] += e - 1 - d;
  s[Gap::kReverseK3] += 1 / e - 1 + d;
  // k3 of either policy to their mixture, each sampled from the rollout's tokens
  const double to_mixture = std::log((1 + e) / 2);
  s[Gap::kJs] += 0.5 * ((std::exp(to_mixture) - 1 - to_mixture) +
                        e * (std::exp(to_mixture - d) - 1 - (to_mixture - d)));
  s[Gap::kChi2] += e * e - 1;
  s[Gap::kTrain] += train;
  s[Gap::kRollout] += rollout;
  s[Gap::kOver05] += std::abs(d) > 0.05;
  s[Gap::kOver5] += std::abs(d) > 0.5;
  s[Gap::kOver2] += std::abs(d) > 2;
  s[Gap::kProb] += std::abs(pt - pr);
  s[Gap::kProb2] += (pt - pr) * (pt - pr);
  s[Gap::kPt] += pt, s[Gap::kPr] += pr;
  s[Gap::kPt2] += pt * pt, s[Gap::kPr2] += pr * pr, s[Gap::kPtPr] += pt * pr;
  if (advantage != 0 && d != 0) {
    s[Gap::kQuadrants + (advantage > 0 ? 0 : 2) + (d > 0 ? 0 : 1)] += 1;
  }
  gap.most[0] = std::max(gap.most[0], std::abs(pt - pr));
  gap.absolute.add(std::abs(d));
  gap.multiplicative.add(std::exp(std::abs(d)));
}

void add_sequence(double train, double rollout, double tokens, Gap& gap) {
  auto& s = gap.sums;
  const double a = -train / tokens, b = -rollout / tokens;  // log-perplexities
  s[Gap::kSequences] += 1;
  s[Gap::kSeqTrain] += a, s[Gap::kSeqRollout] += b;
  s[Gap::kSeqPplTrain] += std::exp(a), s[Gap::kSeqPplRollout] += std::exp(b);
  s[Gap::kSeqPplRatio] += std::exp(a - b);
  s[Gap::kSeqAbs] += std::abs(a - b);
  s[Gap::kSeqChi2] += std::exp(2 * std::clamp(train - rollout, -kMaxLogRatio, kMaxLogRatio)) - 1;
  gap.most[1] = std::max(gap.most[1], a - b);
  gap.most[2] = std::max(gap.most[2], b - a);
}

Gap measure(const Options& options, const Batch& batch, const PerToken& train_logp) {
  Gap gap;
  const std::vector<double> advantage =
      group_advantages(batch.rewards, batch.group_size, options.advantage);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Trajectory& t = batch.trajectories[i];
    if (train_logp[i].empty() || batch.is_tainted(i)) continue;
    double train = 0, rollout = 0, tokens = 0;
    for (std::size_t p = 0; p < t.tokens.size(); ++p) {
      const float a = train_logp[i][p], b = t.rollout_logp[p];
      if (t.response_mask[p] == 0 || t.rewritten(p)) continue;
      if (!std::isfinite(a) || !std::isfinite(b)) continue;
      add_token(advantage[i], a, b, gap);
      train += a, rollout += b, tokens += 1;
    }
    if (tokens > 0) add_sequence(train, rollout, tokens, gap);
  }
  return gap;
}

double pearson(const std::array<double, Gap::kCount>& s, double n) {
  const double cov = s[Gap::kPtPr] - s[Gap::kPt] * s[Gap::kPr] / n;
  const double a = s[Gap::kPt2] - s[Gap::kPt] * s[Gap::kPt] / n;
  const double b = s[Gap::kPr2] - s[Gap::kPr] * s[Gap::kPr] / n;
  return a > 0 && b > 0 ? cov / std::sqrt(a * b) : 1;
}

void put_gap(Gap& gap, Comm& comm, Metrics& m) {
  comm.sum(gap.sums);
  comm.max(gap.most);
  gap.absolute.reduce(comm);
  gap.multiplicative.reduce(comm);
  const auto& s = gap.sums;
  const double n = s[Gap::kTokens], sequences = s[Gap::kSequences];
  gap.absolute.put("train/train_rollout_logprob_abs_diff", m);
  m["training/rollout_probs_diff_valid"] = n > 0;
  if (n == 0) return;

  gap.multiplicative.put("train/token_mult_prob_error", m);
  m["train/logprob_abs_diff_over_0.05"] = s[Gap::kOver05] / n;
  m["train/logprob_abs_diff_over_0.5"] = s[Gap::kOver5] / n;
  m["train/logprob_abs_diff_over_2"] = s[Gap::kOver2] / n;
  m["train/gen_kl_error"] = s[Gap::kK3] / n;
  m["train/policy_kl_error"] = s[Gap::kReverseK3] / n;
  m["train/js_divergence_error"] = s[Gap::kJs] / n;

  m["rollout_corr/kl"] = -s[Gap::kDifference] / n;
  m["rollout_corr/k3_kl"] = s[Gap::kK3] / n;
  m["rollout_corr/chi2_token"] = s[Gap::kChi2] / n;
  m["rollout_corr/chi2_seq"] = s[Gap::kSeqChi2] / sequences;
  m["rollout_corr/training_log_ppl"] = s[Gap::kSeqTrain] / sequences;
  m["rollout_corr/rollout_log_ppl"] = s[Gap::kSeqRollout] / sequences;
  m["rollout_corr/training_ppl"] = s[Gap::kSeqPplTrain] / sequences;
  m["rollout_corr/rollout_ppl"] = s[Gap::kSeqPplRollout] / sequences;
  m["rollout_corr/ppl_ratio"] = s[Gap::kSeqPplRatio] / sequences;
  m["rollout_corr/log_ppl_diff"] = (s[Gap::kSeqTrain] - s[Gap::kSeqRollout]) / sequences;
  m["rollout_corr/log_ppl_abs_diff"] = s[Gap::kSeqAbs] / sequences;
  m["rollout_corr/log_ppl_diff_max"] = gap.most[1];
  m["rollout_corr/log_ppl_diff_min"] = -gap.most[2];

  m["training/rollout_probs_diff_mean"] = s[Gap::kProb] / n;
  m["training/rollout_probs_diff_max"] = gap.most[0];
  m["training/rollout_probs_diff_std"] =
      std::sqrt(std::max(0.0, s[Gap::kProb2] / n - s[Gap::kProb] / n * s[Gap::kProb] / n));
  m["training/rollout_actor_probs_pearson_corr"] = pearson(s, n);

  const std::array<const char*, 4> quadrants = {"up_up", "up_down", "down_up", "down_down"};
  for (std::size_t q = 0; q < 4; ++q) {  // advantage's direction, then d's
    m[std::string("train/quadrant/") + quadrants[q]] = s[Gap::kQuadrants + q] / n;
  }
}

/// name/mean, name/max, name/min.
void put_range(const std::string& name, std::span<const double> values, Comm& comm, Metrics& m) {
  std::array<double, 2> sums = {0, static_cast<double>(values.size())};
  std::array<double, 2> most = {-1e300, -1e300};
  for (const double v : values) {
    sums[0] += v;
    most[0] = std::max(most[0], v);
    most[1] = std::max(most[1], -v);
  }
  comm.sum(sums);
  comm.max(most);
  if (sums[1] == 0) return;
  m[name + "/mean"] = sums[0] / sums[1];
  m[name + "/max"] = most[0];
  m[name + "/min"] = -most[1];
}

void put_responses(const Options& options, const Batch& batch, Comm& comm, Metrics& m) {
  std::vector<double> rewards, scores, advantages, prompt, response;
  std::array<double, 4> sums = {};  // cut by length, sequences, flat groups, groups
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Trajectory& t = batch.trajectories[i];
    const auto chosen =
        static_cast<double>(std::count(t.response_mask.begin(), t.response_mask.end(), 1));
    response.push_back(chosen);
    prompt.push_back(static_cast<double>(t.tokens.size()) - chosen);
    rewards.push_back(batch.rewards[i]);
    scores.push_back(batch.scores.empty() ? batch.rewards[i] : batch.scores[i]);
    sums[0] += t.finish == Finish::kLength;
    sums[1] += 1;
  }
  for (const auto flat : flat_groups(batch.rewards, batch.group_size)) {
    sums[2] += flat;
    sums[3] += 1;
  }
  advantages = group_advantages(batch.rewards, batch.group_size, options.advantage);
  put_range("critic/score", scores, comm, m);
  put_range("critic/rewards", rewards, comm, m);
  put_range("critic/advantages", advantages, comm, m);
  put_range("response_length", response, comm, m);
  put_range("prompt_length", prompt, comm, m);
  comm.sum(sums);
  m["response_length/clip_ratio"] = sums[0] / std::max(sums[1], 1.0);
  m["rollout/zero_std/fraction"] = sums[2] / std::max(sums[3], 1.0);
}

}  // namespace

Metrics diagnostics(const Options& options, const Batch& batch, const PerToken& train_logp,
                    Comm& comm) {
  clear_upper_halves();
  Metrics metrics;
  Gap gap = measure(options, batch, train_logp);
  put_gap(gap, comm, metrics);
  put_responses(options, batch, comm, metrics);
  metrics.merge(triage(options, batch, train_logp, comm));
  std::array<double, 2> sums = {};  // tainted samples, rewritten tokens
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Trajectory& t = batch.trajectories[i];
    sums[0] += batch.is_tainted(i);
    for (std::size_t p = 0; p < t.tokens.size(); ++p) {
      sums[1] += t.response_mask[p] != 0 && t.rewritten(p);
    }
  }
  comm.sum(sums);
  metrics["fp4/guide/tainted_samples"] = sums[0];
  if (sums[1] > 0) metrics["fp4/guide/rewritten_tokens"] = sums[1];
  return metrics;
}

}  // namespace lockstep::rl
