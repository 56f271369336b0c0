#include "recipe/preflight.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/error.h"

namespace lockstep::recipe {
namespace {

ModelConfig tiny() {
  return {.num_layers = 2,
          .hidden = 64,
          .expert_width = 32,
          .num_experts = 8,
          .experts_per_token = 2,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 32,
          .vocabulary = 64};
}

TEST(Preflight, AutoTellsWhatWasInTheWayAndNoRemedyThatItHasTaken) {
  EXPECT_EQ(why_not_cuda("device is cuda: there is no NVIDIA driver on this machine; use device = "
                         "\"cpu\""),
            "there is no NVIDIA driver on this machine");
  EXPECT_EQ(
      why_not_cuda("device = \"cuda\": the driver is old; update it, or use device = \"cpu\""),
      "the driver is old; update it");
  EXPECT_EQ(why_not_cuda("hidden is 40, and that is too little; use device = \"cpu\""),
            "hidden is 40, and that is too little");
  const std::string full = "device is cuda, which has 1 GiB of 2 GiB free; 3 GiB are needed";
  EXPECT_EQ(why_not_cuda(full), full);
  if (!why_unusable({Device::Kind::kCuda, 0}).empty()) {
    const std::string why = settle_device(kAutoDevice, Budget{}, [](Device) {}).why;
    EXPECT_EQ(why.empty(), !std::filesystem::exists("/dev/nvidiactl"));
    EXPECT_EQ(why.find("device"), why.find("device on this machine")) << why;
  }
}

TEST(Preflight, ATrainerTakesMoreOfAGpu) {
  EXPECT_EQ(trainer_bytes("cpu", false), 16);
  EXPECT_EQ(trainer_bytes("cuda", true), 18);
  EXPECT_EQ(trainer_bytes("cuda:1", false), 20);
}

std::string refusal(const Recipe& recipe) {
  const ModelConfig model = tiny();
  try {
    check(recipe, bind(recipe.arm, model, recipe.rollout, recipe.rl), model);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

Budget budget_of(const Recipe& recipe) {
  const ModelConfig model = tiny();
  return budget(recipe, bind(recipe.arm, model, recipe.rollout, recipe.rl), model);
}

TEST(Preflight, ATrainersMemoryHoldsItsWeights) {
  Budget b = {.parameters = 1 << 20, .trainer = 18 << 20};
  EXPECT_NO_THROW(require_trainer_memory(0, b));
  EXPECT_NO_THROW(require_trainer_memory((18 << 20) + 1, b));
  const auto line = [&] {
    try {
      require_trainer_memory(18 << 20, b);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(line(),
            "trainer.memory is 18 MiB, and weights, gradients and moments of a trainer of 1048576 "
            "parameters take 18 MiB of it before a token is read: raise it, or set it to 0 for "
            "what is free");
  b = {.parameters = 1 << 20, .trainers = 2, .trainer = 36 << 20};
  EXPECT_NE(line().find("of the policy's trainer and the reference's, each of 1048576 parameters "
                        "take 36 MiB"),
            std::string::npos)
      << line();
}

/// Weights, their codes and two trainers count against the limit that a GPU sets, and a CPU's
/// trainer has none.
TEST(Preflight, ATrainersMemoryCountsOnAGpuAlone) {
  for (const char* more :
       {"arm = \"trace\"", "arm = \"trace\"\nrl.kl_weight = 0.1", "arm = \"qarl\""}) {
    Recipe recipe = parse_recipe(std::string(more) + "\ndevice = \"cuda\"", "r");
    const std::int64_t least = budget_of(recipe).trainer;
    recipe.trainer.memory_bytes = least;
    EXPECT_NE(refusal(recipe).find("trainer.memory is "), std::string::npos) << more;
    recipe.trainer.memory_bytes = least + 1;
    EXPECT_EQ(refusal(recipe), "") << more;
    recipe.trainer.memory_bytes = 3 * least;
    EXPECT_EQ(budget_of(recipe).trainer_most, 3 * least);
    recipe.device = "cpu";
    const Budget b = budget_of(recipe);
    EXPECT_EQ(b.trainer_most, b.trainer) << more;
    EXPECT_EQ(b.host(), b.rollout_weights + b.cache + b.trainer + b.evaluation);
    recipe.trainer.memory_bytes = 1;
    EXPECT_EQ(refusal(recipe), "") << more;
    recipe.device = kAutoDevice;
    const bool is_there = why_unusable({Device::Kind::kCuda, 0}).empty();
    EXPECT_EQ(refusal(recipe).empty(), !is_there) << more;
  }
}

}  // namespace
}  // namespace lockstep::recipe
