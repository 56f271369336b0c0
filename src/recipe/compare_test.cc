#include "recipe/compare.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"

namespace lockstep::recipe {
namespace {

class Files : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / name;
    std::ofstream(path) << text;
    return path;
  }
  std::string refusal(const std::string& text) {
    try {
      const Comparison c = read_comparison(write("bad.toml", text), {}, {}, 0);
      for (const std::string& arm : c.arms) c.recipe(arm, 0);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }
};

TEST_F(Files, VariantsGoOverTheFileAndTheCommandLineOverBoth) {
  const auto base = write("base.toml", R"(
seed = 5
arm = "bf16"
[schedule]
steps = 7
[trainer]
lr = 1e-3
[variant.third]
arm = "trace"
guide.layers = "4,5"
)");
  const auto file = write("study.toml", "defaults = \"" + base.string() + R"("
[compare]
arms = ["naive", "third", "trace"]
seeds = 3
[trainer]
lr = 2e-3
[variant.third]
trainer.lr = 3e-3
[variant.trace]
guide.audit_every = 9
)");
  const std::vector<std::string> late = {"schedule.steps=2"};
  const Comparison c = read_comparison(file, late, {}, 0);
  EXPECT_EQ(c.arms, (std::vector<std::string>{"naive", "third", "trace"}));
  EXPECT_EQ(c.seeds, 3);
  const Recipe naive = c.recipe("naive", 0), third = c.recipe("third", 2),
               trace = c.recipe("trace", 1);
  EXPECT_EQ(naive.arm.name, "naive");
  EXPECT_EQ(naive.trainer.lr, 2e-3);
  EXPECT_EQ(naive.schedule.steps, 2);
  EXPECT_EQ(third.arm.name, "trace");
  EXPECT_EQ(third.arm.layers, "4,5");
  EXPECT_EQ(third.trainer.lr, 3e-3);
  EXPECT_EQ(third.schedule.seed, 7u);
  EXPECT_EQ(third.task.arith.seed, 2u);
  EXPECT_EQ(trace.arm.audit_every, 9);
  EXPECT_EQ(trace.arm.layers, "latter_half");
  EXPECT_EQ(trace.schedule.seed, 6u);
  EXPECT_EQ(read_comparison(file, {}, {"w4a4"}, 1).arms, std::vector<std::string>{"w4a4"});
  EXPECT_EQ(read_comparison(file, {}, {"w4a4"}, 1).seeds, 1);

  // `train` runs one of them, and leaves the comparison aside.
  const std::vector<std::string> one = {"arm=third", "trainer.lr=4e-3"};
  const Recipe alone = read_recipe(file, one);
  EXPECT_EQ(alone.arm.layers, "4,5");
  EXPECT_EQ(alone.trainer.lr, 4e-3);
  EXPECT_EQ(read_recipe(file, {}).arm.name, "bf16");
}

TEST_F(Files, WhatIsWrongIsSaidInOneLine) {
  EXPECT_NE(refusal("[compare]\narms = \"trace\"").find("bad.toml:2"), std::string::npos);
  EXPECT_NE(refusal("[compare]\narms = [\"x\"]").find("there is no arm 'x'"), std::string::npos);
  EXPECT_NE(refusal("[compare]\narms = []").find("names no arms"), std::string::npos);
  EXPECT_NE(refusal("variant.x = 3").find("[variant.LABEL]"), std::string::npos);
  EXPECT_NE(refusal("[compare]\narms=[\"x\"]\n[variant.x]\narm = 3").find("in quotes"),
            std::string::npos);
  EXPECT_NE(
      refusal("[compare]\narms=[\"x\"]\n[variant.x]\narm=\"trace\"\nlr=3").find("unknown key"),
      std::string::npos);
  EXPECT_NE(refusal("compare = 5").find("compare is a section"), std::string::npos);
  EXPECT_NE(refusal("variant = 5").find("[variant.LABEL]"), std::string::npos);
  // What is not compared today is read all the same.
  EXPECT_NE(refusal("[compare]\narms=[\"bf16\"]\n[variant.x]\narm=\"trase\"").find("variant.x: "),
            std::string::npos);
  const Comparison late = read_comparison(
      write("late.toml", "seed = 9007199254740991\n[compare]\narms=[\"bf16\"]\nseeds=3"), {}, {},
      0);
  EXPECT_EQ(late.recipe("bf16", 1).schedule.seed, 9007199254740992u);
  EXPECT_THROW(late.recipe("bf16", 2), Error);  // recipe.toml of such a run could not be read
  const auto self = write("self.toml", "");
  write("self.toml", "defaults = \"" + self.string() + "\"");
  EXPECT_THROW(read_comparison(self, {}, {}, 0), Error);
}

}  // namespace
}  // namespace lockstep::recipe
