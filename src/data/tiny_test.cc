// The folder of the tiny model, as it lies in the source tree.
#include <gtest/gtest.h>

#include <filesystem>

#include "data/tasks.h"
#include "data/tokenizer.h"
#include "model/config_json.h"

namespace lockstep::data {
namespace {

class TinyModel : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kFolder)) GTEST_SKIP() << "runs from the source folder";
  }
  static constexpr const char* kFolder = "models/tiny-moe";
};

TEST_F(TinyModel, TokenizerAndConfigBelongTogether) {
  const ModelConfig config = value_or_throw(read_config(kFolder));
  const Tokenizer tokenizer = value_or_throw(Tokenizer::load(kFolder));
  check_vocabulary(tokenizer, config);
  EXPECT_EQ(tokenizer.size(), config.vocabulary);
  EXPECT_EQ(config.vocabulary % 16, 0);
  ASSERT_EQ(config.stop_tokens.size(), 1u);
  EXPECT_EQ(tokenizer.find("<|endoftext|>"), config.stop_tokens[0]);
  EXPECT_TRUE(tokenizer.is_special(config.stop_tokens[0]));
}

TEST_F(TinyModel, EveryByteIsAToken) {
  const Tokenizer tokenizer = value_or_throw(Tokenizer::load(kFolder));
  EXPECT_EQ(tokenizer.encode("37*6="), (std::vector<Token>{'3', '7', '*', '6', '='}));
  for (Token byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(tokenizer.bytes(std::vector<Token>{byte}), std::string(1, static_cast<char>(byte)));
  }
}

TEST_F(TinyModel, ArithmeticFitsItsContext) {
  const ModelConfig config = value_or_throw(read_config(kFolder));
  const auto task = make_task({.arith = arith_level(5)}, kFolder);
  const Tokenizer tokenizer = value_or_throw(Tokenizer::load(kFolder));
  for (const Prompt& prompt : task->prompts(0, 500)) {
    const std::size_t length = prompt.tokens.size() + tokenizer.encode(prompt.solution).size() + 1;
    EXPECT_LE(length, static_cast<std::size_t>(config.max_positions));
  }
}

}  // namespace
}  // namespace lockstep::data
