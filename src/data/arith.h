/// Arithmetic with worked steps: "37*46=" -> "37*40=1480;37*6=222;1480+222=1702".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "data/task.h"
#include "data/tokenizer.h"

namespace lockstep::data {

struct ArithOptions {
  std::string operations = "*";                 // of + - *
  std::array<std::int64_t, 2> left = {10, 99};  // the first operand, both ends included
  std::array<std::int64_t, 2> right = {2, 99};
  std::uint64_t seed = 0;  // the order of the problems
  bool repeat = false;     // for fine-tuning: all problems again, in another order, pass by pass
};

/// Harder by the level: 1 is two digits times one, 2 two digits times up to two, 3 three times two,
/// and so on. Throws Error outside 1 to 5.
ArithOptions arith_level(std::int32_t level);

/// All problems of the options are numbered and shuffled by a bijection, and step n takes the
/// next `count` of them: no two steps share a prompt as long as they ask for the same count. When
/// the problems are used up prompts() throws, unless `repeat`. An eighth of the problems, the same
/// under every seed, is kept aside for evaluation.
class Arith : public Task {
 public:
  /// Throws Error where an option is out of range.
  Arith(const ArithOptions& options, Tokenizer tokenizer);

  std::vector<Prompt> prompts(std::int64_t step, std::int32_t count) const override;
  std::vector<Prompt> evaluation(std::int32_t count) const override;
  /// 1 where the last number of the response is the answer, else 0.
  float reward(const Prompt& prompt, std::span<const Token> response) const override;

  std::int64_t evaluation_size() const override { return evaluation_; }

  std::int64_t training_problems() const { return problems_ - evaluation_; }
  std::int64_t evaluation_problems() const { return evaluation_; }

 private:
  Prompt problem(std::int64_t number, PromptId id) const;

  ArithOptions options_;
  Tokenizer tokenizer_;
  std::int64_t problems_ = 0;
  std::int64_t evaluation_ = 0;
};

/// The answer to "a op b=", worked by the places of b (of a, where b has but one): each step ends
/// in ';', the answer stands last.
std::string worked_steps(std::int64_t a, char operation, std::int64_t b);

}  // namespace lockstep::data
