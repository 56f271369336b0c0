#include "step/watch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace lockstep::step {
namespace {

constexpr std::size_t kSpan = 5;  // steps that are averaged for a trend

// Where the field's numbers lie: two BF16 engines of large models differ by about .01, gates of
// neighbouring projects stand at .1.
constexpr double kWatchGap = 0.03, kBadGap = 0.1;
constexpr double kWatchGrowth = 2, kBadGrowth = 4;   // last steps against the first ones
constexpr double kSmallGap = 0.005;                  // below it, growth is no news
constexpr double kTinyGap = 0.0005;                  // nor are its ratios
constexpr double kWatchLoss = 0.1, kBadLoss = 0.25;  // of reward, against its best stretch
constexpr double kWatchCoverage = 0.99, kBadCoverage = 0.9;
constexpr std::size_t kWatchFlat = 5, kBadFlat = 10;  // steps without anything to learn from

double value(const Metrics& metrics, const std::string& name, double otherwise) {
  const auto found = metrics.find(name);
  return found == metrics.end() ? otherwise : found->second;
}

std::string number(const char* format, double value) {
  std::array<char, 48> text;
  const int n = std::snprintf(text.data(), text.size(), format, value);
  return {text.data(), static_cast<std::size_t>(std::clamp(n, 0, 47))};
}

/// What is too small for the places of `format` in powers of ten: no gap but 0 reads as 0.
std::string gap_text(double value, const char* format) {
  return number(value > 0 && value < kTinyGap ? "%.0e" : format, value);
}

double best_stretch(const std::vector<double>& values) {
  double best = -INFINITY;
  for (std::size_t end = kSpan; end <= values.size(); ++end) {
    double sum = 0;
    for (std::size_t i = end - kSpan; i < end; ++i) sum += values[i];
    best = std::max(best, sum / static_cast<double>(kSpan));
  }
  return best;
}

void raise(Verdict& verdict, Verdict::Level level, const std::string& why) {
  if (level > verdict.level) verdict = {level, ""};
  if (level == verdict.level) verdict.why += (verdict.why.empty() ? "" : "; ") + why;
}

/// Bad or watch where `value` passes a bound.
void weigh(Verdict& verdict, double value, double watch, double bad, const std::string& why) {
  if (value >= bad) {
    raise(verdict, Verdict::Level::kBad, why);
  } else if (value >= watch) {
    raise(verdict, Verdict::Level::kWatch, why);
  }
}

/// Whether no group's rewards differ: then no answer has an advantage, and nothing is learned.
bool is_flat(const Metrics& metrics, double reward) {
  return value(metrics, "rollout/zero_std/fraction", reward == 0 ? 1 : 0) >= 1;
}

/// A run that learns nothing is not well, however small its gap; one that has nothing left to learn
/// wastes its time.
void weigh_flat(Verdict& verdict, std::size_t steps, double reward) {
  if (steps < kWatchFlat) return;
  const std::string span = number(" for %.0f steps", static_cast<double>(steps));
  if (reward >= 1) {
    raise(verdict, Verdict::Level::kWatch,
          "nothing is left to learn: every answer is right" + span);
  } else {
    raise(verdict, steps < kBadFlat ? Verdict::Level::kWatch : Verdict::Level::kBad,
          std::string("nothing is learned: ") +
              (reward == 0 ? "the reward has been 0" : "no group's rewards have differed") + span);
  }
}

}  // namespace

Verdict Watch::judge(const Metrics& metrics) {
  const std::string gap_name = "train/train_rollout_logprob_abs_diff";
  const bool measured = value(metrics, gap_name + "/count", 1) > 0;  // no group had an advantage
  const double gap = measured ? value(metrics, gap_name, NAN) : NAN;
  const double reward = value(metrics, "critic/rewards/mean", NAN);
  if (std::isfinite(gap)) gaps_.push_back(gap);
  if (std::isfinite(reward)) {
    rewards_.push_back(reward);
    flat_ = is_flat(metrics, reward) ? flat_ + 1 : 0;
  }

  Verdict verdict;
  if (std::isfinite(gap)) {
    weigh(verdict, gap, kWatchGap, kBadGap, "trainer and rollout differ by " + number("%.3f", gap));
  }
  if (gaps_.size() >= 2 * kSpan && mean_of_last(gaps_, kSpan) > kSmallGap) {
    const double growth = mean_of_last(gaps_, kSpan) / mean_of_first(gaps_, kSpan);
    weigh(verdict, growth, kWatchGrowth, kBadGrowth, "the gap grew " + number("%.1fx", growth));
  }
  if (rewards_.size() >= 2 * kSpan) {
    const double loss = best_stretch(rewards_) - mean_of_last(rewards_, kSpan);
    weigh(verdict, loss, kWatchLoss, kBadLoss,
          "the reward is " + number("%.2f", loss) + " below its best");
  }
  if (std::isfinite(reward)) weigh_flat(verdict, flat_, reward);
  const double covered = value(metrics, "fp4/guide/covered_frac", 1);
  weigh(verdict, 1 - covered, 1 - kWatchCoverage, 1 - kBadCoverage,
        "records cover " + number("%.1f %%", 100 * covered));
  const double norm = value(metrics, "actor/grad_norm", 0);
  if (!std::isfinite(norm)) raise(verdict, Verdict::Level::kBad, "the gradient is not a number");
  return verdict;
}

std::string Watch::line(std::int64_t step, std::int64_t steps, const Metrics& metrics) {
  const Verdict verdict = judge(metrics);
  const std::string gap = "train/train_rollout_logprob_abs_diff";
  std::string out = "step " + std::to_string(step) + "/" + std::to_string(steps);
  out += number("  reward %.3f", value(metrics, "critic/rewards/mean", NAN));
  for (const auto& [name, rate] : metrics) {
    if (name.starts_with("val-core/") && name.ends_with("/reward/mean@1")) {
      out += number("  eval %.3f", rate);
    }
  }
  const bool measured = value(metrics, gap + "/count", 1) > 0;
  if (measured) {
    out += "  gap " + gap_text(value(metrics, gap, NAN), "%.4f");
    out += " p99 " + gap_text(value(metrics, gap + "/p99", NAN), "%.3f");
  } else {
    out += "  gap - (no group's rewards differ)";
  }
  if (measured && gaps_.size() >= 2 && std::max(gaps_.front(), gaps_.back()) >= kTinyGap)
    out += number(" x%.1f", gaps_.back() / std::max(gaps_.front(), kTinyGap));
  if (const double flips = value(metrics, "fp4/act/flip_frac", NAN); std::isfinite(flips)) {
    out += number("  flips %.2f %%", 100 * flips);
  }
  if (const double covered = value(metrics, "fp4/guide/covered_frac", NAN);
      std::isfinite(covered)) {
    out += number("  covered %.1f %%", 100 * covered);
  }
  out += number("  %.0f tokens/s", value(metrics, "perf/throughput", 0));
  return out + "  " + to_string(verdict);
}

std::string to_string(const Verdict& verdict) {
  switch (verdict.level) {
    case Verdict::Level::kOk: return "ok";
    case Verdict::Level::kWatch: return "watch: " + verdict.why;
    case Verdict::Level::kBad: return "bad: " + verdict.why;
  }
  return "";
}

double mean_of_first(const std::vector<double>& values, std::size_t count) {
  count = std::min(count, values.size());
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += values[i];
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

double mean_of_last(const std::vector<double>& values, std::size_t count) {
  count = std::min(count, values.size());
  double sum = 0;
  for (std::size_t i = values.size() - count; i < values.size(); ++i) sum += values[i];
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

}  // namespace lockstep::step
