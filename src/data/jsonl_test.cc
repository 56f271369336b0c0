#include "data/jsonl.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "base/error.h"
#include "data/tasks.h"
#include "data/test_tokenizer.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

class JsonlFile : public testing::Test {
 protected:
  JsonlFile() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    path_ = fs::path(testing::TempDir()) / (std::string("jsonl_") + test->name() + ".jsonl");
  }
  ~JsonlFile() override { fs::remove(path_); }

  void write(const std::string& text) const { std::ofstream(path_, std::ios::binary) << text; }

  void write_sums(int count) const {
    std::string text;
    for (int i = 0; i < count; ++i) {
      text += R"({"prompt": "1+)" + std::to_string(i) +
              R"(=", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": ")" +
              std::to_string(i + 1) + R"("}, "extra_info": {"index": [1, {}]}})" + "\n";
    }
    write(text);
  }

  Jsonl open(JsonlOptions options = {}, std::optional<ChatTemplate> chat = std::nullopt) const {
    options.file = path_;
    return Jsonl(options, byte_tokenizer(), std::move(chat));
  }

  std::string message(const JsonlOptions& options = {}) const {
    try {
      open(options);
    } catch (const Error& error) {
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
      return error.what();
    }
    return "";
  }

  fs::path path_;
};

TEST_F(JsonlFile, EpochsAreShuffledWholesAndEvaluationIsApart) {
  write_sums(50);
  const Jsonl task = open({.seed = 5});
  EXPECT_EQ(task.training_rows(), 45);
  EXPECT_EQ(task.evaluation_rows(), 5);
  std::set<std::string> evaluation;
  for (const Prompt& prompt : task.evaluation(5)) evaluation.insert(prompt.text);
  std::vector<std::string> epochs[2];
  std::set<std::int64_t> ids;
  for (std::int64_t step = 0; step < 18; ++step) {
    for (const Prompt& prompt : task.prompts(step, 5)) {
      epochs[step / 9].push_back(prompt.text);
      EXPECT_FALSE(evaluation.contains(prompt.text));
      EXPECT_TRUE(ids.insert(prompt.id.value).second);
      EXPECT_EQ(prompt.data_source, "sums");
    }
  }
  EXPECT_NE(epochs[0], epochs[1]);
  for (auto& epoch : epochs) {
    EXPECT_EQ(std::set<std::string>(epoch.begin(), epoch.end()).size(), 45u);
  }
  EXPECT_EQ(open({.seed = 5}).prompts(3, 5)[2].text, epochs[0][17]);
  EXPECT_NE(open({.seed = 6}).prompts(3, 5)[2].text, epochs[0][17]);
  EXPECT_THROW(task.evaluation(6), Error);
  EXPECT_EQ(task.evaluation(5)[4].id.value, kFirstEvaluationId + 4);
  EXPECT_EQ(task.prompts(kFirstEvaluationId / 8 - 1, 8)[7].id.value, kFirstEvaluationId - 1);
  EXPECT_THROW(task.prompts(kFirstEvaluationId / 8, 8), Error);
}

TEST_F(JsonlFile, RewardsByAnswerAndForm) {
  write(R"({"prompt": "half?", "reward_model": {"ground_truth": "1/2"}})"
        "\n\n"
        R"({"prompt": "number?", "reward_model": {"ground_truth": 0.5}})");
  const Jsonl task = open({.form = Form::kBoxed, .form_weight = 0.25f});
  const Prompt prompt = task.prompts(0, 1)[0];
  EXPECT_EQ(prompt.data_source, path_.stem().string());
  const Tokenizer tokenizer = byte_tokenizer();
  const auto reward = [&](const char* text) { return task.reward(prompt, tokenizer.encode(text)); };
  EXPECT_EQ(reward("so \\boxed{\\frac{1}{2}}<|im_end|>"), 1.0f);
  EXPECT_EQ(reward("so 0.5"), 0.75f);
  EXPECT_EQ(reward("\\boxed{3}"), 0.25f);
  EXPECT_EQ(reward("no"), 0.0f);
  EXPECT_EQ(task.evaluation(1)[0].ground_truth, "0.5");
}

TEST_F(JsonlFile, ABadRowNamesFileAndLine) {
  const std::string good = R"({"prompt": "1", "reward_model": {"ground_truth": "1"}})";
  const auto refused = [&](const std::string& row, const std::string& named,
                           const JsonlOptions& options = {}) {
    write(good + "\n\n" + row + "\n" + good + "\n");
    const std::string text = message(options);
    EXPECT_NE(text.find(path_.string() + ":3: "), std::string::npos) << text;
    EXPECT_NE(text.find(named), std::string::npos) << text;
  };
  refused("{", "not JSON");
  refused("[]", "object");
  refused(R"({"prompt": "\ud800", "reward_model": {"ground_truth": "1"}})", "not JSON");
  refused("{\"prompt\": \"\xFF\", \"reward_model\": {\"ground_truth\": \"1\"}}", "not JSON");
  refused(R"({"reward_model": {"ground_truth": "1"}})", "prompt is missing");
  refused(R"({"prompt": "", "reward_model": {"ground_truth": "1"}})", "prompt is empty");
  refused(R"({"prompt": 7, "reward_model": {"ground_truth": "1"}})", "prompt");
  refused(R"({"prompt": [], "reward_model": {"ground_truth": "1"}})", "prompt");
  refused(R"({"prompt": [{"role": "user"}], "reward_model": {"ground_truth": "1"}})", "content");
  refused(R"({"prompt": "1", "reward_model": {"ground_truth": ["1"]}})", "ground_truth");
  refused(R"({"prompt": "1", "reward_model": "1"})", "reward_model");
  refused(R"({"prompt": "1", "data_source": 3, "reward_model": {"ground_truth": "1"}})",
          "data_source");
  refused(R"({"prompt": "12345678", "reward_model": {"ground_truth": "1"}})", "8 tokens",
          {.max_prompt_tokens = 7});
  refused(
      R"({"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "1"}})",
      "chat template");
  refused(std::string(R"({"prompt": "1", "x": )") + std::string(100, '[') + "}", "");
}

TEST_F(JsonlFile, R81_AnOptionWithoutItsDataFailsAtOnce) {
  write(R"({"prompt": "1", "response": "2"})"
        "\n"
        R"({"prompt": "1", "response": "2"})"
        "\n");
  EXPECT_NE(message().find(":1: reward_model.ground_truth is missing"), std::string::npos);
  EXPECT_EQ(open({.need_response = true}).prompts(0, 1)[0].solution, "2");
  write_sums(3);
  EXPECT_NE(message({.need_response = true}).find(":1: response is missing"), std::string::npos);
}

TEST_F(JsonlFile, FilesWithoutRowsAreRefused) {
  EXPECT_NE(message().find(path_.string()), std::string::npos);  // not there
  write("");
  EXPECT_NE(message().find("no rows"), std::string::npos);
  write_sums(1);
  EXPECT_NE(message().find("one row"), std::string::npos);
  write_sums(5);
  EXPECT_NE(message({.eval_file = "/no/such.jsonl"}).find("/no/such.jsonl"), std::string::npos);
  EXPECT_NE(message({.form_weight = 2.0f}).find("form_weight"), std::string::npos);
}

TEST_F(JsonlFile, ConversationsGoThroughTheChatTemplate) {
  write(
      R"({"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}})"
      "\n"
      R"({"prompt": "plain", "reward_model": {"ground_truth": "2"}})"
      "\n");
  const auto chat = value_or_throw(ChatTemplate::parse(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
      "test"));
  const Jsonl task = open({}, chat);
  const Prompt prompt = task.prompts(0, 1)[0];
  EXPECT_EQ(prompt.text, "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(prompt.tokens.front(), 257);
  EXPECT_EQ(task.evaluation(1)[0].text, "plain");

  const auto nothing = value_or_throw(ChatTemplate::parse("{% if false %}x{% endif %}", "test"));
  try {
    open({}, nothing);
    FAIL() << "a prompt without tokens";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(":1: prompt is empty"), std::string::npos);
  }
}

TEST(Tasks, AnUnknownNameIsRefused) {
  const fs::path folder = fs::path(testing::TempDir()) / "tasks_test";
  fs::create_directories(folder);
  std::ofstream(folder / "tokenizer.json") << byte_tokenizer_json();
  EXPECT_EQ(make_task({}, folder)->prompts(0, 2).size(), 2u);
  try {
    make_task({.name = "arithmetic"}, folder);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string_view(error.what()).find("arithmetic"), std::string_view::npos);
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace lockstep::data
