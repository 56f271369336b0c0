#include "rollout/draws.h"

#include <algorithm>

#include "base/parallel.h"

namespace lockstep::rollout {
namespace {

bool needs_host(const Wanted& wanted) {
  if (wanted.sequence->kind == Sequence::Kind::kScored) return false;
  const Sampling& sampling = wanted.sequence->trajectory.sampling;
  return (sampling.top_k != 1 && (sampling.top_p < 1.0f || sampling.top_k > 0)) ||
         sampling.top_logprobs > 0;
}

/// One row, by the rule.
void draw(const Wanted& wanted, std::span<const float> logits, Drawn& drawn) {
  const Sequence& s = *wanted.sequence;
  const Trajectory& t = s.trajectory;
  const Distribution distribution(logits, t.sampling.temperature);
  if (s.kind == Sequence::Kind::kScored) {
    const Token next = t.tokens[static_cast<std::size_t>(wanted.position) + 1];
    drawn.choices[wanted.first_choice] = {next, distribution.logp(next)};
    return;
  }
  distribution.top(std::span(drawn.top_tokens).subspan(wanted.first_top, wanted.top()),
                   std::span(drawn.top_logp).subspan(wanted.first_top, wanted.top()));
  for (std::size_t i = 0; i < wanted.forks(); ++i) {
    drawn.choices[wanted.first_choice + i] = distribution.sample(
        t.sampling,
        {s.seed, t.prompt, t.sample + static_cast<std::int32_t>(i), wanted.position + 1});
  }
}

}  // namespace

void Draws::prepare(std::span<const Wanted> wanted) {
  row_.clear();
  given_.clear();
  temperatures_.clear();
  seeds_.clear();
  names_.clear();
  choices_.clear();
  on_host_.clear();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const Wanted& w = wanted[i];
    if (needs_host(w)) {
      on_host_.push_back(i);
      continue;
    }
    const Sequence& s = *w.sequence;
    const Trajectory& t = s.trajectory;
    const bool scored = s.kind == Sequence::Kind::kScored;
    for (std::size_t fork = 0; fork < (scored ? 1 : w.forks()); ++fork) {
      row_.push_back(static_cast<std::int32_t>(i));
      given_.push_back(scored                  ? t.tokens[static_cast<std::size_t>(w.position) + 1]
                       : t.sampling.top_k == 1 ? kernels::kLikeliest
                                               : -1);
      temperatures_.push_back(t.sampling.temperature);
      seeds_.push_back(s.seed);
      names_.push_back({static_cast<std::uint64_t>(t.prompt.value),
                        static_cast<std::uint32_t>(w.position + 1),
                        draw_counter(t.sample + static_cast<std::int32_t>(fork))});
      choices_.push_back(w.first_choice + fork);
    }
  }
}

void Draws::launch(std::span<const Wanted> wanted, TensorView<const float, 2> logits) {
  if (!at_->on_cuda() || wanted.empty()) return;
  prepare(wanted);
  const std::int64_t vocabulary = logits.shape[1];
  if (!on_host_.empty()) {
    const std::int64_t bytes = vocabulary * std::int64_t{sizeof(float)};
    const std::int64_t all = bytes * std::ssize(on_host_);
    if (rows_.bytes() < all) rows_ = PinnedBuffer(all, at_->device);
    for (std::size_t i = 0; i < on_host_.size(); ++i) {
      copy_bytes(rows_.as<>() + static_cast<std::int64_t>(i) * bytes, {},
                 logits.data + static_cast<std::int64_t>(on_host_[i]) * logits.stride[0],
                 at_->device, bytes, at_->stream);
    }
  }
  const std::int64_t draws = std::ssize(row_);
  if (draws == 0) return;
  upload_.begin();
  const std::size_t row = upload_.add(row_), given = upload_.add(given_),
                    temperatures = upload_.add(temperatures_), seeds = upload_.add(seeds_),
                    names = upload_.add(names_);
  upload_.send();
  const auto count = static_cast<std::size_t>(draws);
  const std::int64_t bytes = draws * std::int64_t{sizeof(Token) + sizeof(float)};
  auto* tokens = static_cast<Token*>(results_.take(bytes));
  const std::int64_t scratch = kernels::sample_workspace(draws, vocabulary);
  kernels::sample({.logits = logits,
                   .rows = upload_.get<std::int32_t>(row),
                   .temperatures = upload_.get<float>(temperatures),
                   .seeds = upload_.get<std::uint64_t>(seeds),
                   .names = upload_.get<kernels::SampleName>(names),
                   .given = upload_.get<std::int32_t>(given),
                   .tokens = {tokens, count},
                   .logps = {reinterpret_cast<float*>(tokens + draws), count},
                   .workspace = {static_cast<std::byte*>(workspace_.take(scratch)),
                                 static_cast<std::size_t>(scratch)}},
                  at_->stream);
  if (fetched_.bytes() < bytes) fetched_ = PinnedBuffer(bytes, at_->device);
  copy_bytes(fetched_.as<void>(), {}, tokens, at_->device, bytes, at_->stream);
}

Drawn Draws::take(std::span<const Wanted> wanted, TensorView<const float, 2> logits) {
  if (wanted.empty()) return {};
  const std::size_t top = wanted.back().first_top + wanted.back().top();
  Drawn drawn = {.choices = std::vector<Choice>(wanted.back().first_choice + wanted.back().forks()),
                 .top_tokens = std::vector<Token>(top),
                 .top_logp = std::vector<float>(top)};
  const auto vocabulary = static_cast<std::size_t>(logits.shape[1]);
  const bool there = at_->on_cuda();
  const std::int64_t rows = there ? std::ssize(on_host_) : std::ssize(wanted);
  parallel_for(rows, 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const float* row =
          there ? rows_.as<float>() + at * vocabulary : logits.data + i * logits.stride[0];
      draw(wanted[there ? on_host_[at] : at], {row, vocabulary}, drawn);
    }
  });
  if (!there) return drawn;
  const auto* tokens = fetched_.as<const Token>();
  const auto* logps = reinterpret_cast<const float*>(tokens + choices_.size());
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    drawn.choices[choices_[i]] = {tokens[i], logps[i]};
  }
  return drawn;
}

}  // namespace lockstep::rollout
