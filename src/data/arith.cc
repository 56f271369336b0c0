#include "data/arith.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "data/answer.h"
#include "data/shuffle.h"

namespace lockstep::data {
namespace {

// Its own key, not the run's: what is kept aside for evaluation is the same under every seed.
constexpr std::uint64_t kEvaluationKey = 0x61726974682D6576;
constexpr std::int64_t kEvaluatedPart = 8;
constexpr std::int64_t kMaxOperand = 1'000'000;

std::int64_t width(const std::array<std::int64_t, 2>& range) { return range[1] - range[0] + 1; }

void check_range(const char* key, const std::array<std::int64_t, 2>& range) {
  if (range[0] < 0 || range[1] < range[0] || range[1] > kMaxOperand) {
    throw Usage(cat({"task.", key, " is [", range[0], ", ", range[1], "]; a range within 0 to ",
                     kMaxOperand, " is expected"}));
  }
}

std::int64_t apply(std::int64_t a, char operation, std::int64_t b) {
  switch (operation) {
    case '+': return a + b;
    case '-': return a - b;
    default: return a * b;
  }
}

/// The number by its places: 407 -> 400, 7. Zero has the one place 0.
std::vector<std::int64_t> places(std::int64_t number) {
  std::vector<std::int64_t> parts;
  for (std::int64_t unit = 1; number > 0; number /= 10, unit *= 10) {
    if (number % 10 != 0) parts.insert(parts.begin(), number % 10 * unit);
  }
  if (parts.empty()) parts.push_back(0);
  return parts;
}

/// "a op first=x;x op second=y;..."
std::string chain(std::int64_t a, char operation, const std::vector<std::int64_t>& parts) {
  std::string steps;
  for (std::int64_t part : parts) {
    const std::int64_t next = apply(a, operation, part);
    steps += cat({steps.empty() ? "" : ";", a, operation, part, "=", next});
    a = next;
  }
  return steps;
}

}  // namespace

std::string worked_steps(std::int64_t a, char operation, std::int64_t b) {
  std::vector<std::int64_t> parts = places(b);
  if (operation != '*') {
    return parts.size() == 1 ? cat({apply(a, operation, b)}) : chain(a, operation, parts);
  }
  const bool by_left = parts.size() == 1;
  if (by_left) parts = places(a);
  if (parts.size() == 1) return cat({a * b});
  std::string steps;
  std::vector<std::int64_t> products;
  for (std::int64_t part : parts) {
    products.push_back(part * (by_left ? b : a));
    steps += by_left ? cat({part, "*", b}) : cat({a, "*", part});
    steps += cat({"=", products.back(), ";"});
  }
  return steps + chain(products.front(), '+', {products.begin() + 1, products.end()});
}

ArithOptions arith_level(std::int32_t level) {
  switch (level) {
    case 1: return {.left = {10, 99}, .right = {2, 9}};
    case 2: return {.left = {10, 99}, .right = {2, 99}};
    case 3: return {.left = {10, 999}, .right = {2, 99}};
    case 4: return {.left = {100, 999}, .right = {10, 99}};
    case 5: return {.left = {100, 999}, .right = {100, 999}};
    default: throw Usage(cat({"arith: difficulty is ", level, "; 1 to 5 are expected"}));
  }
}

Arith::Arith(const ArithOptions& options, Tokenizer tokenizer)
    : options_(options), tokenizer_(std::move(tokenizer)) {
  check_range("left", options_.left);
  check_range("right", options_.right);
  const std::string& operations = options_.operations;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    if (std::string_view("+-*").find(operations[i]) == std::string_view::npos ||
        operations.find(operations[i], i + 1) != std::string::npos) {
      throw Usage(cat({"task.operations is \"", operations, "\"; each of + - * at most once"}));
    }
  }
  if (operations.empty()) throw Usage("task.operations is empty; some of + - * are expected");
  problems_ =
      width(options_.left) * width(options_.right) * static_cast<std::int64_t>(operations.size());
  evaluation_ = problems_ / kEvaluatedPart;
  if (evaluation_ < 1) {
    throw Usage(cat({"arith has ", problems_, " problems; at least ", kEvaluatedPart,
                     " are wanted; widen task.left or task.right"}));
  }
}

Prompt Arith::problem(std::int64_t number, PromptId id) const {
  const auto kinds = static_cast<std::int64_t>(options_.operations.size());
  const char operation = options_.operations[static_cast<std::size_t>(number % kinds)];
  const std::int64_t pair = number / kinds;
  const std::int64_t a = options_.left[0] + pair / width(options_.right);
  const std::int64_t b = options_.right[0] + pair % width(options_.right);
  Prompt prompt = {.id = id,
                   .text = cat({a, operation, b, "="}),
                   .ground_truth = cat({apply(a, operation, b)}),
                   .data_source = "arith",
                   .solution = worked_steps(a, operation, b)};
  prompt.tokens = tokenizer_.encode(prompt.text);
  return prompt;
}

std::vector<Prompt> Arith::prompts(std::int64_t step, std::int32_t count) const {
  const std::int64_t size = training_problems();
  std::vector<Prompt> prompts;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index = step * count + i;
    const std::int64_t pass = index / size;
    if (pass > 0 && !options_.repeat) {
      throw Usage(
          cat({"arith has ", size, " problems for training, which step ", step, " of ", count,
               " prompts exceeds; widen task.left or task.right, or set task.repeat = true"}));
    }
    const std::uint64_t key = options_.seed ^ static_cast<std::uint64_t>(pass) << 32;
    const std::int64_t place = evaluation_ + shuffled(key, index % size, size);
    prompts.push_back(problem(shuffled(kEvaluationKey, place, problems_), training_id(index)));
  }
  return prompts;
}

std::vector<Prompt> Arith::evaluation(std::int32_t count) const {
  if (count > evaluation_) {
    throw Usage(cat({"arith keeps ", evaluation_, " problems for evaluation; ", count,
                     " were asked for; widen task.left or task.right"}));
  }
  std::vector<Prompt> prompts;
  for (std::int64_t i = 0; i < count; ++i) {
    prompts.push_back(problem(shuffled(kEvaluationKey, i, problems_), evaluation_id(i)));
  }
  return prompts;
}

float Arith::reward(const Prompt& prompt, std::span<const Token> response) const {
  const auto last = last_number(tokenizer_.plain_text(response));
  return last && same_number(*last, prompt.ground_truth) ? 1.0f : 0.0f;
}

}  // namespace lockstep::data
