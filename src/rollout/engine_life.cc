// What happens to an engine between its passes: new weights, requests, aborts, scoring.
#include <algorithm>
#include <cassert>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "rollout/engine_impl.h"
#include "rollout/request.h"

namespace lockstep::rollout {

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
  for (auto& [order, sequence] : scheduler.active()) {
    Sequence& s = *sequence;
    if (s.decodes()) {
      spans.end(s);
      s.span = spans.next(s, s.trajectory.sample, version);
    } else {
      scheduler.clear(s);
      begin(s);
    }
  }
  spans.close();
}

// The door.

Engine::Engine(const Agreement& agreement, const Options& options, Device device, TraceSink* trace,
               Comm& comm)
    : impl_(std::make_unique<Impl>(agreement, options, device, trace, comm)) {}

Engine::~Engine() = default;

void Engine::submit(Request request) {
  check_request(request, impl_->agreement.model, impl_->trace != nullptr);
  impl_->scheduler.check(request, false);
  impl_->spans.admit(request.prefix, request.num_samples);
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
  spans.give_up(prompt);
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

/// What stops one step of that must not keep the engine from the others: what is under way ends.
void Engine::Impl::end_all() {
  std::exception_ptr first;
  const auto attempt = [&](const auto& act) {
    try {
      act();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  attempt([&] { hand_over(); });
  while (!scheduler.active().empty()) {
    const Order order = scheduler.active().begin()->first;
    Sequence& s = *scheduler.active().at(order);
    attempt([&] { s.decodes() ? finish(s, Finish::kAborted) : give_up(s); });
    if (scheduler.active().contains(order)) drop(s);
  }
  attempt([&] { spans.close(); });
  for (Scheduler::Waiting& waiting : scheduler.waiting()) {
    const std::int32_t samples = waiting.scored ? 1 : waiting.request.num_samples;
    for (std::int32_t i = waiting.first_sample; i < samples; ++i) {
      Trajectory t = waiting.request.prefix;
      t.sample += i;
      t.finish = Finish::kAborted;
      report({waiting.number, 2 * i + 1}, std::move(t));
    }
  }
  scheduler.waiting().clear();
  if (!first) return;
  finished.clear();
  std::rethrow_exception(first);
}

/// A sequence that could not be ended as one should.
void Engine::Impl::drop(Sequence& s) {
  for (std::int32_t i = 0; i < std::max(s.forks, 1); ++i) {
    spans.release(s.trajectory.prompt, s.trajectory.sample + i);
  }
  scheduler.remove(s);
}

std::vector<Trajectory> Engine::abort() {
  impl_->end_all();
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
      impl_->spans.admit(out[i], 1);
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
    abort_quietly(*this);
    throw;
  }
  return out;
}

void Engine::rest(std::int64_t wanted) {
  const Device device = impl_->at.device;
  if (wanted < 0) wanted = owed() > 0 ? 0 : impl_->cache.pool_bytes();
  if (!is_short_of_memory(device, wanted)) return;
  trim_pool(device);
  if (idle() && is_short_of_memory(device, wanted)) impl_->cache.rest();
}

std::int64_t Engine::owed() const { return impl_->cache.owed(); }

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
              {"perf/replayed_passes", number(impl_->forward.take_replays())},
              {"rollout/rows_per_pass", c.passes > 0 ? number(c.rows) / number(c.passes) : 0.0},
              {"rollout/seconds", c.seconds},
              {"rollout/tokens_per_s", c.seconds > 0.0 ? number(c.tokens) / c.seconds : 0.0},
              {"rollout/preemptions", number(std::exchange(scheduler.preemptions, 0))},
              {"rollout/shared_pages", number(std::exchange(scheduler.shared_pages, 0))},
              {"rollout/cache_use", number(c.peak_frames) / number(impl_->cache.frames())}});
  return metrics;
}

}  // namespace lockstep::rollout
