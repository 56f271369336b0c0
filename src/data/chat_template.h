/// A checkpoint's chat template: messages to the text that the model was taught on.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace lockstep::data {

struct Message {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

/// A part of Jinja, enough for the ChatML templates of Qwen (docs/formats/checkpoint.md lists it).
/// A template that uses more is refused when it is read, by the name of what it uses: rendering
/// never guesses. Safe to share by threads; copies share.
class ChatTemplate {
 public:
  /// chat_template.jinja of a Hugging Face directory, else chat_template of its
  /// tokenizer_config.json; nothing where it has neither.
  static Result<std::optional<ChatTemplate>> load(const std::filesystem::path& folder);
  static Result<ChatTemplate> parse(std::string_view source, const std::string& what);

  /// The conversation, and where `generate` the opening of the assistant's turn. Throws Error
  /// where the template raises one or asks for what a message has not.
  std::string render(std::span<const Message> messages, bool generate = true) const;

  struct Program;  // for chat_template.cc
  explicit ChatTemplate(std::shared_ptr<const Program> program) : program_(std::move(program)) {}

 private:
  std::shared_ptr<const Program> program_;
};

}  // namespace lockstep::data
