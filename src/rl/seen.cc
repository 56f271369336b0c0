#include "rl/seen.h"

#include <cmath>

namespace lockstep::rl {
namespace {

/// The weights under the names that verl's users plot; none where nothing weighs tokens.
void put_weights(const Options& options, const Seen& all, Metrics& m) {
  const double n = all.sums[Seen::kWeighed];
  if (options.correction == Correction::kNone || n == 0) return;
  const std::string name = "rollout_corr/rollout_is_";
  const double mean = all.sums[Seen::kWeight] / n, square = all.sums[Seen::kWeight2] / n;
  m[name + "mean"] = mean;
  m[name + "std"] = std::sqrt(std::max(0.0, square - mean * mean));
  m[name + "max"] = all.heaviest;
  m[name + "min"] = all.lightest;
  if (square > 0) m[name + "eff_sample_size"] = mean * mean / square;
  m[name + "ratio_fraction_high"] = all.sums[Seen::kHigh] / n;
  m[name + "ratio_fraction_low"] = all.sums[Seen::kLow] / n;
  m[name + "oob_ratio"] = all.sums[Seen::kCut] / n;
  if (options.correction_batch_norm) m[name + "batch_norm_factor"] = all.norm / all.updates;
}

}  // namespace

Metrics Seen::metrics(const Options& options, Comm& comm) const {
  Seen all = *this;
  comm.sum(all.sums);
  std::array<double, 2> most = {heaviest, -lightest};
  comm.max(most);
  all.heaviest = most[0];
  all.lightest = -most[1];

  const auto& s = all.sums;
  const double tokens = std::max(s[kTokens], 1.0);
  const double judged = std::max(s[kWeighed] + s[kRejected], 1.0);
  const double sequences = std::max(s[kSequences], 1.0);
  const double times = std::max(updates, 1.0);
  Metrics m = {{"actor/pg_loss", s[kLoss] / times},
               {"actor/pg_clipfrac", (s[kClippedHigh] + s[kClippedLow]) / tokens},
               {"actor/pg_clipfrac_lower", s[kClippedLow] / tokens},
               {"actor/ppo_kl", -s[kLogRatio] / tokens},
               {"actor/masked_tokens", s[kMasked]},
               {"actor/unknown_logprob_tokens", s[kUnknown]},
               {"rollout_corr/rollout_rs_masked_fraction", s[kRejected] / judged},
               {"rollout_corr/rollout_rs_seq_masked_fraction",
                (s[kRejectedSequences] + s[kDropped]) / sequences}};
  if (options.correction == Correction::kAis) m["rollout_corr/ais_lambda"] = lambda / times;
  if (options.kl_weight != 0) m["actor/kl_loss"] = s[kKl] / tokens;
  put_weights(options, all, m);
  return m;
}

}  // namespace lockstep::rl
