#include "data/tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "base/text.h"
#include "data/tokenizer_parts.h"
#include "data/utf8.h"
#include "model/json.h"

namespace lockstep::data {
namespace {

/// Calls text on what lies between added tokens and token on those, in order.
template <typename OnText, typename OnToken>
void cut(const AddedTokens& added, std::string_view text, const OnText& on_text,
         const OnToken& on_token) {
  std::size_t done = 0;
  for (std::size_t i = 0; i < text.size() && !added.empty();) {
    const AddedToken* token = added.at(text.substr(i));
    if (!token) {
      ++i;
      continue;
    }
    if (i > done) on_text(text.substr(done, i - done));
    on_token(token->id);
    i += token->content.size();
    done = i;
  }
  if (done < text.size()) on_text(text.substr(done));
}

bool ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0; });
}

}  // namespace

std::string to_nfc(std::string_view text) {
  if (ascii(text)) return std::string(text);
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &composed,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (size < 0) throw Error(cat({"NFC: ", utf8proc_errmsg(size)}));
  std::string out(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(size));
  std::free(composed);
  return out;
}

void AddedTokens::add(AddedToken token) {
  auto& bucket = by_first_[static_cast<unsigned char>(token.content.front())];
  const auto shorter = std::find_if(bucket.begin(), bucket.end(), [&](const AddedToken& other) {
    return other.content.size() < token.content.size();
  });
  bucket.insert(shorter, std::move(token));
  empty_ = false;
}

const AddedToken* AddedTokens::at(std::string_view text) const {
  for (const AddedToken& token : by_first_[static_cast<unsigned char>(text.front())]) {
    if (text.starts_with(token.content)) return &token;
  }
  return nullptr;
}

Result<Tokenizer> Tokenizer::load(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tokenizer.json";
  return read_text(path).and_then(
      [&](const std::string& text) { return parse(text, path.string()); });
}

std::vector<Token> Tokenizer::encode(std::string_view text) const {
  if (const std::size_t bad = first_invalid(text); bad != std::string_view::npos) {
    throw Error(cat({"text to tokenize: byte ", bad, " is no UTF-8"}));
  }
  std::vector<Token> tokens;
  const auto token = [&](Token id) { tokens.push_back(id); };
  const auto merge = [&](std::string_view part) {
    split_all(parts_->splitters, part,
              [&](std::string_view piece) { parts_->bpe.encode(piece, tokens); });
  };
  const auto normalize = [&](std::string_view part) {
    if (!parts_->nfc) return cut(parts_->normalized, part, merge, token);
    const std::string composed = to_nfc(part);
    cut(parts_->normalized, composed, merge, token);
  };
  cut(parts_->raw, text, normalize, token);
  return tokens;
}

std::string Tokenizer::bytes(std::span<const Token> tokens) const {
  std::string out;
  for (Token token : tokens) {
    if (token >= 0 && token < size()) out += parts_->bytes[static_cast<std::size_t>(token)];
  }
  return out;
}

std::string Tokenizer::decode(std::span<const Token> tokens) const {
  return replace_invalid(bytes(tokens));
}

std::string Tokenizer::plain_text(std::span<const Token> tokens) const {
  std::vector<Token> plain;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(plain),
               [this](Token token) { return !is_special(token); });
  return decode(plain);
}

std::optional<Token> Tokenizer::find(std::string_view text) const {
  const auto found = parts_->ids.find(std::string(text));
  if (found == parts_->ids.end()) return std::nullopt;
  return found->second;
}

bool Tokenizer::is_special(Token token) const {
  return token >= 0 && token < size() && parts_->special[static_cast<std::size_t>(token)];
}

std::int32_t Tokenizer::size() const { return static_cast<std::int32_t>(parts_->bytes.size()); }

void check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config) {
  if (tokenizer.size() > config.vocabulary) {
    throw Error(cat({"tokenizer.json has tokens up to ", tokenizer.size() - 1,
                     ", but config.json's vocab_size is ", config.vocabulary,
                     "; they belong to different models"}));
  }
}

}  // namespace lockstep::data
