#include "rl/correction.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "rl/ratio.h"

namespace lockstep::rl {
namespace {

bool outside(double value, float low, float high) {
  return (low > 0 && value < low) || (high > 0 && value > high);
}

/// What the rules see of one response: sums over its usable tokens.
struct Response {
  double tokens = 0, log_rho = 0, k3 = 0, least = 1e300;
};

/// rho of each response token and which of them are usable; counts those that are not.
Response read(const Options& options, const Batch& batch, std::size_t i, TokenWeights& out) {
  const Trajectory& t = batch.trajectories[i];
  Response response;
  out.weight[i].assign(t.tokens.size(), 0.0f);
  out.rho[i].assign(t.tokens.size(), 1.0f);
  for (std::size_t p = 0; p < t.tokens.size(); ++p) {
    if (t.response_mask[p] == 0) continue;
    // An engine that gives no number for a token says nothing about its ratio: it stays 1.
    const bool unknown = std::isnan(t.rollout_logp[p]);
    const bool old_unknown = unknown && options.bypass;  // the rollout's stands for the old one
    // A token that a filter on the other side had ruled out has no ratio.
    if (batch.leaves(options, i) || t.rewritten(p) || std::isinf(t.rollout_logp[p]) ||
        (!std::isfinite(batch.old_logp[i][p]) && !old_unknown)) {
      ++out.seen.sums[Seen::kMasked];
      continue;
    }
    out.weight[i][p] = 1;
    if (unknown) {
      ++out.seen.sums[Seen::kUnknown];
      continue;
    }
    const double log_rho = log_ratio(batch.old_logp[i][p], t.rollout_logp[p]);
    const double rho = std::exp(log_rho);
    out.rho[i][p] = static_cast<float>(rho);
    response.tokens += 1;
    response.log_rho += log_rho;
    response.k3 += rho - 1 - log_rho;
    response.least = std::min(response.least, rho);
  }
  return response;
}

bool rejects(const Rejection& rules, const Response& r) {
  if (r.tokens == 0) return false;
  const double product = std::exp(std::clamp(r.log_rho, -kMaxLogRatio, kMaxLogRatio));
  return outside(product, rules.seq_low, rules.seq_high) ||
         outside(std::exp(r.log_rho / r.tokens), rules.geo_low, rules.geo_high) ||
         (rules.k3 > 0 && r.k3 / r.tokens > rules.k3) || (rules.veto > 0 && r.least < rules.veto);
}

double corrected(const Options& options, double rho, double product) {
  const double low = options.correction_floor, cap = options.correction_cap;
  switch (options.correction) {
    case Correction::kNone: return 1;
    case Correction::kTis:
    case Correction::kAis: return std::min(rho, cap);
    case Correction::kCis: return std::clamp(rho, low, cap);
    case Correction::kIcePop: return rho < low || rho > cap ? 0 : rho;
    case Correction::kSeqTis: return std::min(product, cap);
  }
  return 1;
}

/// Counts a token that keeps its weight by its ratio: on which side of the bounds it lies.
void count(const Options& options, double ratio, double weight, Seen& seen) {
  const double cap = options.correction_cap, floor = options.correction_floor;
  const bool floored =
      options.correction == Correction::kCis || options.correction == Correction::kIcePop;
  const bool high = ratio > cap, low = ratio < (floored ? floor : 1 / cap);
  seen.sums[Seen::kWeighed] += 1;
  seen.sums[Seen::kHigh] += high;
  seen.sums[Seen::kLow] += low;
  seen.sums[Seen::kCut] += high || (floored && low);
  if (weight == 0) seen.lightest = 0;  // the sums over weights pass it over
}

void weigh(const Options& options, const Response& response, std::size_t i, TokenWeights& out) {
  const double product = std::exp(std::clamp(response.log_rho, -kMaxLogRatio, kMaxLogRatio));
  const bool whole = rejects(options.reject, response);
  out.seen.sums[Seen::kRejectedSequences] += whole;
  for (std::size_t p = 0; p < out.weight[i].size(); ++p) {
    if (out.weight[i][p] == 0) continue;
    const double rho = out.rho[i][p];
    const bool gone = whole || outside(rho, options.reject.token_low, options.reject.token_high);
    const double weight = gone ? 0 : corrected(options, rho, product);
    out.weight[i][p] = static_cast<float>(weight);
    if (gone) {
      out.seen.sums[Seen::kRejected] += 1;
    } else {
      count(options, options.correction == Correction::kSeqTis ? product : rho, weight, out.seen);
    }
  }
}

template <typename F>
void each_usable(const TokenWeights& weights, F&& visit) {
  for (std::size_t i = 0; i < weights.weight.size(); ++i) {
    for (std::size_t p = 0; p < weights.weight[i].size(); ++p) {
      if (weights.weight[i][p] != 0) visit(i, p);
    }
  }
}

void mix(const Options& options, TokenWeights& out, Comm& comm) {
  std::array<double, 4> sums = {};  // tokens, w, w^2, k3
  each_usable(out, [&](std::size_t i, std::size_t p) {
    const double w = out.weight[i][p], rho = out.rho[i][p];
    sums[0] += 1, sums[1] += w, sums[2] += w * w, sums[3] += rho - 1 - std::log(rho);
  });
  comm.sum(sums);
  if (sums[0] == 0) return;
  const double mean = sums[1] / sums[0], square = sums[2] / sums[0];
  const double lambda =
      ais_lambda(options, mean * mean / square, sums[3] / sums[0], square - mean * mean);
  out.seen.lambda = lambda;
  each_usable(out, [&](std::size_t i, std::size_t p) {
    float& w = out.weight[i][p];
    w = static_cast<float>(1 + lambda * (w - 1.0));
  });
}

void normalize(TokenWeights& out, Comm& comm) {
  std::array<double, 2> sums = {};
  each_usable(out,
              [&](std::size_t i, std::size_t p) { sums[0] += 1, sums[1] += out.weight[i][p]; });
  comm.sum(sums);
  if (sums[1] == 0) return;
  const double mean = sums[1] / sums[0];
  out.seen.norm = mean;
  each_usable(out, [&](std::size_t i, std::size_t p) {
    out.weight[i][p] = static_cast<float>(out.weight[i][p] / mean);
  });
}

/// The weights as the loss will find them.
void add_up(TokenWeights& out) {
  Seen& seen = out.seen;
  each_usable(out, [&](std::size_t i, std::size_t p) {
    const double w = out.weight[i][p];
    seen.sums[Seen::kWeight] += w;
    seen.sums[Seen::kWeight2] += w * w;
    seen.heaviest = std::max(seen.heaviest, w);
    seen.lightest = std::min(seen.lightest, w);
  });
}

}  // namespace

double ais_lambda(const Options& options, double ess_over_n, double k3, double variance) {
  return std::clamp(options.ais_ess * (1 - ess_over_n) + options.ais_k3 * k3 / options.ais_k3_unit +
                        options.ais_variance * variance / options.ais_variance_unit,
                    0.0, 1.0);
}

TokenWeights token_weights(const Options& options, const Batch& batch, Comm& comm) {
  TokenWeights out;
  out.weight.resize(batch.size());
  out.rho.resize(batch.size());
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (batch.old_logp[i].empty()) continue;
    weigh(options, read(options, batch, i, out), i, out);
  }
  if (options.correction == Correction::kAis) mix(options, out, comm);
  if (options.correction_batch_norm) normalize(out, comm);
  add_up(out);
  return out;
}

}  // namespace lockstep::rl
