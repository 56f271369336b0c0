#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/id.h"

namespace lockstep::data {

/// Span ids have 28 bits for a prompt: those of steps are numbered below this, those of evaluation
/// from here on.
constexpr std::int64_t kFirstEvaluationId = std::int64_t{1} << 27;

/// The id of a run's prompt number `index`, or of evaluation's. Throws Error where none is left.
PromptId training_id(std::int64_t index);
PromptId evaluation_id(std::int64_t index);

struct Prompt {
  PromptId id{};  // its number in the run: no two steps share one
  std::vector<Token> tokens{};
  std::string text{};  // for people
  std::string ground_truth{};
  std::string data_source{};  // "arith", or the row's own
  std::string solution{};     // a worked answer to fine-tune on, where the task has one
};

/// Prompts and the rewards of their answers. No state: what step n gets depends on n alone.
class Task {
 public:
  virtual ~Task() = default;
  virtual std::vector<Prompt> prompts(std::int64_t step, std::int32_t count) const = 0;
  /// The same ones each time, apart from those of any step.
  virtual std::vector<Prompt> evaluation(std::int32_t count) const = 0;
  /// How many of those there are.
  virtual std::int64_t evaluation_size() const = 0;
  virtual float reward(const Prompt& prompt, std::span<const Token> response) const = 0;
};

}  // namespace lockstep::data
