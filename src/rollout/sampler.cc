#include "rollout/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/philox.h"
#include "base/text.h"
#include "rollout/softmax.h"

namespace lockstep::rollout {
namespace {

double uniform(const Draw& draw) {
  const PhiloxWords words =
      philox(draw.seed,
             philox_counter(static_cast<std::uint64_t>(draw.prompt.value),
                            static_cast<std::uint32_t>(draw.position), draw_counter(draw.sample)));
  return unit(words[0], words[1]);
}

}  // namespace

std::uint32_t draw_counter(std::int32_t sample) {
  return static_cast<std::uint32_t>(sample) | 0x80000000u;
}

void check_sampling(const Sampling& sampling, bool recorded) {
  if (!(sampling.temperature > 0.0f) || !std::isfinite(sampling.temperature)) {
    throw Error(cat({"temperature is ", sampling.temperature,
                     ", not a positive number; for greedy evaluation set top_k = 1"}));
  }
  if (!(sampling.top_p > 0.0f && sampling.top_p <= 1.0f)) {
    throw Error(cat({"top_p is ", sampling.top_p, ", not in (0, 1]"}));
  }
  if (sampling.top_k < 0) throw Error(cat({"top_k is ", sampling.top_k, "; 0 means all"}));
  if (sampling.max_new_tokens < 1) {
    throw Error(cat({"max_new_tokens is ", sampling.max_new_tokens, ", not at least 1"}));
  }
  if (sampling.top_logprobs < 0) {
    throw Error(cat({"top_logprobs is ", sampling.top_logprobs, "; 0 means none"}));
  }
  if (sampling.top_logprobs > 0 && (sampling.top_p < 1.0f || sampling.top_k > 0)) {
    throw Error(cat({"top_logprobs is ", sampling.top_logprobs, " with top_p = ", sampling.top_p,
                     " and top_k = ", sampling.top_k,
                     ": log-probs are of all tokens, so those must be 1 and 0"}));
  }
  if (recorded && (sampling.top_p < 1.0f || sampling.top_k > 0)) {
    throw Error(cat({"top_p = ", sampling.top_p, " and top_k = ", sampling.top_k,
                     " are for evaluation: while a trace is recorded for training they must be 1 "
                     "and 0"}));
  }
}

Distribution::Distribution(std::span<const float> logits, float temperature)
    : logits_(logits), temperature_(temperature) {
  const SoftmaxOps& ops = softmax_ops();
  // Division by a positive number keeps the order, so the maximum is that of the quotients.
  max_ = ops.max(logits.data(), static_cast<std::int64_t>(logits.size())) / temperature;
  sums_.reserve(logits.size() / kSoftmaxBlock + 1);
  alignas(64) std::array<float, kSoftmaxBlock> exps;
  for (std::size_t first = 0; first < logits.size(); first += kSoftmaxBlock) {
    const auto count = std::min<std::size_t>(kSoftmaxBlock, logits.size() - first);
    sums_.push_back(
        ops.exp(&logits[first], static_cast<std::int64_t>(count), temperature, max_, exps.data()));
    total_ += sums_.back();
  }
}

Choice Distribution::sample(const Sampling& sampling, const Draw& draw) const {
  const bool all = sampling.top_p >= 1.0f && sampling.top_k == 0;
  const double u = uniform(draw);
  const Token token = all ? inverse(u) : inverse_among_top(sampling, u);
  return {token, logp(token)};
}

float Distribution::logp(Token token) const {
  const float z = logits_[static_cast<std::size_t>(token)] / temperature_;
  return static_cast<float>(static_cast<double>(z) - static_cast<double>(max_) - std::log(total_));
}

void Distribution::top(std::span<Token> tokens, std::span<float> logps) const {
  const auto likelier = [this](Token a, Token b) {
    const float x = logits_[static_cast<std::size_t>(a)];
    const float y = logits_[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  // A heap of the best so far, the least likely on top: most tokens are compared with that alone.
  std::iota(tokens.begin(), tokens.end(), Token{0});
  std::make_heap(tokens.begin(), tokens.end(), likelier);
  float least = tokens.empty() ? 0.0f : logits_[static_cast<std::size_t>(tokens.front())];
  for (std::size_t i = tokens.size(); !tokens.empty() && i < logits_.size(); ++i) {
    if (!(logits_[i] > least)) continue;  // of equal ones the earlier stays
    std::pop_heap(tokens.begin(), tokens.end(), likelier);
    tokens.back() = static_cast<Token>(i);
    std::push_heap(tokens.begin(), tokens.end(), likelier);
    least = logits_[static_cast<std::size_t>(tokens.front())];
  }
  std::sort_heap(tokens.begin(), tokens.end(), likelier);
  const double log_total = std::log(total_);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const float z = logits_[static_cast<std::size_t>(tokens[i])] / temperature_;
    logps[i] = static_cast<float>(static_cast<double>(z) - static_cast<double>(max_) - log_total);
  }
}

Token Distribution::inverse(double u) const {
  const double target = u * total_;
  double below = 0.0;
  std::size_t block = 0;
  std::size_t last = 0;  // the last block that has any probability
  for (; block < sums_.size() && !(below + sums_[block] > target); ++block) {
    below += sums_[block];
    if (sums_[block] > 0.0) last = block;
  }
  if (block == sums_.size()) block = last;

  alignas(64) std::array<float, kSoftmaxBlock> exps;
  const std::size_t first = block * kSoftmaxBlock;
  const auto count = std::min<std::size_t>(kSoftmaxBlock, logits_.size() - first);
  softmax_ops().exp(&logits_[first], static_cast<std::int64_t>(count), temperature_, max_,
                    exps.data());
  // Summed one by one the block may end a rounding error short: its last possible token then.
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (exps[i] == 0.0f) continue;
    chosen = i;
    below += static_cast<double>(exps[i]);
    if (below > target) break;
  }
  return static_cast<Token>(first + chosen);
}

double Distribution::probability(Token token) const {
  alignas(64) std::array<float, kSoftmaxBlock> exps;
  softmax_ops().exp(&logits_[static_cast<std::size_t>(token)], 1, temperature_, max_, exps.data());
  return static_cast<double>(exps[0]);
}

Token Distribution::inverse_among_top(const Sampling& sampling, double u) const {
  std::vector<Token> order(logits_.size());
  std::iota(order.begin(), order.end(), Token{0});
  const auto likelier = [this](Token a, Token b) {
    const float x = logits_[static_cast<std::size_t>(a)];
    const float y = logits_[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  const std::size_t most =
      sampling.top_k > 0
          ? std::min<std::size_t>(order.size(), static_cast<std::size_t>(sampling.top_k))
          : order.size();
  // The kept set: sorted piece by piece, for it is short next to the vocabulary. top_p is a share
  // of what top_k leaves.
  std::size_t sorted = 0;
  std::vector<double> kept;
  double sum = 0.0;
  double share = total_;
  const auto sort_to = [&](std::size_t end) {
    std::partial_sort(order.begin() + static_cast<std::ptrdiff_t>(sorted),
                      order.begin() + static_cast<std::ptrdiff_t>(end), order.end(), likelier);
    sorted = end;
  };
  if (sampling.top_k > 0) {
    sort_to(most);
    share = 0.0;
    for (std::size_t i = 0; i < most; ++i) share += probability(order[i]);
  }
  while (kept.size() < most &&
         (kept.empty() || sum < static_cast<double>(sampling.top_p) * share)) {
    if (kept.size() == sorted) sort_to(std::min(most, std::max<std::size_t>(64, sorted * 8)));
    kept.push_back(probability(order[kept.size()]));
    sum += kept.back();
  }
  double below = 0.0;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    below += kept[i];
    if (below > u * sum) return order[i];
  }
  return order[kept.size() - 1];
}

}  // namespace lockstep::rollout
