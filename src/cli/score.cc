#include "cli/score.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/json_text.h"
#include "cli/lines_out.h"
#include "cli/log.h"
#include "cli/sequences.h"
#include "rl/distribution.h"
#include "store/store.h"
#include "train/trainer.h"

namespace lockstep::cli {
namespace {

constexpr std::size_t kTokensAtOnce = 1 << 14;  // records are given up after as many

/// Log-probs of a batch by who was asked; the others are empty.
struct Scores {
  std::vector<Trajectory> engine;
  PerToken trainer;   // guided where there are records
  PerToken unguided;  // beside it, where the trainer is guided
};

/// The engine, the trainer and the records between them, as far as they are asked for.
class Scorer {
 public:
  Scorer(const RolloutArgs& args, const Subject& subject) : subject_(subject) {
    const bool trainer = args.by_trainer || args.gap;
    const bool follows =
        subject.arm.guide.mode != Guidance::kOwnScale || subject.arm.guide.replay_experts;
    guided_ = args.gap && follows;
    if (guided_) {
      store::Options options = subject.recipe.store;
      options.folder.clear();
      options.contract = subject.arm.contract.id();
      store_.emplace(options);
    }
    if (!args.by_trainer) {
      engine_.emplace(subject.agreement, subject.arm.rollout, subject.device,
                      store_ ? &*store_ : nullptr, *comm_);
      load(subject, *engine_);
    }
    if (trainer) {
      trainer_.emplace(subject.agreement, subject.arm.qat, subject.recipe.trainer, subject.device,
                       *comm_);
      load(*subject.policy.weights, trainer_->initial_weights());
    }
  }

  /// How the trainer's log-probs came about, for people.
  const char* manner() const {
    if (!guided_) return "engine and trainer";
    return subject_.arm.guide.mode == Guidance::kOwnScale
               ? "engine and trainer, which replays its routes"
               : "engine and trainer, which follows fresh records";
  }

  Scores operator()(std::vector<Trajectory> batch) {
    Scores scores;
    for (Trajectory& t : batch)
      t.sampling.temperature = subject_.recipe.schedule.sampling.temperature;
    if (engine_) scores.engine = engine_->rescore(batch);
    if (trainer_ && guided_) scores.trainer = trainer_->logprobs(scores.engine, &*store_);
    if (trainer_ && guided_) scores.unguided = trainer_->logprobs(batch, nullptr);
    if (trainer_ && !guided_) scores.trainer = trainer_->logprobs(batch, nullptr);
    if (store_) {
      std::vector<SpanId> spans;
      for (const Trajectory& t : scores.engine) {
        for (const Span& span : t.path) spans.push_back(span.id);
      }
      store_->release(spans);
    }
    return scores;
  }

 private:
  const Subject& subject_;
  bool guided_ = false;
  std::unique_ptr<Comm> comm_ = Comm::single();
  std::optional<store::Store> store_;
  std::optional<rollout::Engine> engine_;
  std::optional<train::Trainer> trainer_;
};

/// |a - b| over the tokens that both have.
void add_gap(std::span<const float> a, std::span<const float> b, std::span<const std::uint8_t> mask,
             rl::Distribution& gap) {
  for (std::size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] == 0 || !std::isfinite(a[i]) || !std::isfinite(b[i])) continue;
    gap.add(std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
}

void say(const std::string& who, const rl::Distribution& gap) {
  if (gap.count() == 0) return;
  char text[160];
  std::snprintf(text, sizeof text, "mean %.6f, median %.6f, p99 %.6f, max %.6f over %.0f tokens",
                gap.mean(), gap.quantile(0.5), gap.quantile(0.99), gap.largest(), gap.count());
  info("|difference of log-probs|, " + who + ": " + text);
}

std::string score_line(const SequenceRow& row, const Scores& scores, std::size_t i) {
  const std::vector<std::uint8_t>& mask = row.trajectory.response_mask;
  std::string text =
      cat({"{\"line\":", row.line, ",\"tokens\":", json_text(row.trajectory.tokens)});
  if (!scores.engine.empty()) {
    text += ",\"rollout_logp\":" + json_text(scores.engine[i].rollout_logp, mask);
  }
  if (!scores.trainer.empty()) {
    text += ",\"trainer_logp\":" + json_text(scores.trainer[i], mask);
  }
  if (!scores.unguided.empty()) {
    text += ",\"unguided_logp\":" + json_text(scores.unguided[i], mask);
  }
  return text + "}";
}

}  // namespace

int score(const RolloutArgs& args, const Subject& subject) {
  const std::vector<SequenceRow> rows = read_sequences(
      recipe::find_file(args.score, "--score"), subject.policy.tokenizer, subject.policy.config);
  LinesOut out(args.out);
  Scorer scorer(args, subject);
  rl::Distribution gap, unguided, given;
  Progress progress("sequences", std::ssize(rows));
  for (std::size_t first = 0; first < rows.size();) {
    std::vector<Trajectory> batch;
    std::size_t tokens = 0;
    for (std::size_t i = first; i < rows.size() && tokens < kTokensAtOnce; ++i) {
      batch.push_back(rows[i].trajectory);
      tokens += rows[i].trajectory.tokens.size();
    }
    const Scores scores = scorer(batch);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const SequenceRow& row = rows[first + i];
      const std::vector<std::uint8_t>& mask = row.trajectory.response_mask;
      const auto* engine = scores.engine.empty() ? nullptr : &scores.engine[i].rollout_logp;
      const auto* trainer = scores.trainer.empty() ? nullptr : &scores.trainer[i];
      if (engine && trainer) add_gap(*engine, *trainer, mask, gap);
      if (engine && !scores.unguided.empty()) add_gap(*engine, scores.unguided[i], mask, unguided);
      if (!row.given.empty()) add_gap(row.given, engine ? *engine : *trainer, mask, given);
      out.line(score_line(row, scores, i));
    }
    first += batch.size();
    progress.at(static_cast<std::int64_t>(first));
  }
  out.commit();
  info(cat({rows.size(), " sequences scored", out.where(), "; ", subject.numbers()}));
  say(scorer.manner(), gap);
  say("engine and trainer, which follows none", unguided);
  say(args.by_trainer ? "the file's and the trainer's" : "the file's and the engine's", given);
  return 0;
}

}  // namespace lockstep::cli
