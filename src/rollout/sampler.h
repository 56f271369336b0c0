/// Tokens from logits. A draw follows from (seed, prompt, sample, position) and the row of logits
/// alone: what else is in the batch, the instruction set and the number of threads change no bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/id.h"
#include "record/trajectory.h"

namespace lockstep::rollout {

/// Names a random number: that of the token at `position`.
struct Draw {
  std::uint64_t seed = 0;
  PromptId prompt;
  std::int32_t sample = 0;
  std::int32_t position = 0;
};

/// The third number of a draw's counter: what sets draws of tokens apart from other uses of a seed,
/// and samples from each other.
std::uint32_t draw_counter(std::int32_t sample);

struct Choice {
  Token token = 0;
  float logp = 0.0f;  // of softmax(logits / temperature) over the whole vocabulary
};

/// Throws Error naming the first field that is out of range. top_logprobs with top-p or top-k is
/// refused: what a filter leaves out has no log-prob. `recorded`: the tokens are for
/// training, where top-p and top-k are refused, for the trainer's log-probs know nothing of them.
void check_sampling(const Sampling& sampling, bool recorded);

/// softmax(logits / temperature) of one row, from which any number of tokens are drawn: the samples
/// of a prompt share it. Keeps a view of the logits.
class Distribution {
 public:
  Distribution(std::span<const float> logits, float temperature);

  /// The smallest token whose cumulative probability exceeds the draw's number in [0, 1); among the
  /// top-p / top-k tokens, in falling order of probability, where those are asked for.
  Choice sample(const Sampling& sampling, const Draw& draw) const;

  /// log softmax(logits / temperature)[token], rounded once to FP32.
  float logp(Token token) const;

  /// The tokens.size() likeliest tokens, in falling order, of equal ones the lower first, and their
  /// log-probs, as logp() gives them.
  void top(std::span<Token> tokens, std::span<float> logps) const;

 private:
  Token inverse(double u) const;
  Token inverse_among_top(const Sampling& sampling, double u) const;
  double probability(Token token) const;  // not yet divided by total_

  std::span<const float> logits_;
  float temperature_;
  float max_ = 0.0f;          // of logits / temperature
  std::vector<double> sums_;  // of exp(logits / temperature - max), of each block of 128
  double total_ = 0.0;
};

}  // namespace lockstep::rollout
