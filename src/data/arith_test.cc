#include "data/arith.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "data/shuffle.h"
#include "data/test_tokenizer.h"
#include "record/trajectory.h"

namespace lockstep::data {
namespace {

TEST(Shuffle, IsAPermutationUnderEveryKey) {
  for (std::int64_t n : {1, 2, 3, 5, 64, 100, 1000, 7717}) {
    for (std::uint64_t key : {0ull, 1ull, 0xFFFFFFFFFFFFFFFFull}) {
      std::vector<bool> seen(static_cast<std::size_t>(n));
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t at = shuffled(key, i, n);
        ASSERT_GE(at, 0);
        ASSERT_LT(at, n);
        ASSERT_FALSE(seen[static_cast<std::size_t>(at)]) << n << " " << key << " " << i;
        seen[static_cast<std::size_t>(at)] = true;
      }
    }
  }
}

TEST(Shuffle, MixesAndDependsOnTheKey) {
  constexpr std::int64_t kSize = 10000;
  std::int64_t lower_half = 0;
  std::int64_t same = 0;
  for (std::int64_t i = 0; i < kSize / 2; ++i) {
    lower_half += shuffled(7, i, kSize) < kSize / 2;
    same += shuffled(7, i, kSize) == shuffled(8, i, kSize);
  }
  EXPECT_NEAR(static_cast<double>(lower_half), kSize / 4, 150);
  EXPECT_LT(same, 10);
}

TEST(Arith, WorkedSteps) {
  EXPECT_EQ(worked_steps(37, '*', 6), "30*6=180;7*6=42;180+42=222");
  EXPECT_EQ(worked_steps(37, '*', 46), "37*40=1480;37*6=222;1480+222=1702");
  EXPECT_EQ(worked_steps(30, '*', 6), "180");
  EXPECT_EQ(worked_steps(12, '*', 0), "10*0=0;2*0=0;0+0=0");
  EXPECT_EQ(worked_steps(37, '*', 40), "30*40=1200;7*40=280;1200+280=1480");
  EXPECT_EQ(worked_steps(12, '*', 345), "12*300=3600;12*40=480;12*5=60;3600+480=4080;4080+60=4140");
  EXPECT_EQ(worked_steps(347, '+', 586), "347+500=847;847+80=927;927+6=933");
  EXPECT_EQ(worked_steps(347, '-', 586), "347-500=-153;-153-80=-233;-233-6=-239");
  EXPECT_EQ(worked_steps(347, '+', 5), "352");
}

TEST(Arith, NoTwoStepsShareAPromptAndEvaluationSharesNoneWithThem) {
  const ArithOptions options = {.operations = "*+", .left = {10, 40}, .right = {2, 40}, .seed = 3};
  const Arith task(options, byte_tokenizer());
  const std::int64_t all = 31 * 39 * 2;
  EXPECT_EQ(task.training_problems() + task.evaluation_problems(), all);
  std::set<std::string> seen;
  std::set<std::int64_t> ids;
  const auto take = [&](const std::vector<Prompt>& prompts) {
    for (const Prompt& prompt : prompts) {
      EXPECT_TRUE(seen.insert(prompt.text).second) << prompt.text;
      EXPECT_TRUE(ids.insert(prompt.id.value).second) << prompt.id.value;
    }
  };
  take(task.evaluation(static_cast<std::int32_t>(task.evaluation_problems())));
  const std::int64_t steps = task.training_problems() / 32;
  for (std::int64_t step = 0; step < steps; ++step) take(task.prompts(step, 32));
  EXPECT_THROW(task.prompts(steps, 32), Error);
  EXPECT_THROW(task.evaluation(static_cast<std::int32_t>(all)), Error);
}

/// A record's name must give back the prompt's number, or two prompts would share records.
std::int64_t prompt_in(SpanId span) {
  return static_cast<std::int64_t>(span.value >> 20 & 0xfffffff);
}

TEST(Arith, EveryPromptsNumberFitsTheNamesOfItsRecords) {
  const Arith task({.repeat = true}, byte_tokenizer());
  for (const Prompt& prompt : task.evaluation(8)) {
    EXPECT_GE(prompt.id.value, kFirstEvaluationId);
    EXPECT_EQ(prompt_in(span_id(3, prompt.id, 1, 2)), prompt.id.value);
  }
  const std::int64_t last = kFirstEvaluationId / 4 - 1;  // of the steps of four whose numbers fit
  const Prompt prompt = task.prompts(last, 4).back();
  EXPECT_EQ(prompt.id.value, kFirstEvaluationId - 1);
  EXPECT_EQ(prompt_in(span_id(3, prompt.id, 1, 2)), prompt.id.value);
  EXPECT_THROW(task.prompts(last + 1, 4), Error);
  EXPECT_EQ(evaluation_id(kFirstEvaluationId - 1).value, 0xfffffff);
  EXPECT_THROW(evaluation_id(kFirstEvaluationId), Error);
}

TEST(Arith, RepeatsWholePassesInAnotherOrder) {
  const ArithOptions options = {.left = {10, 19}, .right = {2, 9}, .repeat = true};
  const Arith task(options, byte_tokenizer());
  const auto size = static_cast<std::int32_t>(task.training_problems());
  std::multiset<std::string> first, second;
  std::vector<std::string> in_order[2];
  for (std::int64_t pass : {0, 1}) {
    for (const Prompt& prompt : task.prompts(pass, size)) {
      (pass == 0 ? first : second).insert(prompt.text);
      in_order[pass].push_back(prompt.text);
    }
  }
  EXPECT_EQ(first, second);
  EXPECT_NE(in_order[0], in_order[1]);
}

TEST(Arith, EvaluationIsTheSameUnderEverySeed) {
  const Arith one({.seed = 1}, byte_tokenizer());
  const Arith two({.seed = 2}, byte_tokenizer());
  const auto a = one.evaluation(50);
  const auto b = two.evaluation(50);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].text, b[i].text);
  EXPECT_NE(one.prompts(0, 1)[0].text, two.prompts(0, 1)[0].text);
}

TEST(Arith, TheWorkedSolutionIsRewardedAndOthersAreNot) {
  const Tokenizer tokenizer = byte_tokenizer();
  for (std::int32_t level = 1; level <= 5; ++level) {
    ArithOptions options = arith_level(level);
    options.operations = "*+-";
    const Arith task(options, tokenizer);
    for (const Prompt& prompt : task.prompts(1, 200)) {
      std::vector<Token> response = tokenizer.encode(prompt.solution + "<|endoftext|>");
      EXPECT_EQ(task.reward(prompt, response), 1.0f) << prompt.text << prompt.solution;
      response.insert(response.end() - 1, *tokenizer.find("1"));
      EXPECT_EQ(task.reward(prompt, response), 0.0f) << prompt.text << prompt.solution;
      EXPECT_EQ(task.reward(prompt, {}), 0.0f);
    }
  }
}

TEST(Arith, R95_OptionsOutOfRangeAreRefusedByKey) {
  const auto message = [](const ArithOptions& options) -> std::string {
    try {
      Arith(options, byte_tokenizer());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message({.operations = "/"}).find("task.operations"), std::string::npos);
  EXPECT_NE(message({.operations = ""}).find("task.operations"), std::string::npos);
  EXPECT_NE(message({.operations = "**"}).find("task.operations"), std::string::npos);
  EXPECT_NE(message({.left = {9, 3}}).find("task.left"), std::string::npos);
  EXPECT_NE(message({.right = {-1, 3}}).find("task.right"), std::string::npos);
  EXPECT_NE(message({.right = {0, 1 << 30}}).find("task.right"), std::string::npos);
  EXPECT_NE(message({.left = {1, 1}, .right = {1, 2}}).find("arith"), std::string::npos);
  EXPECT_THROW(arith_level(0), Error);
}

}  // namespace
}  // namespace lockstep::data
