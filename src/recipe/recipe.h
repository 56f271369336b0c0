/// Recipes: a TOML file that fills in the options of every stage. `recipes/` has examples; the
/// resolved copy in each run directory prints every key with its value and what it means.
#pragma once

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tasks.h"
#include "model/config.h"
#include "recipe/arm.h"
#include "recipe/schedule.h"
#include "recipe/table.h"
#include "store/store.h"

namespace lockstep::recipe {

/// A checkpoint now and then, judged on prompts apart from those of any step.
struct Evaluation {
  std::int64_t every = 0;  // steps; 0: only at the end
  std::int32_t prompts = 64;
  float temperature = 1.0f;
  float top_p = 1.0f;
  std::int32_t top_k = 0;
};

/// A device to be chosen when a run begins.
inline constexpr const char* kAutoDevice = "auto";

/// What `lockstep train` does.
struct Recipe {
  std::string device = kAutoDevice;       // of engine and trainer: settle_device(), device_named()
  std::string model = "models/tiny-moe";  // a Hugging Face directory
  ArmSpec arm = arm_spec("trace");
  data::TaskOptions task;
  std::string task_file{};  // below the checkout, or as it stands
  std::string task_eval_file{};
  Schedule schedule{.sampling = {.max_new_tokens = 128}};
  rollout::Options rollout;
  train::Options trainer;
  rl::Options rl;
  store::Options store;
  bool store_on_disk = true;  // below the run directory
  Evaluation evaluation;
};

/// What `lockstep sft` does: a model is taught by worked solutions.
struct SftRecipe {
  std::string device = kAutoDevice;
  std::string model = "models/tiny-moe";  // a Hugging Face directory, with or without weights
  bool fresh = false;                     // draw new ones
  float init_std = 0.02f;
  data::TaskOptions task;
  std::string task_file{};  // below the checkout, or as it stands
  std::string task_eval_file{};
  train::Options trainer;
  std::int64_t steps = 1000;
  std::int32_t batch = 64;  // solutions a step
  std::uint64_t seed = 0;
  std::int64_t save_every = 100;  // steps; 0: nothing before the end
  std::int32_t eval_prompts = 256;
  std::int32_t max_new_tokens = 128;
};

/// The keys of a recipe, bound to it. One list for reading, complaints and the resolved copy.
std::vector<Key> keys(Recipe& recipe);
std::vector<Key> keys(SftRecipe& recipe);

/// A file and what the command line adds: `arm` first, then every other key over it. `arm` may name
/// a variant of the file's, see compare.h. Throws Error.
Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> assignments);
/// Is the file a recipe of sft, and none of train?
bool is_sft(const std::filesystem::path& file);
SftRecipe read_sft_recipe(const std::filesystem::path& file,
                          std::span<const std::string> assignments);

/// The entries of a file, over those of the file that its key `defaults` names. Throws Error.
std::vector<Entry> read_entries(const std::filesystem::path& file);

/// The recipe of entries, none twice: `arm` first, then every other key over it.
Recipe recipe_of(std::span<const Entry> entries);

/// The same of text; `name` stands for the file in complaints.
Recipe parse_recipe(std::string_view text, const std::string& name,
                    std::span<const std::string> assignments = {});

/// Every key, default or not, with the contract's id on the first line.
std::string resolved(const Recipe& recipe, ContractId contract);
std::string resolved(const SftRecipe& recipe);

/// What keeps a run that began with one resolved recipe from going on with another: differences(),
/// without those that only extend it, which are more schedule.steps (unless the rollout's noise is
/// staged over them), schedule.save_every, schedule.keep, eval.every and what memory there may be.
std::string hindrances(std::string_view before, std::string_view after,
                       const std::string& old_file = "the old recipe");

/// The lines of differences() or hindrances() in one.
std::string in_one_line(std::string differences);

/// Says which those are, for whoever is refused.
inline constexpr const char* kExtending =
    "a run goes on with more schedule.steps, and other schedule.save_every, schedule.keep, "
    "eval.every, trainer.memory, trainer.recompute, rollout.cache, rollout.swap, store.ram and "
    "store.disk";

/// The keys that calibration fills in when a run begins, where its recipe leaves them empty. They
/// are the run's from then on, and no part of its method: seeds of one arm differ in them.
inline constexpr std::string_view kCalibrated[] = {"contract.kv_exponents", "residual.groups"};

constexpr bool is_calibrated(std::string_view key) {
  return std::find(std::begin(kCalibrated), std::end(kCalibrated), key) != std::end(kCalibrated);
}

/// Takes what a run settled when it began from its resolved recipe `began`, now that it is to go
/// on: the calibrated keys that `recipe` leaves empty, and the device where it leaves that to auto.
/// Throws Error naming `file` where that is no recipe.
void take_settled(std::string_view began, const std::string& file, Recipe& recipe);

/// A path of a recipe: as it stands, else below the checkout (LOCKSTEP_HOME). Throws Usage with
/// `key` where neither is there.
std::filesystem::path find(const std::string& path, const std::string& key);

/// What else a file that is no recipe for sft is: "train" or "compare", the verb that takes it; ""
/// where it is none of them either.
std::string other_verb(const std::filesystem::path& file);

/// The same of a file, or a pipe: a folder is refused.
std::filesystem::path find_file(const std::string& path, const std::string& key);

}  // namespace lockstep::recipe
