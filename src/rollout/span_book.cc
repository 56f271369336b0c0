#include "rollout/span_book.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::rollout {

void SpanBook::admit(const Trajectory& t, std::int32_t samples) {
  if (!records()) return;
  for (std::int32_t i = 0; i < samples; ++i) {
    if (!under_way_.contains({t.prompt, t.sample + i})) continue;
    throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample + i,
                     " is under way already: give each prompt a number of its own"}));
  }
  for (std::int32_t i = 0; i < samples; ++i) under_way_.insert({t.prompt, t.sample + i});
}

Span SpanBook::next(const Sequence& s, std::int32_t sample, WeightVersion version) const {
  std::int32_t first = 0;
  for (const Span& span : s.trajectory.path) first += span.count;
  std::vector<Span> known = s.earlier;
  known.insert(known.end(), s.trajectory.path.begin(), s.trajectory.path.end());
  const std::span<const Token> tokens(s.trajectory.tokens);
  return {.id = span_id(rank_, s.trajectory.prompt, sample, next_turn(known, s.trajectory, sample)),
          .first = first,
          .version = version,
          .prefix_hash = hash_tokens(tokens.first(static_cast<std::size_t>(first)))};
}

std::vector<std::uint64_t> SpanBook::tags(const Sequence& s, std::int32_t end) const {
  std::vector<std::uint64_t> tags(static_cast<std::size_t>(end), 0);
  if (!records() && !drifts_) return tags;
  for (std::int32_t p = 0; p < end; ++p) tags[static_cast<std::size_t>(p)] = s.span_at(p).value;
  return tags;
}

void SpanBook::open(std::span<const Chunk> chunks) {
  for (const Chunk& chunk : chunks) {
    Sequence& s = *chunk.sequence;
    if (s.opened || chunk.first + chunk.count <= s.recorded) continue;
    s.opened = true;
    if (records()) sink_->open(*s.span, contract_);
  }
}

void SpanBook::cut(const Sequence& s) const noexcept {
  try {
    if (records() && s.opened) sink_->truncate(s.span->id, s.fed);
  } catch (...) {
  }
}

void SpanBook::end(Sequence& s) {
  if (!s.span) return;
  s.span->count = s.fed - s.span->first;
  if (s.span->count > 0) {
    Capture::Held rows = {*s.span, {}};
    for (const Page page : s.pages) rows.pages.push_back(cache_->bytes(page));
    ended_.push_back(std::move(rows));
    s.trajectory.path.push_back(*s.span);
    s.recorded = s.fed;
  } else if (records() && s.opened) {
    sink_->seal(s.span->id);  // of a pass that failed; it was cut off then
  }
  s.span.reset();
  s.opened = false;
}

void SpanBook::give_up(const Sequence& s) const {
  if (!records() || !s.opened) return;
  try {
    sink_->truncate(s.span->id, s.span->first);
  } catch (...) {
    sink_->seal(s.span->id);
    throw;
  }
  sink_->seal(s.span->id);
}

void SpanBook::close() { capture_->close(std::exchange(ended_, {}), *cache_); }

}  // namespace lockstep::rollout
