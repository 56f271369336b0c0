#include "data/jsonl.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/parallel.h"
#include "base/text.h"
#include "data/shuffle.h"
#include "model/json.h"

namespace lockstep::data {
namespace {

using nlohmann::json;

constexpr JsonLimits kRowLimits = {.bytes = std::size_t{64} << 20, .depth = 64};
constexpr std::int64_t kEvaluationShare = 10;

std::string text_at(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    throw Error(cat({key, " is missing, or no string"}));
  }
  return found->get<std::string>();
}

void read_prompt(const json& prompt, JsonlRow& row) {
  if (prompt.is_string()) {
    row.prompt = prompt.get<std::string>();
    if (row.prompt.empty()) throw Error("prompt is empty");
    return;
  }
  if (!prompt.is_array() || prompt.empty()) {
    throw Error("prompt is neither a string nor a list of messages");
  }
  for (const json& message : prompt) {
    if (!message.is_object()) throw Error("prompt: a message is no object");
    row.messages.push_back({text_at(message, "role"), text_at(message, "content")});
  }
}

std::string truth_of(const json& row) {
  const auto model = row.find("reward_model");
  if (model == row.end()) return "";
  if (!model->is_object()) throw Error("reward_model is no object");
  const auto truth = model->find("ground_truth");
  if (truth == model->end() || truth->is_null()) return "";
  if (truth->is_string()) return truth->get<std::string>();
  if (truth->is_number()) return truth->dump();
  throw Error("reward_model.ground_truth is neither a string nor a number");
}

JsonlRow read_row(const json& object) {
  if (!object.is_object()) throw Error("is no JSON object");
  JsonlRow row;
  const auto prompt = object.find("prompt");
  if (prompt == object.end()) throw Error("prompt is missing");
  read_prompt(*prompt, row);
  if (object.contains("data_source")) row.data_source = text_at(object, "data_source");
  if (object.contains("response")) row.response = text_at(object, "response");
  row.ground_truth = truth_of(object);
  return row;
}

}  // namespace

Result<JsonlRow> parse_row(std::string_view line) {
  const auto object = parse_json(line, "row", kRowLimits);
  if (!object) return tl::unexpected(object.error());
  try {
    return read_row(*object);
  } catch (const Error& error) {
    return fault(error.what());
  }
}

Jsonl::Jsonl(const JsonlOptions& options, Tokenizer tokenizer, std::optional<ChatTemplate> chat)
    : options_(options), tokenizer_(std::move(tokenizer)), chat_(std::move(chat)) {
  if (!(options_.form_weight >= 0.0f && options_.form_weight <= 1.0f)) {
    throw Usage(cat({"task.form_weight is ", options_.form_weight, "; 0 to 1 is expected"}));
  }
  file_ = value_or_throw(MappedFile::open(options_.file));
  training_ = read_lines(file_, options_.file);
  if (!options_.eval_file.empty()) {
    eval_file_ = value_or_throw(MappedFile::open(options_.eval_file));
    evaluation_ = read_lines(eval_file_, options_.eval_file);
  } else {
    const std::int64_t kept = std::max<std::int64_t>(1, training_rows() / kEvaluationShare);
    if (training_rows() < 2) {
      throw Usage(cat({options_.file.string(),
                       ": one row; at least two are expected, or an "
                       "eval_file"}));
    }
    evaluation_.assign(training_.end() - kept, training_.end());
    training_.resize(training_.size() - static_cast<std::size_t>(kept));
  }
}

Jsonl::Lines Jsonl::read_lines(const MappedFile& file, const std::filesystem::path& path) const {
  const std::span<const std::byte> bytes = file.bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  Lines lines;
  std::vector<std::int64_t> numbers;
  std::int64_t number = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    ++number;
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    lines.push_back(line);
    numbers.push_back(number);
  }
  if (lines.empty()) throw Error(cat({path.string(), ": has no rows"}));

  std::vector<std::string> faults(lines.size());
  parallel_for(
      static_cast<std::int64_t>(lines.size()), 64, [&](std::int64_t first, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(end); ++i) {
          try {
            check(lines[i]);
          } catch (const Error& error) {
            faults[i] = error.what();
          }
        }
      });
  for (std::size_t i = 0; i < faults.size(); ++i) {  // the first one, whoever met it
    if (!faults[i].empty()) throw Error(cat({path.string(), ":", numbers[i], ": ", faults[i]}));
  }
  return lines;
}

void Jsonl::check(std::string_view line) const {
  const JsonlRow row = value_or_throw(parse_row(line));
  if (options_.need_response && row.response.empty()) {
    throw Error("response is missing; fine-tuning needs one in every row");
  }
  if (!options_.need_response && row.ground_truth.empty()) {
    throw Error("reward_model.ground_truth is missing; there is nothing to judge answers by");
  }
  const std::string text = text_of(row);
  if (text.empty()) throw Error("prompt is empty: the chat template makes nothing of the messages");
  const auto limit = static_cast<std::size_t>(options_.max_prompt_tokens);
  // A token is a byte at least, and normalization makes at most three of one.
  if (limit == 0 || text.size() * 3 <= limit) return;
  const std::size_t tokens = tokenizer_.encode(text).size();
  if (tokens > limit) {
    throw Error(
        cat({"prompt is ", tokens, " tokens long; at most ", limit, " leave room for a response"}));
  }
}

std::string Jsonl::text_of(const JsonlRow& row) const {
  if (row.messages.empty()) return row.prompt;
  if (!chat_) {
    throw Error(
        "prompt is a list of messages, but the model has no chat template; give it as a "
        "string");
  }
  return chat_->render(row.messages);
}

Prompt Jsonl::prompt(std::string_view line, PromptId id) const {
  JsonlRow row = value_or_throw(parse_row(line));
  Prompt prompt = {.id = id,
                   .text = text_of(row),
                   .ground_truth = std::move(row.ground_truth),
                   .data_source = std::move(row.data_source),
                   .solution = std::move(row.response)};
  if (prompt.data_source.empty()) prompt.data_source = options_.file.stem().string();
  prompt.tokens = tokenizer_.encode(prompt.text);
  return prompt;
}

std::vector<Prompt> Jsonl::prompts(std::int64_t step, std::int32_t count) const {
  std::vector<Prompt> prompts;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index = step * count + i;
    const auto epoch = static_cast<std::uint64_t>(index / training_rows());
    const std::int64_t row =
        shuffled(options_.seed ^ epoch << 32, index % training_rows(), training_rows());
    prompts.push_back(prompt(training_[static_cast<std::size_t>(row)], training_id(index)));
  }
  return prompts;
}

std::vector<Prompt> Jsonl::evaluation(std::int32_t count) const {
  if (count > evaluation_rows()) {
    throw Usage(cat({options_.file.string(), ": ", evaluation_rows(),
                     " rows are kept for evaluation; ", count, " were asked for"}));
  }
  std::vector<Prompt> prompts;
  for (std::int64_t i = 0; i < count; ++i) {
    prompts.push_back(prompt(evaluation_[static_cast<std::size_t>(i)], evaluation_id(i)));
  }
  return prompts;
}

float Jsonl::reward(const Prompt& prompt, std::span<const Token> response) const {
  const std::string text = tokenizer_.plain_text(response);
  const float answer = correct(options_.judge, text, prompt.ground_truth) ? 1.0f : 0.0f;
  const float form = in_form(options_.form, text) ? 1.0f : 0.0f;
  return (1.0f - options_.form_weight) * answer + options_.form_weight * form;
}

}  // namespace lockstep::data
