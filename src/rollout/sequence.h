#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "record/trajectory.h"
#include "rollout/kv_cache.h"

namespace lockstep::rollout {

/// Who comes first when tokens or pages are short: earlier requests, then lower samples.
struct Order {
  std::int64_t request = 0;
  std::int32_t place = 0;  // of sample i: 2 i + 1; of the prompt before it: 2 i
  friend constexpr auto operator<=>(const Order&, const Order&) = default;
};

/// What the samples of one request hold together.
struct Group {
  std::int64_t shared_pages = 0;  // reserved for the full pages of the prompt
  std::int32_t members = 0;       // sequences that live
  // The path once the prompt is read; those of its samples that had to wait begin there.
  std::shared_ptr<std::vector<Span>> prompt_path = std::make_shared<std::vector<Span>>();
};

/// Tokens on their way through the model: a prompt, one of the samples that began at its end, or a
/// given trajectory that is scored.
struct Sequence {
  enum class Kind : std::uint8_t { kPrompt, kSample, kScored };

  Kind kind = Kind::kPrompt;
  Order order;
  Trajectory trajectory{};      // path: the spans that are finished, and their samples' none
  std::vector<Span> earlier{};  // the path with which the request came
  std::uint64_t seed = 0;
  std::int32_t forks = 0;      // of a prompt: how many samples begin at its end
  std::int32_t prompt = 0;     // tokens that were given
  std::int32_t limit = 0;      // tokens at which the context or the budget ends
  std::int32_t fed = 0;        // positions whose K and V are in the cache
  std::int32_t recorded = 0;   // positions before this one have their records already
  std::optional<Span> span{};  // under way; count is set when it is finished
  bool opened = false;         // the sink knows of it
  std::vector<Page> pages{};   // by position
  bool parked = false;         // its pages may be in host memory
  std::int64_t reserved_pages = 0;
  std::shared_ptr<Group> group{};

  std::int32_t size() const { return static_cast<std::int32_t>(trajectory.tokens.size()); }

  /// Positions that are fed before the next token is sampled, or scoring ends.
  std::int32_t target() const { return kind == Kind::kScored ? size() - 1 : size(); }
  std::int32_t remaining() const { return target() - fed; }
  bool decodes() const { return kind == Kind::kSample; }

  /// Most positions that it will ever feed: the last token never is.
  std::int32_t most_fed() const { return kind == Kind::kPrompt ? prompt : limit - 1; }

  /// Is the logits row of that position wanted?
  bool wants(std::int32_t position) const {
    if (kind != Kind::kScored) return position == size() - 1;
    return trajectory.response_mask[static_cast<std::size_t>(position) + 1] != 0;
  }

  /// The span that has the records of a position: one of the path, or the one under way.
  SpanId span_at(std::int32_t position) const {
    if (span && position >= span->first) return span->id;
    for (auto it = trajectory.path.rbegin(); it != trajectory.path.rend(); ++it) {
      if (position >= it->first && position < it->first + it->count) return it->id;
    }
    return {};
  }
};

/// The turn after those that `path` has of that sample. Throws Error beyond the last.
std::int32_t next_turn(const std::vector<Span>& path, const Trajectory& of, std::int32_t sample);

}  // namespace lockstep::rollout
