/// What a rollout leaves behind: the words that engine, store, trainer and losses share.
///
/// A *record* is one row of one token at one place. A *trace* is all records of a trajectory.
/// Positions: logp[t] belongs to tokens[t] and came out of the pass that read tokens[t - 1]; the
/// record at position t was written by the pass that read tokens[t]. The last token was never
/// read by any pass, so a trajectory of T tokens has records at 0..T-2.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/id.h"

namespace lockstep {

/// The name of a span follows from what it holds, so that a resumed run names it alike. `sample` is
/// -1 for the prompt that all samples share; `turn` counts the spans of a sample.
constexpr SpanId span_id(int rank, PromptId prompt, int sample, int turn) {
  return SpanId{static_cast<std::uint64_t>(rank & 0xffff) << 48 |
                static_cast<std::uint64_t>(prompt.value & 0xfffffff) << 20 |
                static_cast<std::uint64_t>((sample + 1) & 0x3fff) << 6 |
                static_cast<std::uint64_t>(turn & 0x3f)};
}

/// Consecutive positions computed once, under one weight version, and owned by nobody: every
/// trajectory whose path holds the span reads its records. A prompt is one span that its G
/// samples share; each response is a span; a new turn or a weight update begins another. So a
/// record needs no version or contract of its own: its span has them.
struct Span {
  SpanId id;
  std::int32_t first = 0;  // the position of its first token
  std::int32_t count = 0;
  WeightVersion version{};
  std::uint64_t prefix_hash = 0;  // of tokens 0..first-1, on which the records depend
};

/// Names a token's records wherever they are: in a decode batch, a segment, a packed micro-batch.
struct TokenKey {
  SpanId span;
  std::int32_t position = 0;
  friend constexpr auto operator<=>(const TokenKey&, const TokenKey&) = default;
};

struct Sampling {
  float temperature = 1.0f;  // log-probs are of softmax(logits / temperature), on both sides
  float top_p = 1.0f;
  std::int32_t top_k = 0;  // 0: all
  std::int32_t max_new_tokens = 1024;
  std::int32_t top_logprobs = 0;  // k: the likeliest tokens of every draw are kept with it; 0: none
};

enum class Finish : std::uint8_t { kNone, kStop, kLength, kAborted };

struct Trajectory {
  PromptId prompt;
  std::int32_t sample = 0;                    // 0..G-1
  std::vector<Token> tokens;                  // [T] prompt, then response; later turns likewise
  std::vector<std::uint8_t> response_mask{};  // [T] 1 where the policy chose the token
  std::vector<float> rollout_logp{};          // [T] 0 where it did not
  std::vector<Span> path{};                   // covers 0..T-2 in order, without gaps
  Sampling sampling{};
  Finish finish = Finish::kNone;
  // A foreign engine went on from here after it had computed all positions before again: what it
  // sampled before came from K, V and records that are no more. -1: it did not.
  std::int32_t rewritten_from = -1;
  bool rewritten(std::size_t position) const { return std::cmp_less(position, rewritten_from); }

  // [T, k] the k likeliest tokens at each draw, in falling order, and the rollout's log-probs of
  // them; 0 where response_mask is 0. Empty: the engine was not asked.
  std::vector<Token> top_tokens{};
  std::vector<float> top_logp{};
  std::size_t top_count() const { return tokens.empty() ? 0 : top_tokens.size() / tokens.size(); }
};

/// Log-probs of a trajectory's own tokens, [T], as a span; and beside them those of its top tokens.
struct LogProbs : std::span<const float> {
  using std::span<const float>::span;
  LogProbs(std::span<const float> own, std::span<const float> top = {})
      : std::span<const float>(own), top(top) {}
  std::span<const float> top{};  // [T, k] of Trajectory::top_tokens; empty where there are none
};

/// What a loss writes: its derivative by each of them.
struct Slopes : std::span<float> {
  using std::span<float>::span;
  Slopes(std::span<float> own, std::span<float> top = {}) : std::span<float>(own), top(top) {}
  std::span<float> top{};  // [T, k]
};

/// One number a token: values[trajectory][position], 0 where response_mask is 0.
using PerToken = std::vector<std::vector<float>>;

/// Is this token's record kept in full beside the rest? One in `every` is, alike on both sides;
/// 0: none (docs/formats/record.md).
bool audited(std::uint64_t seed, TokenKey key, std::int32_t every);

/// What Span::prefix_hash holds of the tokens before the span: 64-bit FNV-1a over their bytes,
/// little-endian, four a token. `before` is that of the tokens in front of these.
std::uint64_t hash_tokens(std::span<const Token> tokens, std::uint64_t before = 0xcbf29ce484222325);

/// The keys of positions 0..T-2.
std::vector<TokenKey> keys(const Trajectory& trajectory);

}  // namespace lockstep
