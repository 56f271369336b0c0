#include "rollout/engine.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "base/timer.h"
#include "rollout/engine_impl.h"
#include "rollout/request.h"

namespace lockstep::rollout {
namespace {

const Agreement& checked(const Agreement& agreement, const Options& options, Device device,
                         const TraceSink* trace) {
  if (const std::string why = why_unusable(device); !why.empty()) {
    throw Error(cat({"device = \"cuda\": ", why}));
  }
  check_options(options);
  if (trace != nullptr) check_guide(agreement);
  return agreement;
}

}  // namespace

Engine::Impl::Impl(const Agreement& a, const Options& o, Device device, TraceSink* sink, Comm& comm)
    : agreement(checked(a, o, device, sink)),
      options(o),
      trace(sink),
      stream(device),
      at{device, stream},
      forward(agreement, options, device, stream),
      cache(agreement, options, device, stream),
      capture(agreement, sink, options.record_bf16, device, stream),
      spans(agreement, options, sink, comm.rank(), cache, capture),
      draws(at),
      scheduler(agreement, options, cache, sink, [this](Sequence& s) { begin(s); }),
      weights(*this) {}

/// Makes a sequence ready for its first position: its path under the present weights, and what the
/// cache still has of it.
void Engine::Impl::begin(Sequence& s) {
  Trajectory& t = s.trajectory;
  const bool scored = s.kind == Sequence::Kind::kScored;
  t.path = scored ? std::vector<Span>{} : s.earlier;
  const bool current = std::all_of(t.path.begin(), t.path.end(),
                                   [&](const Span& span) { return span.version == version; });
  if (!current) {
    // K and V of older weights are gone and are not computed again as they were. All is read and
    // recorded anew; tokens that were sampled from the old ones are no longer the policy's.
    t.path.clear();
    for (std::uint8_t& mask : t.response_mask) {
      counts.rewritten_tokens += mask;
      mask = 0;
    }
    std::fill(t.rollout_logp.begin(), t.rollout_logp.end(), 0.0f);
    std::fill(t.top_tokens.begin(), t.top_tokens.end(), Token{0});
    std::fill(t.top_logp.begin(), t.top_logp.end(), 0.0f);
  }
  s.recorded = 0;
  for (const Span& span : t.path) s.recorded += span.count;
  s.span.reset();
  s.opened = false;
  const bool first_reading = s.earlier.empty() && !scored;
  if (s.recorded < s.target()) s.span = spans.next(s, first_reading ? -1 : t.sample, version);
  if (scored || !options.reuse_prefixes) return;
  // At least the last token is read, for its logits. While records are kept, what is recalled must
  // have its own: it lies on the path.
  const std::int32_t most = std::min(trace != nullptr ? s.recorded : s.size(), s.size() - 1);
  s.pages =
      cache.recall(std::span(t.tokens).first(static_cast<std::size_t>(most)), spans.tags(s, most));
  s.fed = static_cast<std::int32_t>(s.pages.size()) * cache.page_tokens();
  counts.recalled_tokens += s.fed;
}

// One pass.

Pass Engine::Impl::build(const std::vector<Chunk>& chunks, std::vector<Wanted>& wanted) {
  Pass pass;
  bool all_fresh = true;
  std::size_t choices = 0, top = 0;
  tables.resize(std::max(tables.size(), chunks.size()));
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Sequence& s = *chunks[i].sequence;
    tables[i].clear();
    for (const Page page : s.pages) tables[i].push_back(cache.frame(page));
    pass.pages.push_back(tables[i]);
    for (std::int32_t p = chunks[i].first; p < chunks[i].first + chunks[i].count; ++p) {
      if (s.wants(p)) {
        wanted.push_back({&s, p, choices, top});
        top += wanted.back().top();
        pass.wanted.push_back(static_cast<std::int32_t>(pass.rows()));
        choices += static_cast<std::size_t>(std::max(s.forks, 1));
      }
      pass.tokens.push_back(s.trajectory.tokens[static_cast<std::size_t>(p)]);
      pass.positions.push_back(p);
      pass.keys.push_back({s.span_at(p), p});
      pass.sequence.push_back(static_cast<std::int32_t>(i));
      pass.fresh.push_back(p >= s.recorded ? 1 : 0);
      all_fresh &= p >= s.recorded;
    }
  }
  if (all_fresh) pass.fresh.clear();
  const bool decodes = pass.wanted.size() == pass.tokens.size() && chunks.size() == wanted.size();
  // A choice for the batch would see the rows that fill it up.
  if (decodes && fills_up) fill_up(pass, spare);
  return pass;
}

/// Gives the pass and the draws from it to the device, hands on what the pass before left while
/// they run, and waits. What ends spans has its records in the sink when this returns.
Drawn Engine::Impl::compute(const std::vector<Chunk>& chunks, const Pass& pass,
                            const std::vector<Wanted>& wanted) {
  const TensorView<const float, 2> logits = forward.run(pass, cache.layers(), capture);
  draws.launch(wanted, logits);
  hand_over();
  capture.send();
  forward.finish();
  Drawn drawn = draws.take(wanted, logits);
  if (ends_spans(chunks, wanted, drawn)) capture.flush();
  return drawn;
}

bool Engine::Impl::is_stop(Token token) const {
  const std::vector<Token>& stops = agreement.model.stop_tokens;
  return std::find(stops.begin(), stops.end(), token) != stops.end();
}

/// Is a span closed behind this pass?
bool Engine::Impl::ends_spans(const std::vector<Chunk>& chunks, const std::vector<Wanted>& wanted,
                              const Drawn& drawn) const {
  const bool scored = std::any_of(chunks.begin(), chunks.end(), [](const Chunk& chunk) {
    return chunk.sequence->kind == Sequence::Kind::kScored &&
           chunk.sequence->remaining() == chunk.count;
  });
  return scored || std::any_of(wanted.begin(), wanted.end(), [&](const Wanted& w) {
           const Sequence& s = *w.sequence;
           if (s.kind == Sequence::Kind::kPrompt) return true;
           return s.decodes() &&
                  (s.size() + 1 == s.limit || is_stop(drawn.choices[w.first_choice].token));
         });
}

/// The records of the pass before go to the sink. Where it refuses some, that pass has not
/// happened: its sequences stand where they stood, and read and draw the same again.
void Engine::Impl::hand_over() {
  try {
    capture.flush();
  } catch (...) {
    take_back();
    throw;
  }
  unwritten.clear();
  scheduler.unwritten = 0;
}

void Engine::Impl::take_back() {
  scheduler.unwritten = 0;
  const std::vector<Advance> done = std::exchange(unwritten, {});
  if (!done.empty()) forward.take_back();
  for (const Advance& of : done) {
    Sequence& s = *scheduler.active().at(of.order);
    s.fed -= of.rows;
    if (!s.decodes()) counts.prompt_tokens -= of.rows;
    if (!of.drew) continue;
    Trajectory& t = s.trajectory;
    t.tokens.pop_back();
    t.response_mask.pop_back();
    t.rollout_logp.pop_back();
    const auto top = static_cast<std::size_t>(t.sampling.top_logprobs);
    t.top_tokens.resize(t.top_tokens.size() - top);
    t.top_logp.resize(t.top_logp.size() - top);
    --counts.tokens;
  }
  for (const Advance& of : done) spans.cut(*scheduler.active().at(of.order));
}

/// What was computed has been read.
void Engine::Impl::advance(const std::vector<Chunk>& chunks, const Pass& pass) {
  ++counts.passes;
  counts.rows += pass.asked_rows();
  counts.peak_frames = std::max(counts.peak_frames, cache.used_frames());
  for (const Chunk& chunk : chunks) {
    Sequence& s = *chunk.sequence;
    s.fed += chunk.count;
    if (!s.decodes()) counts.prompt_tokens += chunk.count;
    if (!capture.holds()) continue;
    unwritten.push_back({chunk.order, chunk.count, s.decodes() && s.remaining() == 0});
    scheduler.unwritten += chunk.count;
  }
}

void Engine::Impl::run(const std::vector<Chunk>& chunks) {
  std::vector<Wanted> wanted;
  const Pass pass = build(chunks, wanted);
  spans.open(chunks);
  capture.begin(pass);
  Drawn drawn;
  try {
    drawn = compute(chunks, pass, wanted);
  } catch (...) {
    forward.abandon();
    capture.drop();
    for (const Chunk& chunk : chunks) spans.cut(*chunk.sequence);
    throw;
  }
  advance(chunks, pass);
  for (const Wanted& w : wanted) take(w, drawn);
  for (const Chunk& chunk : chunks) {
    // Samples and prompts are gone by now if they ended; what is scored ends with its last row.
    const auto it = scheduler.active().find(chunk.order);
    if (it == scheduler.active().end()) continue;
    Sequence& s = *it->second;
    if (s.kind == Sequence::Kind::kScored && s.remaining() == 0) finish(s, s.trajectory.finish);
  }
  spans.close();
}

/// What a row of logits leads to: a next token, samples that begin, a log-prob.
void Engine::Impl::take(const Wanted& wanted, const Drawn& drawn) {
  Sequence& s = *wanted.sequence;
  const auto choices = std::span(drawn.choices).subspan(wanted.first_choice);
  const Top top = {std::span(drawn.top_tokens).subspan(wanted.first_top, wanted.top()),
                   std::span(drawn.top_logp).subspan(wanted.first_top, wanted.top())};
  switch (s.kind) {
    case Sequence::Kind::kScored:
      s.trajectory.rollout_logp[static_cast<std::size_t>(wanted.position) + 1] = choices[0].logp;
      return;
    case Sequence::Kind::kSample: add_token(s, choices[0], top); return;
    case Sequence::Kind::kPrompt: break;
  }
  spans.end(s);
  if (trace == nullptr) remember(s);
  const std::vector<Sequence*> samples = scheduler.fork(s);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i]->span = spans.next(*samples[i], samples[i]->trajectory.sample, version);
    add_token(*samples[i], choices[i], top);
  }
}

void Engine::Impl::add_token(Sequence& s, Choice choice, Top top) {
  Trajectory& t = s.trajectory;
  t.tokens.push_back(choice.token);
  t.response_mask.push_back(1);
  t.rollout_logp.push_back(choice.logp);
  t.top_tokens.insert(t.top_tokens.end(), top.tokens.begin(), top.tokens.end());
  t.top_logp.insert(t.top_logp.end(), top.logp.begin(), top.logp.end());
  ++counts.tokens;
  if (is_stop(choice.token)) {
    finish(s, Finish::kStop);
  } else if (s.size() == s.limit) {
    finish(s, Finish::kLength);
  }
}

/// Leaves a sequence's full pages to later requests, if all was computed with the present weights.
void Engine::Impl::remember(const Sequence& s) {
  const Trajectory& t = s.trajectory;
  if (!options.reuse_prefixes || s.parked || s.kind == Sequence::Kind::kScored) return;
  for (const Span& span : t.path) {
    if (span.version != version) return;
  }
  cache.remember(s.pages, std::span(t.tokens).first(static_cast<std::size_t>(s.fed)),
                 spans.tags(s, s.fed));
}

void Engine::Impl::report(Order order, Trajectory trajectory) {
  spans.release(trajectory.prompt, trajectory.sample);
  finished.emplace_back(order, std::move(trajectory));
}

void Engine::Impl::finish(Sequence& s, Finish why) {
  spans.end(s);
  remember(s);
  s.trajectory.finish = why;
  report(s.order, std::move(s.trajectory));
  scheduler.remove(s);
}

std::vector<std::pair<Order, Trajectory>> Engine::Impl::step() {
  if (state != State::kReady) {
    throw Error(state == State::kLoading ? "the engine's weights are incomplete: commit them first"
                                         : "the engine has no weights: put them first");
  }
  Timer timer;
  if (!scheduler.idle()) cache.wake();
  const std::vector<Chunk> chunks = scheduler.plan();
  held_back = chunks.empty() && scheduler.held_back();
  if (!chunks.empty()) {
    run(chunks);
  } else if (!scheduler.idle() && !held_back) {
    throw Error("no sequence can go on: rollout.cache and rollout.swap are all in use");
  }
  counts.seconds += timer.lap();
  return std::exchange(finished, {});
}

}  // namespace lockstep::rollout
