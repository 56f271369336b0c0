#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/text.h"
#include "cli/log.h"
#include "cli/session.h"
#include "cli/training.h"
#include "cli/verbs.h"
#include "model/json.h"
#include "step/run_dir.h"
#include "step/watch.h"

namespace lockstep::cli {
namespace {

constexpr std::size_t kSpan = 5;        // steps that "first" and "last" are means of
constexpr double kBudgetSeconds = 285;  // with installing and building

/// What one arm showed. Where a number has no meaning for the arm, it is not there.
struct Shown {
  std::string arm;
  double reward_first = 0, reward_last = 0;
  double gap_first = 0, gap_last = 0;
  double p99_first = 0, p99_last = 0;
  std::optional<double> flips, covered;
  double bytes = 0, bytes_full = 0;
  double tokens_per_s = 0;
  double seconds = 0;
};

/// A metric by step, from the run's own metrics.jsonl: a demo that was interrupted goes on.
class Lines {
 public:
  explicit Lines(const std::filesystem::path& folder) {
    std::ifstream in(folder / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) {
      lines_.push_back(value_or_throw(parse_json(line, (folder / "metrics.jsonl").string())));
    }
  }
  std::vector<double> of(const std::string& name) const {
    std::vector<double> values;
    for (const nlohmann::json& line : lines_) {
      const auto found = line.find(name);
      if (found != line.end() && found->is_number()) values.push_back(found->get<double>());
    }
    return values;
  }
  std::optional<double> mean_of(const std::string& name) const {
    const std::vector<double> values = of(name);
    if (values.empty()) return {};
    return step::mean_of_last(values, values.size());
  }

 private:
  std::vector<nlohmann::json> lines_;
};

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double value : values) total += value;
  return total;
}

Shown read_arm(const std::string& arm, const std::filesystem::path& folder,
               const TrainingResult& result) {
  const Lines lines(folder);
  const std::string gap = "train/train_rollout_logprob_abs_diff";
  const std::vector<double> rewards = lines.of("critic/rewards/mean"), gaps = lines.of(gap),
                            p99s = lines.of(gap + "/p99"), seconds = lines.of("timing_s/step");
  return {.arm = arm,
          .reward_first = step::mean_of_first(rewards, kSpan),
          .reward_last = step::mean_of_last(rewards, kSpan),
          .gap_first = step::mean_of_first(gaps, kSpan),
          .gap_last = step::mean_of_last(gaps, kSpan),
          .p99_first = step::mean_of_first(p99s, kSpan),
          .p99_last = step::mean_of_last(p99s, kSpan),
          .flips = lines.mean_of("fp4/act/flip_frac"),
          .covered = lines.mean_of("fp4/guide/covered_frac"),
          .bytes = lines.mean_of("fp4/trace/bytes_per_token").value_or(0),
          .bytes_full = static_cast<double>(result.record_per_token_full),
          .tokens_per_s = sum(lines.of("perf/total_num_tokens")) / std::max(sum(seconds), 1e-9),
          .seconds = sum(seconds)};
}

std::string number(const char* format, double value) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string percent(const std::optional<double>& fraction) {
  return fraction ? number("%.1f %%", 100 * *fraction) : "-";
}

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.insert(0, width - text.size(), ' ');
  return text;
}

std::string table(const std::vector<Shown>& arms) {
  std::string out =
      "  arm          reward         mean |dlogp|        p99 |dlogp|     flips  covered  "
      "bytes a token     tokens/s\n";
  for (const Shown& a : arms) {
    std::string name = a.arm;
    name.resize(std::max<std::size_t>(name.size(), 10), ' ');
    out += "  " + name + number("  %.2f", a.reward_first) + number(" -> %.2f", a.reward_last) +
           number("   %.4f", a.gap_first) + number(" -> %.4f", a.gap_last) +
           number("   %.3f", a.p99_first) + number(" -> %.3f", a.p99_last) +
           padded(percent(a.flips), 9) + padded(percent(a.covered), 9) +
           padded(number("%.0f", a.bytes) + number(" of %.0f", a.bytes_full), 15) +
           padded(number("%.0f", a.tokens_per_s), 13) + "\n";
  }
  return out;
}

const Shown* find_arm(const std::vector<Shown>& arms, const std::string& name) {
  const auto found =
      std::find_if(arms.begin(), arms.end(), [&](const Shown& a) { return a.arm == name; });
  return found == arms.end() ? nullptr : &*found;
}

std::string moved(double first, double last) {
  const double change = last - first;
  if (std::abs(change) < 0.05) return number("held at %.2f", last);
  return (change < 0 ? "fell from " : "rose from ") + number("%.2f", first) +
         number(" to %.2f", last);
}

/// What was seen, whatever it was.
std::string closing(const std::vector<Shown>& arms) {
  std::string out;
  for (const Shown& a : arms) {
    out += (out.empty() ? "Seen: " : "; ") + a.arm + "'s reward " +
           moved(a.reward_first, a.reward_last) + ", its gap went x" +
           number("%.1f", a.gap_last / std::max(a.gap_first, 1e-12));
  }
  out += ".";
  const Shown *bf16 = find_arm(arms, "bf16"), *naive = find_arm(arms, "naive"),
              *trace = find_arm(arms, "trace");
  if (bf16 == nullptr || naive == nullptr || trace == nullptr) return out;
  const double to_bf16 = trace->gap_last / std::max(bf16->gap_last, 1e-12);
  const double to_naive = naive->gap_last / std::max(trace->gap_last, 1e-12);
  const bool followed =
      std::abs(trace->reward_last - bf16->reward_last) <= 0.08 && to_bf16 < 2.5 && to_naive > 3;
  out += " At the end trace's gap is " + number("%.1f", to_bf16) + " times bf16's, naive's is " +
         number("%.1f", to_naive) + " times trace's";
  out += followed ? ": with one bit a code the FP4 rollout stayed in step with training.\n"
                  : ": this run does not show what larger ones do (README says how to read it).\n";
  return out;
}

nlohmann::json optional_json(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

double seconds_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? 0 : std::atof(text);
}

void write_summary(const std::filesystem::path& folder, const std::vector<Shown>& arms,
                   const rollout::Drift& drift, double run_seconds) {
  nlohmann::json summary;
  for (const Shown& a : arms) {
    summary["arms"][a.arm] = {{"reward_first", a.reward_first},
                              {"reward_last", a.reward_last},
                              {"gap_mean_first", a.gap_first},
                              {"gap_mean_last", a.gap_last},
                              {"gap_p99_last", a.p99_last},
                              {"flip_frac", optional_json(a.flips)},
                              {"covered_frac", optional_json(a.covered)},
                              {"bytes_per_token", a.bytes},
                              {"bytes_per_token_full", a.bytes_full},
                              {"tokens_per_s", a.tokens_per_s}};
  }
  summary["drift"] = {{"noise", std::stod(cat({drift.noise}))}, {"split_k", drift.split_k}};
  summary["wall_s"] = {{"install", seconds_of("LOCKSTEP_WALL_INSTALL")},
                       {"build", seconds_of("LOCKSTEP_WALL_BUILD")},
                       {"run", run_seconds}};
  write_text(folder / "summary.json", summary.dump(2) + "\n");
}

/// Runs one arm in its folder. One that has ended is run again; an interrupted one goes on.
Shown run_arm(const DemoArgs& args, const std::string& arm, const std::filesystem::path& root) {
  std::vector<std::string> assignments = args.assignments;
  assignments.push_back("arm=" + arm);
  const recipe::Recipe recipe = load_recipe(args.recipe, assignments);
  const std::filesystem::path folder = root / arm;
  const std::int64_t steps = recipe.schedule.steps;
  if (std::filesystem::exists(folder / "checkpoints" / cat({"step_", steps}))) {
    std::filesystem::remove_all(folder);
  }
  info("");
  info(arm + ":");
  step::Watch watch;
  Progress progress(arm, steps);
  const TrainingResult result =
      run_training(recipe, folder, [&](std::int64_t step, const Metrics& metrics) {
        const std::string line = watch.line(step, steps, metrics);
        if (step == 1 || step % 10 == 0 || step == steps) info("  " + line);
        progress.at(step, line);
      });
  return read_arm(arm, folder, result);
}

}  // namespace

int demo(const DemoArgs& args) {
  const double began = seconds();
  const std::filesystem::path root = run_folder(args.run);
  const recipe::Recipe recipe = load_recipe(args.recipe, args.assignments);
  const bool bypass = recipe.rl.bypass;
  info(cat(
      {"GRPO on ", recipe.model, ", ", recipe.schedule.steps, " steps of ",
       recipe.schedule.prompts_per_step, " prompts x ", recipe.schedule.samples_per_prompt,
       " samples, ",
       bypass ? "clipping only, no importance sampling" : "see the recipe for the correction"}));
  info(cat(
      {"drift between the engines is raised on purpose: drift.noise = ", recipe.rollout.drift.noise,
       ", so that bf16's own gap has the size that large models "
       "show (0.005-0.01)"}));

  const bool chosen = !args.arms.empty();
  std::vector<std::string> names = args.arms;
  if (!chosen) names = {"bf16", "naive", "trace"};
  std::vector<Shown> arms;
  for (const std::string& name : names) arms.push_back(run_arm(args, name, root));
  const double before = seconds_of("LOCKSTEP_WALL_INSTALL") + seconds_of("LOCKSTEP_WALL_BUILD");
  const double slowest =
      std::max_element(arms.begin(), arms.end(), [](const Shown& a, const Shown& b) {
        return a.seconds < b.seconds;
      })->seconds;
  if (!chosen && before + (seconds() - began) + 1.3 * slowest < kBudgetSeconds) {
    arms.push_back(run_arm(args, "trace_mod4", root));
  }

  const double took = seconds() - began;
  write_summary(root, arms, recipe.rollout.drift, took);
  std::printf("\nFirst and last %zu steps:\n\n%s\n%s\n", kSpan, table(arms).c_str(),
              closing(arms).c_str());
  std::printf(
      "dlogp is the trainer's log-prob of a sampled token minus the rollout's; README.md "
      "says what each column means.\n");
  std::printf(
      "Drift: noise of relative size %g on every block output of the rollout, set by the "
      "recipe, in every arm.\n",
      static_cast<double>(recipe.rollout.drift.noise));
  std::printf("Time: %.0f s installing, %.0f s building, %.0f s running.\n",
              seconds_of("LOCKSTEP_WALL_INSTALL"), seconds_of("LOCKSTEP_WALL_BUILD"), took);
  std::printf("Figures: %s\n", (root / "summary.json").c_str());
  report({.runs = {root.string()}, .out = "", .figures = ""});
  std::printf(
      "Next:    ./lockstep demo recipes/demo_tis.toml --run demo_tis   "
      "(the same with importance sampling, cap 5)\n");
  return 0;
}

}  // namespace lockstep::cli
