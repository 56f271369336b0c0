#include "rl/surrogate.h"

#include <algorithm>
#include <cmath>

#include "rl/ratio.h"

namespace lockstep::rl {
namespace {

/// d exp(log_r) = r d logp, but for the clamp of the log-ratio, beyond which nothing moves.
double moving(double slope, double log_r) { return std::abs(log_r) < kMaxLogRatio ? slope : 0; }

Term ppo(const Options& options, double log_r, double w, double upper) {
  const double r = std::exp(log_r);
  const double clipped = std::clamp(r, 1.0 - options.clip_low, upper);
  if (options.dual_clip > 0 && w < 0 && -r * w > -options.dual_clip * w) {
    return {-options.dual_clip * w, 0, true};
  }
  if (-r * w >= -clipped * w) return {-r * w, moving(-r * w, log_r), false};
  return {-clipped * w, 0, true};
}

}  // namespace

Term surrogate(const Options& options, double log_r, double w, float logp, double rho) {
  const double upper = 1.0 + options.clip_high;
  switch (options.surrogate) {
    case Surrogate::kPpo:
    case Surrogate::kGspo: return ppo(options, log_r, w, upper);
    case Surrogate::kCispo: {
      const double r = std::exp(log_r);
      const double clipped = std::clamp(r, 1.0 - options.clip_low, upper);
      return {-clipped * w * logp, -clipped * w, clipped != r};
    }
    case Surrogate::kTbpo: {
      if (w >= 0) return ppo(options, log_r, w, upper);
      const double r = std::exp(log_r);
      if (r < 1.0 - options.clip_low || r > upper) return {0, 0, true};
      return {-r * w, moving(-r * w, log_r), false};
    }
    case Surrogate::kAcr: {
      const double truncated = std::min(1.0, options.correction_cap / rho);
      return ppo(options, log_r, w, upper / truncated);
    }
    case Surrogate::kScoreCentering: break;  // centered_score()
  }
  return {};
}

Term centered_score(double cap, double w, float logp, float rollout_logp, const TopTokens& top,
                    std::span<float> dtop) {
  if (std::isnan(rollout_logp)) return {-w * logp, -w, false};
  const double rho = ratio(logp, rollout_logp);
  const double weight = std::min(rho, cap);
  Term term = {-w * weight * logp, -w * weight, rho > cap};
  double p_tail = 1, q_tail = 1;
  for (std::size_t v = 0; v < top.trainer.size(); ++v) {
    p_tail -= std::exp(static_cast<double>(top.trainer[v]));
    q_tail -= std::exp(static_cast<double>(top.rollout[v]));
  }
  // Without a tail on the trainer's side, but for rounding, the head's scores sum to nothing.
  const double alpha = p_tail > 1e-6 ? std::min(1.0, cap * std::max(q_tail, 0.0) / p_tail) : 1.0;
  for (std::size_t v = 0; v < top.trainer.size(); ++v) {
    const double log_p = top.trainer[v];
    const double p = std::exp(log_p), q = std::exp(static_cast<double>(top.rollout[v]));
    const double c = std::min(p, cap * q) - alpha * p;
    term.value += w * c * log_p;
    dtop[v] = static_cast<float>(w * c);
  }
  return term;
}

Term kl_penalty(const Options& options, double x, double log_roll) {
  Term term;
  const double k3 = std::exp(-x) - 1 + x;
  switch (options.kl) {
    case Kl::kK1: term = {x, 1}; break;
    case Kl::kK2: term = {x * x / 2, x}; break;
    case Kl::kK3: term = {k3, 1 - std::exp(-x)}; break;
    case Kl::kK3Plus: term = {k3, x}; break;
  }
  if (options.kl_off_policy) {
    const double ratio = std::exp(std::clamp(log_roll, -kMaxLogRatio, kMaxLogRatio));
    term = {ratio * term.value, moving(ratio * term.value, log_roll) + ratio * term.slope};
  }
  return term;
}

}  // namespace lockstep::rl
