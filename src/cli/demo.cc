#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "cli/arms.h"
#include "cli/columns.h"
#include "cli/log.h"
#include "cli/session.h"
#include "cli/verbs.h"

namespace lockstep::cli {
namespace {

constexpr std::size_t kSpan = 5;        // steps that "first" and "last" are means of
constexpr double kBudgetSeconds = 285;  // with installing and building

const ArmFigures* find_arm(const std::vector<ArmFigures>& arms, const std::string& name) {
  const auto found =
      std::find_if(arms.begin(), arms.end(), [&](const ArmFigures& a) { return a.arm == name; });
  return found == arms.end() ? nullptr : &*found;
}

std::string moved(double first, double last) {
  const double change = last - first;
  if (std::abs(change) < 0.05) return "held at " + fixed(last, 2);
  return (change < 0 ? "fell from " : "rose from ") + fixed(first, 2) + " to " + fixed(last, 2);
}

/// What was seen, whatever it was.
std::string seen(const std::vector<ArmFigures>& arms) {
  std::string out;
  for (const ArmFigures& a : arms) {
    out += (out.empty() ? "Seen: " : "; ") + a.arm + "'s reward " +
           moved(a.reward_first.mean, a.reward_last.mean) + ", its gap went x" +
           fixed(a.gap_last.mean / std::max(a.gap_first.mean, 1e-12), 1);
  }
  out += ".";
  const ArmFigures *bf16 = find_arm(arms, "bf16"), *naive = find_arm(arms, "naive"),
                   *trace = find_arm(arms, "trace");
  if (bf16 == nullptr || naive == nullptr || trace == nullptr) return out;
  const double to_bf16 = trace->gap_last.mean / std::max(bf16->gap_last.mean, 1e-12);
  const double to_naive = naive->gap_last.mean / std::max(trace->gap_last.mean, 1e-12);
  const bool followed = std::abs(trace->reward_last.mean - bf16->reward_last.mean) <= 0.08 &&
                        to_bf16 < 2.5 && to_naive > 3;
  out += " At the end trace's gap is " + fixed(to_bf16, 1) + " times bf16's, naive's is " +
         fixed(to_naive, 1) + " times trace's";
  out += followed ? ": with one bit a code the FP4 rollout stayed in step with training.\n"
                  : ": this run does not show what larger ones do (README says how to read it).\n";
  return out;
}

recipe::Recipe arm_recipe(const DemoArgs& args, const std::string& arm) {
  std::vector<std::string> assignments = args.assignments;
  assignments.push_back("arm=" + arm);
  return load_recipe(args.recipe, assignments);
}

/// The device of all arms.
std::string demo_device(const DemoArgs& args, const std::vector<std::string>& names,
                        const std::filesystem::path& root) {
  std::vector<recipe::Recipe> recipes;
  for (const std::string& name : names) recipes.push_back(arm_recipe(args, name));
  std::vector<ComparedRun> runs;
  for (std::size_t i = 0; i < names.size(); ++i) runs.push_back({&recipes[i], root / names[i]});
  settle_device(runs);
  for (const recipe::Recipe& recipe : recipes) require_device(recipe);
  return recipes.front().device;
}

/// Runs one arm in its folder, goes on with it where it was interrupted, reads it where it has
/// ended.
ArmFigures run_arm(const DemoArgs& args, const std::string& arm, const std::filesystem::path& root,
                   const std::string& device) {
  recipe::Recipe recipe = arm_recipe(args, arm);
  recipe.device = device;
  const std::filesystem::path folder = root / arm;
  info("");
  info(has_ended(folder, recipe.schedule.steps)
           ? cat({arm, ": done before, in ", folder.string(), "; --run NAME begins another"})
           : arm + ":");
  const TrainingResult result = run_shown(recipe, folder, arm);
  return figures_of(arm, {read_shown(folder)}, static_cast<double>(result.record_per_token_full));
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
  const float noise = recipe.rollout.drift.noise;
  if (noise > 0) {
    info(cat({"drift between the engines is raised on purpose: drift.noise = ", noise,
              ", so that bf16's own gap has the size that large models show (0.005-0.01)"}));
  }

  const bool chosen = !args.arms.empty();
  std::vector<std::string> names = args.arms;
  if (!chosen) names = {"bf16", "naive", "trace"};
  // Before the first of them runs.
  for (const std::string& name : names) {
    if (std::count(names.begin(), names.end(), name) > 1) {
      throw Usage(cat({"--arms has ", name, " twice; an arm runs once"}));
    }
    checked_arm(arm_recipe(args, name), open_policy(recipe.model, false).config);
  }
  const std::string device = demo_device(args, names, root);
  std::vector<ArmFigures> arms;
  for (const std::string& name : names) arms.push_back(run_arm(args, name, root, device));
  const double before = seconds_of("LOCKSTEP_WALL_INSTALL") + seconds_of("LOCKSTEP_WALL_BUILD");
  const double slowest =
      std::max_element(arms.begin(), arms.end(), [](const ArmFigures& a, const ArmFigures& b) {
        return a.seconds < b.seconds;
      })->seconds;
  if (!chosen && before + (seconds() - began) + 1.3 * slowest < kBudgetSeconds) {
    arms.push_back(run_arm(args, "trace_mod4", root, device));
  } else if (!chosen) {
    print("\ntrace_mod4 is left out, for want of time: ./lockstep demo --arms trace,trace_mod4\n");
  }

  const double took = run_seconds(arms, seconds() - began);
  write_summary(root, arms, recipe.rollout.drift, took, false);
  print(cat(
      {"\nFirst and last ", kSpan, " steps:\n\n", demo_table(arms), "\n", seen(arms),
       "\ndlogp is the trainer's log-prob of a sampled token minus the rollout's; README.md says "
       "what each column means.\nDrift: ",
       drift_text(recipe.rollout.drift),
       ", in every arm.\nTime: ", fixed(seconds_of("LOCKSTEP_WALL_INSTALL"), 0), " s installing, ",
       fixed(seconds_of("LOCKSTEP_WALL_BUILD"), 0), " s building, ", fixed(took, 0),
       " s running.\nFigures: ", (root / "summary.json").string(), "\n"}));
  report({.runs = {root.string()}, .out = "", .figures = ""});
  print(
      "Next:    ./lockstep demo recipes/demo_tis.toml --run demo_tis   "
      "(the same with importance sampling, cap 5)\n");
  return 0;
}

}  // namespace lockstep::cli
