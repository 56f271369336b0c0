// Every arm, and every recipe of the checkout, runs ten steps; a few of them in each test run.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/text.h"
#include "cli/session.h"
#include "cli/training.h"
#include "recipe/compare.h"
#include "rollout/door.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kSmall = {
    "schedule.steps=10",         "schedule.prompts=4", "schedule.samples=4",
    "schedule.save_every=10",    "eval.prompts=4",     "schedule.keep=1",
    "schedule.rescore_every=10", "store.on_disk=true"};

/// Ten steps: all are measured, the policy moves, and what is guided finds its records.
void expect_ten_steps(recipe::Recipe recipe, const std::string& name) {
  recipe.schedule.sampling.max_new_tokens = std::min(recipe.schedule.sampling.max_new_tokens, 48);
  const fs::path folder = fs::path(testing::TempDir()) / ("arms_test_" + name);
  fs::remove_all(folder);
  std::int64_t steps = 0;
  double moved = 0;
  run_training(recipe, folder, [&](std::int64_t step, const Metrics& metrics) {
    EXPECT_EQ(step, ++steps);
    EXPECT_TRUE(std::isfinite(metrics.at("critic/rewards/mean")));
    moved += metrics.at("actor/grad_norm");
    if (const auto covered = metrics.find("fp4/guide/covered_frac"); covered != metrics.end()) {
      EXPECT_EQ(covered->second, 1);
    }
  });
  EXPECT_EQ(steps, 10);
  EXPECT_GT(moved, 0);
  EXPECT_TRUE(fs::exists(folder / "checkpoints/step_10/model.safetensors"));
  fs::remove_all(folder);
}

recipe::Recipe demo_with(const std::string& arm) {
  std::vector<std::string> assignments = kSmall;
  assignments.push_back("arm=" + arm);
  // An arm with a loss of its own weighs tokens by the gap, which the demo's plain form does not.
  const bool plain = !arm_spec(arm).surrogate;
  return load_recipe(plain ? "recipes/demo.toml" : "recipes/demo_tis.toml", assignments);
}

class Arms : public testing::TestWithParam<std::string> {};
TEST_P(Arms, RunTenSteps) { expect_ten_steps(demo_with(GetParam()), GetParam()); }
INSTANTIATE_TEST_SUITE_P(Some, Arms, testing::Values("bf16", "quads", "trace_mod4"),
                         [](const auto& param) { return param.param; });
INSTANTIATE_TEST_SUITE_P(Nightly, Arms, testing::ValuesIn(arm_names()),
                         [](const auto& param) { return param.param; });

/// Whether or not there is a GPU here.
TEST(AllArms, HaveTheirKernelsOnAGpu) {
  for (const std::string& name : arm_names()) {
    const recipe::Recipe recipe = demo_with(name);
    const ModelConfig model = open_policy(recipe.model, false).config;
    const Arm arm = checked_arm(recipe, model);
    EXPECT_NO_THROW(rollout::require_runs({model, arm.contract, arm.guide, 0}, arm.rollout,
                                          {Device::Kind::kCuda, 0}))
        << name;
  }
}

/// The recipes that train, those of recipes/studies among them.
std::vector<std::string> recipe_files() {
  std::vector<std::string> files;
  std::error_code none;
  for (const auto& entry : fs::recursive_directory_iterator("recipes", none)) {
    if (entry.path().extension() != ".toml") continue;
    if (entry.path().filename().string().find("sft") != std::string::npos) continue;
    files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string word(const testing::TestParamInfo<std::string>& param) {
  std::string name = fs::path(param.param).stem().string();
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
}

class Recipes : public testing::TestWithParam<std::string> {};

/// The labels of a comparison; "" for a recipe of one arm.
std::vector<std::string> labels(const std::string& file) {
  try {
    return recipe::read_comparison(file, {}, {}, 0).arms;
  } catch (const Error&) {
    return {""};
  }
}

/// Where another recipe has to make the model first: the tiny one and what it was taught, on the
/// CPU.
recipe::Recipe here(const std::string& file, std::vector<std::string> assignments) {
  if (recipe::Recipe recipe = load_recipe(file, assignments); fs::exists(recipe.model))
    return recipe;
  assignments.insert(assignments.end(), {"model=models/tiny-moe", "device=cpu",
                                         "task.left=[10, 999]", "task.right=[2, 99]"});
  return load_recipe(file, assignments);
}

TEST(RecipesOfTheCheckout, EveryArmCanBegin) {
  EXPECT_GT(recipe_files().size(), 8u);
  for (const std::string& file : recipe_files()) {
    for (const std::string& label : labels(file)) {
      SCOPED_TRACE(file + " " + label);
      std::vector<std::string> assignments;
      if (!label.empty()) assignments.push_back("arm=" + label);
      const recipe::Recipe recipe = here(file, assignments);
      const Policy policy = open_policy(recipe.model, false);
      EXPECT_NO_THROW(checked_arm(recipe, policy.config));
    }
  }
}

TEST_P(Recipes, NightlyEveryArmRunsTenSteps) {
  for (const std::string& label : labels(GetParam())) {
    SCOPED_TRACE(label);
    std::vector<std::string> assignments = kSmall;
    if (!label.empty()) assignments.push_back("arm=" + label);
    expect_ten_steps(here(GetParam(), assignments), fs::path(GetParam()).stem().string() + label);
  }
}

// What lies in recipes/ is a file's matter: the working directory is the checkout.
INSTANTIATE_TEST_SUITE_P(Checkout, Recipes, testing::ValuesIn(recipe_files()), word);

}  // namespace
}  // namespace lockstep::cli
