#include "cli/figures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "cli/columns.h"

namespace lockstep::cli {
namespace {

using instruments::ArmRuns;
using instruments::Over;
using instruments::RunData;
using instruments::Spread;

constexpr const char* kGap = "train/train_rollout_logprob_abs_diff";

/// How a figure is written: digits behind the point, a factor before it, a unit behind.
struct Style {
  int digits = 2;
  double factor = 1;
  const char* unit = "";
  bool exponent = false;  // 4.1e-06
};

std::string written(double value, const Style& style) {
  if (value == 0 || !style.exponent) return fixed(value * style.factor, style.digits);
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.1e", value);
  return text.data();
}

/// Of a figure that fewer than all `seeds` have, how many do stands behind it.
std::string text_of(const Spread& spread, const Style& style, std::size_t seeds = 1) {
  if (!std::isfinite(spread.mean)) return "-";
  // What would read as 0 is written in powers of ten.
  const auto tiny = [&](double value) {
    return value != 0 && std::abs(value * style.factor) < 0.5 * std::pow(10.0, -style.digits);
  };
  const Style powers = {.exponent = true};
  const bool small = style.factor == 1 && tiny(spread.mean);
  std::string text = written(spread.mean, small ? powers : style);
  if (spread.deviation == 0) {
    text += " ±0";
  } else if (std::isfinite(spread.deviation)) {
    text += " ±" + written(spread.deviation,
                           small || (style.factor == 1 && tiny(spread.deviation)) ? powers : style);
  }
  text += style.unit;
  if (spread.seeds < seeds) text += cat({" (", counted(spread.seeds, "seed"), ")"});
  return text;
}

std::string first_to_last(const Spread& first, const Spread& last, int digits) {
  return fixed(first.mean, digits) + " -> " + fixed(last.mean, digits);
}

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.insert(0, width - text.size(), ' ');
  return text;
}

std::string bytes_text(const ArmFigures& a) {
  return fixed(a.bytes.mean, 0) + " of " + fixed(a.bytes_full, 0);
}

nlohmann::json number(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr);
}

struct Field {
  const char* name;
  Spread ArmFigures::*spread;
  bool demo;  // one of the demo's
};

constexpr Field kFields[] = {{"reward_first", &ArmFigures::reward_first, true},
                             {"reward_last", &ArmFigures::reward_last, true},
                             {"eval", &ArmFigures::eval, false},
                             {"gap_mean_first", &ArmFigures::gap_first, true},
                             {"gap_mean_last", &ArmFigures::gap_last, true},
                             {"gap_median", &ArmFigures::gap_median, false},
                             {"gap_p99_last", &ArmFigures::p99_last, true},
                             {"gap_max", &ArmFigures::gap_max, false},
                             {"gap_growth", &ArmFigures::gap_growth, false},
                             {"flip_frac", &ArmFigures::flips, true},
                             {"covered_frac", &ArmFigures::covered, true},
                             {"bytes_per_token", &ArmFigures::bytes, true},
                             {"tokens_per_s", &ArmFigures::tokens_per_s, true}};

int rank(const std::string& verdict) {
  return verdict.starts_with("bad") ? 2 : verdict.starts_with("watch") ? 1 : 0;
}

}  // namespace

step::Verdict replay(const RunData& run, double before, step::Watch& watch) {
  step::Verdict last;
  for (std::size_t i = 0; i < run.steps.size() && run.steps[i] < before; ++i) {
    Metrics metrics;
    for (const auto& [name, column] : run.metrics) {
      if (!std::isnan(column[i])) metrics[name] = column[i];
    }
    last = watch.judge(metrics);
  }
  return last;
}

std::string verdict(const RunData& run) {
  step::Watch watch;
  return step::to_string(replay(run, INFINITY, watch));
}

ArmFigures figures_of(const std::string& arm, const std::vector<RunData>& runs, double bytes_full) {
  ArmRuns all{.name = arm, .runs = {}};
  double seconds = 0;
  std::vector<std::int64_t> seeds;
  std::string worst = "ok";
  for (const RunData& run : runs) {
    all.runs.push_back(&run);
    for (const char* stage : {"timing_s/step", "timing_s/testing"}) {
      for (const double value : run.column(stage)) seconds += std::isnan(value) ? 0 : value;
    }
    if (const auto seed = run.keys.find("seed"); seed != run.keys.end()) {
      seeds.push_back(std::stoll(seed->second));
    }
    if (rank(run.verdict) > rank(worst)) worst = run.verdict;
  }
  const auto of = [&](const std::string& metric, Over over) { return figure(all, metric, over); };
  const std::string judged = instruments::find_metric({&all, 1}, "val-core/", "/reward/mean@1");
  const std::string rewards = "critic/rewards/mean", gap = kGap;
  Spread bytes = of("fp4/guide/bytes_per_token", Over::kAll);
  if (std::isnan(bytes.mean)) bytes.mean = 0;  // nothing was recorded
  return {.arm = arm,
          .seeds = seeds,
          .reward_first = of(rewards, Over::kFirst),
          .reward_last = of(rewards, Over::kLast),
          .eval = judged.empty() ? Spread{NAN, NAN, 0} : of(judged, Over::kLatest),
          .gap_first = of(gap, Over::kFirst),
          .gap_last = of(gap, Over::kLast),
          .gap_median = of(gap + "/median", Over::kLast),
          .p99_first = of(gap + "/p99", Over::kFirst),
          .p99_last = of(gap + "/p99", Over::kLast),
          .gap_max = of(gap + "/max", Over::kMostOfLast),
          .gap_growth = instruments::growth(all, gap),
          .flips = of("fp4/act/flip_frac", Over::kAll),
          .covered = of("fp4/guide/covered_frac", Over::kAll),
          .bytes = bytes,
          .bytes_full = bytes_full,
          .tokens_per_s = tokens_per_second(all),
          .seconds = seconds,
          .verdict = worst};
}

std::string demo_table(const std::vector<ArmFigures>& arms) {
  std::string out =
      "  arm          reward         mean |dlogp|        p99 |dlogp|     flips  covered  "
      "bytes a token     tokens/s\n";
  const Style percent = {.digits = 1, .factor = 100, .unit = " %"};
  for (const ArmFigures& a : arms) {
    std::string name = a.arm;
    name.resize(std::max<std::size_t>(name.size(), 10), ' ');
    out += "  " + name + "  " + first_to_last(a.reward_first, a.reward_last, 2) + "   " +
           first_to_last(a.gap_first, a.gap_last, 4) + "   " +
           first_to_last(a.p99_first, a.p99_last, 3) + padded(text_of(a.flips, percent), 9) +
           padded(text_of(a.covered, percent), 9) + padded(bytes_text(a), 15) +
           padded(fixed(a.tokens_per_s.mean, 0), 13) + "\n";
  }
  return out;
}

std::string comparison_table(const std::vector<ArmFigures>& arms) {
  const Style fraction = {.digits = 3}, gap = {.digits = 4},
              percent = {.digits = 1, .factor = 100, .unit = " %"},
              growth = {.digits = 2, .factor = 1};
  // Two tables: one of all would be wider than a terminal.
  std::vector<std::vector<std::string>> outcome = {
      {"arm", "reward", "eval", "mean |dlogp|", "growth", "p99", "verdict"}};
  std::vector<std::vector<std::string>> more = {
      {"arm", "median |dlogp|", "max", "flips", "covered", "bytes a token", "tokens/s"}};
  for (const ArmFigures& a : arms) {
    const auto text = [&](const Spread& spread, const Style& style) {
      return text_of(spread, style, a.seeds.size());
    };
    const std::string times = text(a.gap_growth, growth);
    outcome.push_back({a.arm, text(a.reward_last, fraction), text(a.eval, fraction),
                       text(a.gap_last, gap), times == "-" ? times : "x" + times,
                       text(a.p99_last, fraction),
                       a.stops.empty() ? a.verdict.substr(0, a.verdict.find(':')) : "stopped"});
    more.push_back({a.arm, text(a.gap_median, {.exponent = true}), text(a.gap_max, {.digits = 2}),
                    text(a.flips, percent), text(a.covered, percent), fixed(a.bytes.mean, 1),
                    fixed(a.tokens_per_s.mean, 0)});
  }
  return columns(outcome) + "\n" + columns(more);
}

nlohmann::json summary_of(const ArmFigures& arm, bool all) {
  nlohmann::json out;
  for (const Field& field : kFields) {
    const Spread& spread = arm.*field.spread;
    if (!all && !field.demo) continue;
    out[field.name] = number(spread.mean);
    if (all) out["spread"][field.name] = number(spread.deviation);
  }
  out["bytes_per_token_full"] = number(arm.bytes_full);
  if (all) {
    out["seeds"] = arm.seeds;
    out["verdict"] = arm.verdict;
    if (!arm.stops.empty()) out["stopped"] = arm.stops;
  }
  return out;
}

}  // namespace lockstep::cli
