/// Prompts from a file, one JSON object a line, with the fields that verl's data has.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/answer.h"
#include "data/chat_template.h"
#include "data/task.h"
#include "data/tokenizer.h"
#include "model/file.h"

namespace lockstep::data {

struct JsonlOptions {
  std::filesystem::path file{};
  std::filesystem::path eval_file{};  // empty: the last tenth of `file` is kept aside
  Judge judge = Judge::kAnswer;
  Form form = Form::kAny;
  float form_weight = 0.0f;            // share of the reward that the form alone earns
  std::uint64_t seed = 0;              // the order of the rows, another one in each epoch
  std::int32_t max_prompt_tokens = 0;  // a longer prompt is refused at once; 0: not looked at
  bool need_response = false;          // for fine-tuning: every row must have one
};

/// One line of a file.
struct JsonlRow {
  std::string prompt{};             // its text; empty where it is a conversation
  std::vector<Message> messages{};  // of a conversation
  std::string data_source{};
  std::string ground_truth{};
  std::string response{};  // to fine-tune on
};

/// A row: {"prompt": "..." or [{"role": ..., "content": ...}, ...], "data_source": "...",
/// "reward_model": {"ground_truth": "..." or a number}, "response": "..."}; other keys are left
/// alone. The fault says what is wrong, not where.
Result<JsonlRow> parse_row(std::string_view line);

/// Rows are checked, all of them, before the first is used; a bad one is named by file and line.
/// They are read again from the mapped file when their turn comes.
class Jsonl : public Task {
 public:
  /// `chat` renders conversations; without it a row that is one is refused. Throws Error.
  Jsonl(const JsonlOptions& options, Tokenizer tokenizer, std::optional<ChatTemplate> chat);

  std::vector<Prompt> prompts(std::int64_t step, std::int32_t count) const override;
  std::vector<Prompt> evaluation(std::int32_t count) const override;
  /// (1 - form_weight) for the right answer and form_weight for the form.
  float reward(const Prompt& prompt, std::span<const Token> response) const override;

  std::int64_t evaluation_size() const override { return evaluation_rows(); }

  std::int64_t training_rows() const { return static_cast<std::int64_t>(training_.size()); }
  std::int64_t evaluation_rows() const { return static_cast<std::int64_t>(evaluation_.size()); }

 private:
  using Lines = std::vector<std::string_view>;

  Lines read_lines(const MappedFile& file, const std::filesystem::path& path) const;
  void check(std::string_view line) const;
  Prompt prompt(std::string_view line, PromptId id) const;
  std::string text_of(const JsonlRow& row) const;

  JsonlOptions options_;
  Tokenizer tokenizer_;
  std::optional<ChatTemplate> chat_;
  MappedFile file_, eval_file_;
  Lines training_, evaluation_;  // into the mapped files
};

}  // namespace lockstep::data
