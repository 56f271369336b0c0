#include "rollout/engine.h"

#include <algorithm>
#include <cassert>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "base/timer.h"
#include "device/stream.h"
#include "rollout/capture.h"
#include "rollout/draws.h"
#include "rollout/forward.h"
#include "rollout/kv_cache.h"
#include "rollout/request.h"
#include "rollout/scheduler.h"

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

/// Of one row.
struct Top {
  std::span<const Token> tokens;
  std::span<const float> logp;
};

/// What a pass did to one sequence.
struct Advance {
  Order order;
  std::int32_t rows = 0;
  bool drew = false;  // a token
};

struct Counts {
  std::int64_t tokens = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t recalled_tokens = 0;
  std::int64_t rewritten_tokens = 0;
  std::int64_t passes = 0;
  std::int64_t rows = 0;
  std::int64_t peak_frames = 0;
  double seconds = 0.0;
};

}  // namespace

struct Engine::Impl {
  /// Forward's sink, and what new weights mean for what is under way.
  class Weights final : public WeightSink {
   public:
    explicit Weights(Impl& engine) : engine_(engine) {}
    void begin(WeightVersion version, ContractId contract) override;
    void put(const Weight& weight) override { engine_.forward.weights().put(weight); }
    void put_all(std::span<const Weight> weights) override {
      engine_.forward.weights().put_all(weights);
    }
    std::vector<std::uint32_t> commit() override;
    Device device() const override { return engine_.forward.weights().device(); }
    Stream stream() const override { return engine_.forward.weights().stream(); }
    Metrics metrics() const override { return engine_.forward.weights().metrics(); }

   private:
    Impl& engine_;
    WeightVersion coming_;
  };

  Impl(const Agreement& a, const Options& o, Device device, TraceSink* sink, Comm& comm)
      : agreement(checked(a, o, device, sink)),
        options(o),
        trace(sink),
        rank(comm.rank()),
        stream(device),
        at{device, stream},
        forward(agreement, options, device, stream),
        cache(agreement, options, device, stream),
        capture(agreement, sink, options.record_bf16, device, stream),
        draws(at),
        scheduler(agreement, options, cache, sink, [this](Sequence& s) { begin(s); }),
        weights(*this) {}

  void begin(Sequence& s);
  Span next_span(const Sequence& s, std::int32_t sample) const;
  std::vector<std::uint64_t> tags(const Sequence& s, std::int32_t end) const;
  void run(const std::vector<Chunk>& chunks);
  Pass build(const std::vector<Chunk>& chunks, std::vector<Wanted>& wanted);
  void open_spans(const std::vector<Chunk>& chunks);
  void cut(const Sequence& s);
  Drawn compute(const std::vector<Chunk>& chunks, const Pass& pass,
                const std::vector<Wanted>& wanted);
  bool ends_spans(const std::vector<Chunk>& chunks, const std::vector<Wanted>& wanted,
                  const Drawn& drawn) const;
  bool is_stop(Token token) const;
  void advance(const std::vector<Chunk>& chunks, const Pass& pass);
  void hand_over();
  void take_back();
  void take(const Wanted& wanted, const Drawn& drawn, std::vector<Capture::Held>& held);
  void add_token(Sequence& s, Choice choice, Top top, std::vector<Capture::Held>& held);
  void close_span(Sequence& s, std::vector<Capture::Held>& held);
  void remember(const Sequence& s);
  void finish(Sequence& s, Finish why, std::vector<Capture::Held>& held);
  void give_up(Sequence& prompt);
  void admit_names(const Trajectory& t, std::int32_t samples);
  void report(Order order, Trajectory trajectory);
  void new_weights(WeightVersion version);
  std::vector<std::pair<Order, Trajectory>> step();

  const Agreement agreement;
  const Options options;
  TraceSink* const trace;
  const int rank;
  const OwnedStream stream;  // goes last: all memory was asked for on it
  Workplace at;
  Forward forward;
  KvCache cache;
  Capture capture;
  Draws draws;
  Scheduler scheduler;
  Weights weights;
  WeightVersion version{};
  enum class State : std::uint8_t { kNoWeights, kLoading, kReady } state = State::kNoWeights;
  bool held_back = false;
  Counts counts{};
  std::vector<std::vector<std::int32_t>> tables{};  // of frames, of each sequence in the pass
  const std::vector<std::int32_t> spare{cache.spare_frame()};
  const bool fills_up = cache.spare_frame() >= 0 && options.residual_scope != ResidualScope::kBatch;
  std::vector<Advance> unwritten{};  // of the last pass, while its records are on their way
  std::set<std::pair<PromptId, std::int32_t>> under_way{};  // prompts and samples that record
  std::vector<std::pair<Order, Trajectory>> finished{};
};

// What is recorded under which name.

/// The span that begins behind the path.
Span Engine::Impl::next_span(const Sequence& s, std::int32_t sample) const {
  std::int32_t first = 0;
  for (const Span& span : s.trajectory.path) first += span.count;
  std::vector<Span> known = s.earlier;
  known.insert(known.end(), s.trajectory.path.begin(), s.trajectory.path.end());
  const std::span<const Token> tokens(s.trajectory.tokens);
  return {.id = span_id(rank, s.trajectory.prompt, sample, next_turn(known, s.trajectory, sample)),
          .first = first,
          .version = version,
          .prefix_hash = hash_tokens(tokens.first(static_cast<std::size_t>(first)))};
}

/// Under which names the cache remembers positions 0 .. end-1. Where records or noise hang on a
/// span's id, only the same span will do.
std::vector<std::uint64_t> Engine::Impl::tags(const Sequence& s, std::int32_t end) const {
  std::vector<std::uint64_t> tags(static_cast<std::size_t>(end), 0);
  if (trace == nullptr && options.drift.noise == 0.0f) return tags;
  for (std::int32_t p = 0; p < end; ++p) tags[static_cast<std::size_t>(p)] = s.span_at(p).value;
  return tags;
}

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
  if (s.recorded < s.target()) s.span = next_span(s, first_reading ? -1 : t.sample);
  if (scored || !options.reuse_prefixes) return;
  // At least the last token is read, for its logits. While records are kept, what is recalled must
  // have its own: it lies on the path.
  const std::int32_t most = std::min(trace != nullptr ? s.recorded : s.size(), s.size() - 1);
  s.pages = cache.recall(std::span(t.tokens).first(static_cast<std::size_t>(most)), tags(s, most));
  s.fed = static_cast<std::int32_t>(s.pages.size()) * cache.page_tokens();
  counts.recalled_tokens += s.fed;
}

void Engine::Impl::open_spans(const std::vector<Chunk>& chunks) {
  for (const Chunk& chunk : chunks) {
    Sequence& s = *chunk.sequence;
    if (s.opened || chunk.first + chunk.count <= s.recorded) continue;
    s.opened = true;
    if (trace != nullptr) trace->open(*s.span, agreement.contract.id());
  }
}

/// The span under way goes to the path, if anything was read in it.
void Engine::Impl::close_span(Sequence& s, std::vector<Capture::Held>& held) {
  if (!s.span) return;
  s.span->count = s.fed - s.span->first;
  if (s.span->count > 0) {
    Capture::Held rows = {*s.span, {}};
    for (const Page page : s.pages) rows.pages.push_back(cache.bytes(page));
    held.push_back(std::move(rows));
    s.trajectory.path.push_back(*s.span);
    s.recorded = s.fed;
  } else if (trace != nullptr && s.opened) {
    trace->seal(s.span->id);  // of a pass that failed; it was truncated then
  }
  s.span.reset();
  s.opened = false;
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
  for (const Advance& of : done) cut(*scheduler.active().at(of.order));
}

/// The span under way ends again behind what was read.
void Engine::Impl::cut(const Sequence& s) {
  if (trace != nullptr && s.opened) trace->truncate(s.span->id, s.fed);
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
  open_spans(chunks);
  capture.begin(pass);
  Drawn drawn;
  try {
    drawn = compute(chunks, pass, wanted);
  } catch (...) {
    capture.drop();
    for (const Chunk& chunk : chunks) cut(*chunk.sequence);
    throw;
  }
  advance(chunks, pass);
  std::vector<Capture::Held> held;
  for (const Wanted& w : wanted) take(w, drawn, held);
  for (const Chunk& chunk : chunks) {
    // Samples and prompts are gone by now if they ended; what is scored ends with its last row.
    const auto it = scheduler.active().find(chunk.order);
    if (it == scheduler.active().end()) continue;
    Sequence& s = *it->second;
    if (s.kind == Sequence::Kind::kScored && s.remaining() == 0)
      finish(s, s.trajectory.finish, held);
  }
  capture.close(held, cache);
}

/// What a row of logits leads to: a next token, samples that begin, a log-prob.
void Engine::Impl::take(const Wanted& wanted, const Drawn& drawn,
                        std::vector<Capture::Held>& held) {
  Sequence& s = *wanted.sequence;
  const auto choices = std::span(drawn.choices).subspan(wanted.first_choice);
  const Top top = {std::span(drawn.top_tokens).subspan(wanted.first_top, wanted.top()),
                   std::span(drawn.top_logp).subspan(wanted.first_top, wanted.top())};
  switch (s.kind) {
    case Sequence::Kind::kScored:
      s.trajectory.rollout_logp[static_cast<std::size_t>(wanted.position) + 1] = choices[0].logp;
      return;
    case Sequence::Kind::kSample: add_token(s, choices[0], top, held); return;
    case Sequence::Kind::kPrompt: break;
  }
  close_span(s, held);
  if (trace == nullptr) remember(s);
  const std::vector<Sequence*> samples = scheduler.fork(s);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i]->span = next_span(*samples[i], samples[i]->trajectory.sample);
    add_token(*samples[i], choices[i], top, held);
  }
}

void Engine::Impl::add_token(Sequence& s, Choice choice, Top top,
                             std::vector<Capture::Held>& held) {
  Trajectory& t = s.trajectory;
  t.tokens.push_back(choice.token);
  t.response_mask.push_back(1);
  t.rollout_logp.push_back(choice.logp);
  t.top_tokens.insert(t.top_tokens.end(), top.tokens.begin(), top.tokens.end());
  t.top_logp.insert(t.top_logp.end(), top.logp.begin(), top.logp.end());
  ++counts.tokens;
  if (is_stop(choice.token)) {
    finish(s, Finish::kStop, held);
  } else if (s.size() == s.limit) {
    finish(s, Finish::kLength, held);
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
                 tags(s, s.fed));
}

/// Spans are named after prompt and sample: two alike at a time would write into one span.
void Engine::Impl::admit_names(const Trajectory& t, std::int32_t samples) {
  if (trace == nullptr) return;
  for (std::int32_t i = 0; i < samples; ++i) {
    if (!under_way.contains({t.prompt, t.sample + i})) continue;
    throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample + i,
                     " is under way already: give each prompt a number of its own"}));
  }
  for (std::int32_t i = 0; i < samples; ++i) under_way.insert({t.prompt, t.sample + i});
}

void Engine::Impl::report(Order order, Trajectory trajectory) {
  under_way.erase({trajectory.prompt, trajectory.sample});
  finished.emplace_back(order, std::move(trajectory));
}

void Engine::Impl::finish(Sequence& s, Finish why, std::vector<Capture::Held>& held) {
  close_span(s, held);
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

// New weights.

void Engine::Impl::Weights::begin(WeightVersion version, ContractId contract) {
  if (contract != engine_.agreement.contract.id()) {
    throw Error(cat({"weights come under contract ", contract.value, ", the engine runs ",
                     engine_.agreement.contract.id().value, ": build both from one agreement"}));
  }
  engine_.hand_over();
  engine_.forward.weights().begin(version, contract);
  engine_.state = State::kLoading;
  coming_ = version;
}

std::vector<std::uint32_t> Engine::Impl::Weights::commit() {
  std::vector<std::uint32_t> sums = engine_.forward.weights().commit();
  engine_.state = State::kReady;
  engine_.new_weights(coming_);
  return sums;
}

/// Nothing computed with older weights is handed on: samples that run keep their own past, whose
/// records say what it was, and go on in new spans; prompts that are being read begin again.
void Engine::Impl::new_weights(WeightVersion now) {
  assert(unwritten.empty() && "begin() handed it over");
  version = now;
  cache.forget();
  std::vector<Capture::Held> held;
  for (auto& [order, sequence] : scheduler.active()) {
    Sequence& s = *sequence;
    if (s.decodes()) {
      close_span(s, held);
      s.span = next_span(s, s.trajectory.sample);
    } else {
      scheduler.clear(s);
      begin(s);
    }
  }
  capture.close(held, cache);
}

// The door.

Engine::Engine(const Agreement& agreement, const Options& options, Device device, TraceSink* trace,
               Comm& comm)
    : impl_(std::make_unique<Impl>(agreement, options, device, trace, comm)) {}

Engine::~Engine() = default;

void Engine::submit(Request request) {
  check_request(request, impl_->agreement.model, impl_->trace != nullptr);
  impl_->scheduler.check(request, false);
  impl_->admit_names(request.prefix, request.num_samples);
  impl_->scheduler.submit(std::move(request), false);
}

bool Engine::idle() const { return impl_->scheduler.idle(); }

bool Engine::held_back() const { return impl_->held_back; }

std::string Engine::held() const { return impl_->trace != nullptr ? impl_->trace->held() : ""; }

std::vector<Trajectory> Engine::step() {
  std::vector<Trajectory> out;
  for (auto& [order, trajectory] : impl_->step()) out.push_back(std::move(trajectory));
  return out;
}

/// A prompt that was not read to its end leaves its samples as they came.
void Engine::Impl::give_up(Sequence& prompt) {
  if (trace != nullptr && prompt.opened) {
    trace->truncate(prompt.span->id, prompt.span->first);
    trace->seal(prompt.span->id);
  }
  prompt.trajectory.path.clear();
  for (std::int32_t i = 0; i < std::max(prompt.forks, 1); ++i) {
    Trajectory t = prompt.trajectory;
    t.path = prompt.earlier;
    t.sample += i;
    t.finish = Finish::kAborted;
    report({prompt.order.request, prompt.order.place + 2 * i + 1}, std::move(t));
  }
  scheduler.remove(prompt);
}

std::vector<Trajectory> Engine::abort() {
  impl_->hand_over();
  std::vector<Capture::Held> held;
  while (!impl_->scheduler.active().empty()) {
    Sequence& s = *impl_->scheduler.active().begin()->second;
    if (s.decodes()) {
      impl_->finish(s, Finish::kAborted, held);
    } else {
      impl_->give_up(s);
    }
  }
  impl_->capture.close(held, impl_->cache);
  for (Scheduler::Waiting& waiting : impl_->scheduler.waiting()) {
    const std::int32_t samples = waiting.scored ? 1 : waiting.request.num_samples;
    for (std::int32_t i = waiting.first_sample; i < samples; ++i) {
      Trajectory t = waiting.request.prefix;
      t.sample += i;
      t.finish = Finish::kAborted;
      impl_->report({waiting.number, 2 * i + 1}, std::move(t));
    }
  }
  impl_->scheduler.waiting().clear();
  std::vector<Trajectory> out;
  for (auto& [order, t] : std::exchange(impl_->finished, {})) out.push_back(std::move(t));
  return out;
}

std::vector<Trajectory> Engine::rescore(std::span<const Trajectory> trajectories) {
  if (!idle()) throw Error("rescore needs an idle engine: step until it is, or abort");
  std::vector<Trajectory> out(trajectories.begin(), trajectories.end());
  std::vector<std::int64_t> numbers(out.size(), -1);
  try {
    for (std::size_t i = 0; i < out.size(); ++i) {
      prepare_scoring(out[i], impl_->agreement.model);
      if (out[i].tokens.size() < 2) continue;
      Request request = {.prefix = out[i]};
      impl_->scheduler.check(request, true);
      impl_->admit_names(out[i], 1);
      numbers[i] = impl_->scheduler.submit(std::move(request), true);
    }
    while (!idle()) {
      for (auto& [order, trajectory] : impl_->step()) {
        const auto at = std::find(numbers.begin(), numbers.end(), order.request) - numbers.begin();
        out[static_cast<std::size_t>(at)] = std::move(trajectory);
      }
      if (held_back()) throw_held_back(held());
    }
  } catch (...) {
    abort();
    throw;
  }
  return out;
}

WeightSink& Engine::weights() { return impl_->weights; }

Metrics Engine::metrics() {
  const Counts c = std::exchange(impl_->counts, {});
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  Scheduler& scheduler = impl_->scheduler;
  Metrics metrics = impl_->forward.metrics();
  metrics.merge(
      Metrics{{"rollout/tokens", number(c.tokens)},
              {"rollout/prompt_tokens", number(c.prompt_tokens)},
              {"rollout/recalled_tokens", number(c.recalled_tokens)},
              {"rollout/rewritten_tokens", number(c.rewritten_tokens)},
              {"rollout/passes", number(c.passes)},
              {"rollout/replayed_passes", number(impl_->forward.take_replays())},
              {"rollout/rows_per_pass", c.passes > 0 ? number(c.rows) / number(c.passes) : 0.0},
              {"rollout/seconds", c.seconds},
              {"rollout/tokens_per_s", c.seconds > 0.0 ? number(c.tokens) / c.seconds : 0.0},
              {"rollout/preemptions", number(std::exchange(scheduler.preemptions, 0))},
              {"rollout/shared_pages", number(std::exchange(scheduler.shared_pages, 0))},
              {"rollout/cache_use", number(c.peak_frames) / number(impl_->cache.frames())}});
  return metrics;
}

}  // namespace lockstep::rollout
