/// Text to tokens and back, by a Hugging Face tokenizer.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/id.h"
#include "model/config.h"

namespace lockstep::data {

/// Byte-level BPE: NFC or no normalizer, Split and ByteLevel pre-tokenizers, added tokens. What a
/// tokenizer.json asks for beyond that is refused by name. Safe to share by threads; copies share.
class Tokenizer {
 public:
  /// Reads tokenizer.json of a Hugging Face directory.
  static Result<Tokenizer> load(const std::filesystem::path& folder);
  /// The same of text; `what` names it in messages.
  static Result<Tokenizer> parse(std::string_view json, const std::string& what);

  /// The text's tokens; added tokens that stand in it are found first. Nothing is put around them:
  /// a post-processor that would is refused. Throws Error where `text` is no UTF-8.
  std::vector<Token> encode(std::string_view text) const;

  /// The tokens' bytes, special ones' too; a cut character stays cut. Numbers without a token,
  /// which a padded vocabulary has, are nothing.
  std::string bytes(std::span<const Token> tokens) const;

  /// The same as well-formed text: U+FFFD stands for what is no UTF-8.
  std::string decode(std::span<const Token> tokens) const;

  /// The same without special tokens: what a response says, for judging it.
  std::string plain_text(std::span<const Token> tokens) const;

  /// Of a token's very text ("<|im_end|>").
  std::optional<Token> find(std::string_view text) const;
  bool is_special(Token token) const;

  /// One more than the greatest token.
  std::int32_t size() const;

  struct Parts;  // of tokenizer.json, for tokenizer_json.cc
  explicit Tokenizer(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

 private:
  std::shared_ptr<const Parts> parts_;
};

/// Throws Error where the tokenizer has tokens that the model's vocabulary has not.
void check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config);

}  // namespace lockstep::data
