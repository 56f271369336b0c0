#include "cli/subject.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/inspect.h"
#include "cli/json_text.h"
#include "cli/log.h"
#include "cli/verbs.h"
#include "sync/refit.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

/// The newest checkpoints/step_N of a run, "" where it has none.
std::string newest_checkpoint(const fs::path& run) {
  std::int64_t newest = -1;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", none)) {
    const std::string name = entry.path().filename().string();
    const char* const end = name.data() + name.size();
    std::int64_t step = 0;
    if (!name.starts_with("step_")) continue;
    if (std::from_chars(name.data() + 5, end, step).ptr == end) newest = std::max(newest, step);
  }
  return newest < 0 ? "" : (run / "checkpoints" / cat({"step_", newest})).string();
}

const char* finish_name(Finish finish) {
  switch (finish) {
    case Finish::kNone: return "none";
    case Finish::kStop: return "stop";
    case Finish::kLength: return "length";
    case Finish::kAborted: return "aborted";
  }
  return "";
}

/// The recipe that `what` stands for, with the model to take where it names one.
recipe::Recipe recipe_of(std::string what, std::vector<std::string> assignments, std::string model,
                         bool& default_task) {
  if (what.find('=') != std::string::npos && !fs::exists(what)) {
    assignments.insert(assignments.begin(), what);  // the recipe was left out
    what.clear();
  }
  fs::path path = what;
  if (!what.empty()) path = recipe::find(what, "the recipe");
  if (fs::is_directory(path)) {
    what.clear();
    if (fs::exists(path / "config.json")) {
      if (model.empty()) model = path.string();
    } else if (fs::exists(path / "recipe.toml")) {
      if (model.empty()) model = newest_checkpoint(path);
      what = (path / "recipe.toml").string();
    } else {
      const std::string inside = runs_inside(path);
      throw Usage(
          cat({path.string(), " has neither config.json (a checkpoint) nor recipe.toml (a ",
               "run); name one that has, or a recipe", inside.empty() ? "" : ": ", inside}));
    }
  }
  default_task =
      what.empty() && std::none_of(assignments.begin(), assignments.end(),
                                   [](const std::string& a) { return a.starts_with("task."); });
  recipe::Recipe recipe = load_recipe(what, assignments);
  if (!model.empty()) recipe.model = model;
  return recipe;
}

}  // namespace

std::string Subject::numbers() const {
  return cat({"arm ", arm.name, ", contract ", recipe.arm.contract, " (",
              hex(arm.contract.id().value), ")"});
}

std::string Subject::asked() const {
  const data::ArithOptions& arith = recipe.task.arith;
  if (recipe.task.name != "arith") return cat({recipe.task.name, " (", recipe.task_file, ")"});
  std::string text = cat({"arith (", arith.left[0], " to ", arith.left[1], " ", arith.operations,
                          " ", arith.right[0], " to ", arith.right[1], ")"});
  if (!default_task) return text;
  text += ", the default";
  if (fs::exists(policy.folder / "sft.toml")) text += "; its sft.toml says what it was taught";
  return text;
}

Subject open_subject(const std::string& what, const std::vector<std::string>& assignments,
                     const std::string& model, bool trains) {
  bool default_task = false;
  recipe::Recipe recipe = recipe_of(what, assignments, model, default_task);
  Policy policy = open_policy(recipe.model);
  auto task = make_task(recipe.task, policy, recipe.schedule.sampling.max_new_tokens);
  // Before a weight is read for calibration.
  const Arm checked = checked_arm(recipe, policy.config);
  settle_device(recipe, checked, policy.config, trains);
  recipe::Budget budget = recipe::budget(recipe, checked, policy.config);
  budget.evaluation = 0;
  if (!trains) budget.trainer = budget.trainer_most = budget.read_ahead = 0;
  const Device device = recipe::ready_device(recipe.device, budget);
  require_memory(budget, device);
  Arm arm = ready_arm(recipe, policy, *task);
  Agreement agreement = {policy.config, arm.contract, arm.guide, recipe.schedule.seed};
  return {.recipe = std::move(recipe),
          .policy = std::move(policy),
          .task = std::move(task),
          .arm = std::move(arm),
          .agreement = std::move(agreement),
          .device = device,
          .default_task = default_task};
}

void load(const Subject& subject, rollout::Engine& engine) {
  sync::refit(*subject.policy.weights, engine.weights(), subject.arm.contract, WeightVersion{0});
}

std::vector<Trajectory> answer(rollout::Engine& engine, std::span<const data::Prompt> prompts,
                               std::int32_t samples, const Sampling& sampling, std::uint64_t seed) {
  std::map<PromptId, std::size_t> places;
  std::vector<Trajectory> answers(prompts.size() * static_cast<std::size_t>(samples));
  for (const data::Prompt& prompt : prompts) {
    places.emplace(prompt.id, places.size() * static_cast<std::size_t>(samples));
    engine.submit({.prefix = {.prompt = prompt.id, .tokens = prompt.tokens, .sampling = sampling},
                   .num_samples = samples,
                   .seed = seed});
  }
  Progress progress("answers", std::ssize(answers));
  std::int64_t done = 0;
  while (!engine.idle()) {
    for (Trajectory& trajectory : engine.step()) {
      const std::size_t place =
          places.at(trajectory.prompt) + static_cast<std::size_t>(trajectory.sample);
      answers[place] = std::move(trajectory);
      ++done;
    }
    progress.at(done);
    if (engine.held_back()) {
      throw Error(
          "the record store has no room for one more sequence; raise store.ram or store.disk, or "
          "lower rollout.max_new_tokens");
    }
  }
  return answers;
}

std::string answer_line(const Subject& subject, const data::Prompt& prompt,
                        const Trajectory& trajectory, float reward) {
  const std::span tokens(trajectory.tokens);
  const std::size_t given = prompt.tokens.size();
  return cat({"{\"prompt_id\":",
              prompt.id.value,
              ",\"sample\":",
              trajectory.sample,
              ",\"data_source\":",
              json_text(prompt.data_source),
              ",\"prompt\":",
              json_text(prompt.text),
              ",\"response\":",
              json_text(subject.policy.tokenizer.decode(tokens.subspan(given))),
              ",\"ground_truth\":",
              json_text(prompt.ground_truth),
              ",\"reward\":",
              prompt.ground_truth.empty() ? std::string("null") : json_text(reward),
              ",\"finish\":\"",
              finish_name(trajectory.finish),
              "\",\"contract\":\"",
              hex(subject.arm.contract.id().value),
              "\",\"prompt_len\":",
              given,
              ",\"tokens\":",
              json_text(tokens),
              ",\"rollout_logp\":",
              json_text(trajectory.rollout_logp, trajectory.response_mask),
              "}"});
}

}  // namespace lockstep::cli
