/// What verbs that run a model start from.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "data/task.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"
#include "recipe/preflight.h"
#include "recipe/recipe.h"
#include "rollout/engine.h"

namespace lockstep::cli {

/// What `act` gives. What it refuses, the caller wrote: Usage.
template <typename Act>
auto of_the_caller(const Act& act) {
  try {
    return act();
  } catch (const Error& error) {
    throw Usage(error.what(), error.where());
  }
}

/// Where the recipe's model lies. Throws Usage where that is not there, or no checkpoint.
std::filesystem::path checkpoint_folder(const std::string& path);

/// A checkpoint, opened: every tensor's name, shape and dtype is checked.
struct Policy {
  std::filesystem::path folder;
  ModelConfig config;
  data::Tokenizer tokenizer;
  std::unique_ptr<CheckpointSource> weights;  // nullptr where it was not asked for
};
Policy open_policy(const std::string& path, bool with_weights = true);

/// Every weight as it is, from a checkpoint into a trainer's masters.
void load(const WeightSource& from, WeightSink& to);

/// The recipe's task for that policy; rows of a file must fit its context. Options that no problem
/// satisfies are Usage.
std::unique_ptr<data::Task> make_task(const data::TaskOptions& options, const Policy& policy,
                                      std::int32_t max_new_tokens, bool need_response = false);

/// Refuses a recipe that sft alone can read, as the caller has named it. Throws Usage.
void require_not_sft(const std::filesystem::path& file, const std::string& name);

/// The recipe of a file, or all defaults where it is empty. What it says wrong is Usage.
recipe::Recipe load_recipe(const std::string& file, const std::vector<std::string>& assignments);

/// The recipe's arm for that model, checked: what contradicts itself is Usage.
Arm checked_arm(const recipe::Recipe& recipe, const ModelConfig& model);

/// What the recipe's device stands for: "auto" is a GPU where its run, or where nothing `trains`
/// its rollouts, has room and all that it needs.
recipe::SettledDevice settled_device(const recipe::Recipe& recipe, const Arm& arm,
                                     const ModelConfig& model, bool trains = true);

/// Settles a device that is left to be chosen, and tells of it in one line where there was a
/// choice.
void settle_device(recipe::Recipe& recipe, const Arm& arm, const ModelConfig& model,
                   bool trains = true);
void settle_device(recipe::SftRecipe& recipe, const recipe::Budget& budget);

/// Throws Error where the recipe's device cannot run it: what is missing, in one line.
Device require_device(const recipe::Recipe& recipe);

/// A run among others, and its folder; "" where it begins anew whatever is there.
struct ComparedRun {
  recipe::Recipe* recipe;
  std::filesystem::path folder;
};
/// The same for runs that are compared, which need one device: what began keeps its own, and the
/// others follow it; else it is `found`, or where that is empty one that does for all.
void settle_device(std::span<const ComparedRun> runs, const std::string& found = "");

/// Refuses runs that began on different devices, or on another than their recipe's: one line with
/// all of them.
void check_devices(std::span<const ComparedRun> runs);

/// The first worked problems of evaluation: what a run is calibrated on.
std::vector<std::vector<Token>> calibration_batch(const Policy& policy, const data::Task& task);

/// The arm, checked, its cache's exponents calibrated on the first worked problems of evaluation
/// where the recipe gives none; those then stand in the recipe. On the CPU always: a recipe's
/// contract must not hang on the device that runs it.
Arm ready_arm(recipe::Recipe& recipe, const Policy& policy, const data::Task& task);

/// Refuses what the disk has no room for, before anything begins: `what` takes `bytes`, `remedy`
/// is what may be done but to free some. `folder` need not be there. Throws Error.
void require_room(const std::filesystem::path& folder, std::int64_t bytes, const char* what,
                  const char* remedy);

/// Refuses what the machine's memory has no room for, before a weight is read; see
/// recipe::require_host_memory(). A verb asks it once it knows its device.
void require_memory(const recipe::Budget& budget, Device device);

/// The same of what sequences leave that are kept in memory to the end: so many bytes a token.
/// `remedy` is what may be done. Throws Error.
void require_memory_of_rows(std::span<const Trajectory> batch, std::int64_t bytes_a_token,
                            const char* remedy);

/// A name below runs/ of the checkout, or a path where it has a slash.
std::filesystem::path run_folder(const std::string& name);

/// The stem of a recipe's file, after which its run is called.
std::string stem(const std::string& recipe_file);

struct PassRate {
  double mean = 0;
  double tokens_per_s = 0;
  double response_length = 0;
};

/// Judges weights on the task's evaluation prompts, under the contract's numbers.
PassRate evaluate(const Agreement& agreement, const WeightSource& weights, const data::Task& task,
                  const recipe::Evaluation& evaluation, const rollout::Options& options,
                  std::int32_t max_new_tokens, Device device = {});

}  // namespace lockstep::cli
