#include "cli/sequences.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/text.h"
#include "model/json.h"

namespace lockstep::cli {
namespace {

using nlohmann::json;

constexpr JsonLimits kLimits = {.bytes = std::size_t{64} << 20, .depth = 8};

/// A value of the row, nothing where it has none or null.
const json* find(const json& row, const char* key) {
  const auto found = row.find(key);
  return found == row.end() || found->is_null() ? nullptr : &*found;
}

std::string string_at(const json& value, const char* key) {
  if (!value.is_string()) throw Error(cat({key, " is no string"}));
  return value.get<std::string>();
}

std::vector<Token> tokens_at(const json& value, const char* key) {
  if (!value.is_array()) throw Error(cat({key, " is no list of token ids"}));
  std::vector<Token> tokens;
  for (const json& token : value) {
    const bool is_id = token.is_number_unsigned() && token.get<std::uint64_t>() <= INT32_MAX;
    if (!is_id) {
      throw Error(cat({key, " holds ", token.dump(), " at ", tokens.size(), ", which is no id"}));
    }
    tokens.push_back(token.get<Token>());
  }
  return tokens;
}

/// The row's tokens, and how many of them are the prompt's where the row says so by itself.
std::vector<Token> read_tokens(const json& row, const data::Tokenizer& tokenizer,
                               std::optional<std::size_t>& prompt) {
  for (const char* key : {"token_ids", "tokens"}) {
    if (const json* ids = find(row, key)) return tokens_at(*ids, key);
  }
  if (const json* text = find(row, "text")) return tokenizer.encode(string_at(*text, "text"));
  const json* first = find(row, "prompt");
  const json* second = find(row, "response");
  if (first == nullptr || second == nullptr) {
    throw Error("has none of token_ids, tokens, text, or prompt with response");
  }
  std::vector<Token> tokens = tokenizer.encode(string_at(*first, "prompt"));
  prompt = tokens.size();
  for (const Token token : tokenizer.encode(string_at(*second, "response"))) {
    tokens.push_back(token);
  }
  return tokens;
}

void check_tokens(const std::vector<Token>& tokens, const ModelConfig& model) {
  if (tokens.empty()) throw Error("has no tokens");
  if (std::cmp_greater(tokens.size(), model.max_positions)) {
    throw Error(cat({"has ", tokens.size(), " tokens; the model's context is ", model.max_positions,
                     ": shorten it"}));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < model.vocabulary) continue;
    throw Error(
        cat({"token ", tokens[i], " at ", i, " is outside the vocabulary of ", model.vocabulary}));
  }
}

/// Which tokens are scored: response_mask, else those behind prompt_len, else all but the first.
std::vector<std::uint8_t> read_mask(const json& row, std::size_t tokens,
                                    std::optional<std::size_t> prompt) {
  std::vector<std::uint8_t> mask(tokens, 1);
  const json* given = find(row, "response_mask");
  const json* length = find(row, "prompt_len");
  if (given != nullptr && length != nullptr) {
    throw Error("has both response_mask and prompt_len; leave one out");
  }
  if (given != nullptr) {
    if (!given->is_array() || given->size() != tokens) {
      throw Error(cat({"response_mask has ", given->size(), " entries for ", tokens, " tokens"}));
    }
    for (std::size_t i = 0; i < tokens; ++i) {
      const json& value = (*given)[i];
      if (value != 0 && value != 1 && value != true && value != false) {
        throw Error(cat({"response_mask holds ", value.dump(), " at ", i, "; 0 or 1 is expected"}));
      }
      mask[i] = value == 1 || value == true ? 1 : 0;
    }
  } else {
    if (length != nullptr) {
      if (!length->is_number_integer() || length->get<std::int64_t>() < 0 ||
          std::cmp_greater(length->get<std::int64_t>(), tokens)) {
        throw Error(cat({"prompt_len is ", length->dump(), "; 0 to ", tokens, " is expected"}));
      }
      prompt = length->get<std::size_t>();
    }
    std::fill_n(mask.begin(), prompt.value_or(0), std::uint8_t{0});
  }
  mask[0] = 0;  // nothing comes before it to predict it
  return mask;
}

/// An engine whose softmax rounds may call a certain token a little likelier than 1.
constexpr float kMostLogp = 1e-3f;

std::vector<float> read_given(const json& row, std::size_t tokens) {
  const json* given = find(row, "rollout_logp");
  if (given == nullptr) return {};
  if (!given->is_array() || given->size() != tokens) {
    throw Error(cat({"rollout_logp has ", given->size(), " entries for ", tokens, " tokens"}));
  }
  std::vector<float> values;
  for (const json& value : *given) {
    if (!value.is_null() && !value.is_number()) {
      throw Error(cat({"rollout_logp holds ", value.dump(), ", neither number nor null"}));
    }
    values.push_back(value.is_null() ? std::nanf("") : value.get<float>());
    if (values.back() > kMostLogp || std::isinf(values.back())) {
      throw Error(cat({"rollout_logp holds ", value.dump(), " at ", values.size() - 1,
                       "; a log-prob is finite and at most 0 (rounding may take it to ", kMostLogp,
                       "), null where there is none"}));
    }
  }
  return values;
}

}  // namespace

SequenceRow parse_sequence(std::string_view line, const data::Tokenizer& tokenizer,
                           const ModelConfig& model) {
  const json row = value_or_throw(parse_json(line, "row", kLimits));
  if (!row.is_object()) throw Error("is no JSON object");
  std::optional<std::size_t> prompt;
  SequenceRow sequence;
  Trajectory& t = sequence.trajectory;
  t.tokens = read_tokens(row, tokenizer, prompt);
  check_tokens(t.tokens, model);
  t.response_mask = read_mask(row, t.tokens.size(), prompt);
  t.rollout_logp.assign(t.tokens.size(), 0.0f);
  sequence.given = read_given(row, t.tokens.size());
  return sequence;
}

std::vector<SequenceRow> read_sequences(const std::filesystem::path& file,
                                        const data::Tokenizer& tokenizer,
                                        const ModelConfig& model) {
  const std::string text = value_or_throw(read_text(file));
  std::vector<SequenceRow> rows;
  std::int64_t number = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    ++number;
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      rows.push_back(parse_sequence(line, tokenizer, model));
    } catch (const Error& error) {
      throw Error(cat({file.string(), ":", number, ": ", error.what()}));
    }
    rows.back().line = number;
    rows.back().trajectory.prompt = {std::ssize(rows) - 1};
  }
  if (rows.empty()) throw Error(cat({file.string(), ": has no rows"}));
  return rows;
}

}  // namespace lockstep::cli
