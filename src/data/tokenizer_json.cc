#include <nlohmann/json.hpp>

#include "base/text.h"
#include "data/tokenizer_parts.h"
#include "data/utf8.h"
#include "model/json.h"

namespace lockstep::data {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxTokens = 1 << 24;
constexpr JsonLimits kLimits = {.bytes = std::size_t{256} << 20, .depth = 32};

/// Which letter stands for each byte in a byte-level vocabulary: printable bytes for themselves,
/// the others for 256, 257, ... in order (GPT-2).
std::array<char32_t, 256> byte_letters() {
  std::array<char32_t, 256> letters{};
  char32_t next = 256;
  for (char32_t b = 0; b < 256; ++b) {
    const bool printable =
        (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
    letters[b] = printable ? b : next++;
  }
  return letters;
}

/// Letters of two bytes in UTF-8 at most, so the code point is all there is to decode.
class ByteLetters {
 public:
  ByteLetters() {
    bytes_.fill(-1);
    const auto letters = byte_letters();
    for (std::size_t b = 0; b < 256; ++b) bytes_[letters[b]] = static_cast<int>(b);
  }

  /// The bytes that `letters` stand for; nothing where one stands for none.
  std::optional<std::string> bytes(std::string_view letters) const {
    std::string out;
    for (std::size_t i = 0; i < letters.size();) {
      const auto first = static_cast<unsigned char>(letters[i]);
      std::size_t point = first;
      std::size_t length = 1;
      if (first >= 0xC0 && first < 0xE0 && i + 1 < letters.size()) {
        point = (first & 0x1Fu) << 6 | (static_cast<unsigned char>(letters[i + 1]) & 0x3Fu);
        length = 2;
      }
      if (first >= 0xE0 || point >= bytes_.size() || bytes_[point] < 0) return std::nullopt;
      out += static_cast<char>(bytes_[point]);
      i += length;
    }
    return out;
  }

 private:
  std::array<int, 512> bytes_;
};

/// Reads one tokenizer.json; throws Error, whose message load() puts the file's name before.
class Reader {
 public:
  explicit Reader(const json& root) : root_(root) {}

  std::shared_ptr<const Tokenizer::Parts> read() {
    const json& model = object(root_, "model");
    read_vocabulary(model);
    read_merges(model);
    read_added();
    read_normalizer(get(root_, "normalizer"));
    if (const json* first = get(root_, "pre_tokenizer")) read_pre_tokenizer(*first);
    if (!byte_level_) throw Error("pre_tokenizer: no ByteLevel in it; only byte-level is read");
    check_rest();
    return parts_;
  }

 private:
  static const json* get(const json& from, const char* key) {
    if (!from.is_object()) return nullptr;
    const auto found = from.find(key);
    return found == from.end() || found->is_null() ? nullptr : &*found;
  }

  static const json& object(const json& from, const char* key) {
    const json* value = get(from, key);
    if (!value || !value->is_object()) throw Error(cat({key, " is missing, or no object"}));
    return *value;
  }

  static std::string text(const json& from, const char* key) {
    const json* value = get(from, key);
    if (!value || !value->is_string()) throw Error(cat({key, " is missing, or no string"}));
    return value->get<std::string>();
  }

  static bool flag(const json& from, const char* key, bool absent) {
    const json* value = get(from, key);
    if (!value) return absent;
    if (!value->is_boolean()) throw Error(cat({key, " is ", value->dump(), ", no boolean"}));
    return value->get<bool>();
  }

  [[noreturn]] static void refuse(const std::string& what, const json& value) {
    throw Error(cat({what, " ", value.dump().substr(0, 80), " is not implemented"}));
  }

  static Token token_id(const json& value, std::string_view what) {
    if (!value.is_number_integer() || value < 0 || value >= kMaxTokens) {
      throw Error(cat({"token ", what, " has the number ", value.dump(), "; 0 to ", kMaxTokens - 1,
                       " are expected"}));
    }
    return value.get<Token>();
  }

  void place(Token id, std::string bytes, bool special) {
    const auto at = static_cast<std::size_t>(id);
    if (at >= parts_bytes_.size()) {
      parts_bytes_.resize(at + 1);
      parts_special_.resize(at + 1);
    }
    parts_bytes_[at] = std::move(bytes);
    parts_special_[at] = special;
  }

  void read_vocabulary(const json& model) {
    if (const json* type = get(model, "type"); type && *type != "BPE") refuse("model", *type);
    for (const char* key :
         {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
      const json* value = get(model, key);
      if (value && *value != "") refuse(cat({"model.", key}), *value);
    }
    if (flag(model, "byte_fallback", false)) refuse("model.byte_fallback", true);
    for (const auto& [letters, number] : object(model, "vocab").items()) {
      const Token id = token_id(number, letters);
      if (letters.empty()) throw Error("vocab: a token of no letters");
      vocabulary_.emplace(letters, id);
      const auto at = static_cast<std::size_t>(id);
      if (at < parts_bytes_.size() && !parts_bytes_[at].empty()) {
        throw Error(cat({"vocab: two tokens have the number ", id}));
      }
      // Letters that stand for no bytes are a token's text itself; no merge makes those.
      place(id, letters_.bytes(letters).value_or(letters), false);
    }
    std::array<Token, 256> singles{};
    const auto letters = byte_letters();
    for (std::size_t b = 0; b < 256; ++b) singles[b] = find_token(letter_text(letters[b]));
    parts_ = std::make_shared<Tokenizer::Parts>(Tokenizer::Parts{.bpe = Bpe(singles)});
    if (flag(model, "ignore_merges", false)) {
      for (const auto& [letters, id] : vocabulary_) {
        if (auto bytes = letters_.bytes(letters)) parts_->bpe.add_whole(std::move(*bytes), id);
      }
    }
  }

  static std::string letter_text(char32_t letter) {
    if (letter < 0x80) return {static_cast<char>(letter)};
    return {static_cast<char>(0xC0 | letter >> 6), static_cast<char>(0x80 | (letter & 0x3F))};
  }

  Token find_token(const std::string& letters) const {
    const auto found = vocabulary_.find(letters);
    if (found == vocabulary_.end()) throw Error(cat({"vocab has no token \"", letters, "\""}));
    return found->second;
  }

  void read_merges(const json& model) {
    const json* merges = get(model, "merges");
    if (!merges || !merges->is_array()) throw Error("merges is missing, or no list");
    for (const json& merge : *merges) {
      const auto [left, right] = sides(merge);
      if (!parts_->bpe.add_merge(find_token(left), find_token(right), find_token(left + right))) {
        throw Error(cat({"merges: ", merge.dump(), " stands twice"}));
      }
    }
  }

  /// "a b" or ["a", "b"].
  static std::pair<std::string, std::string> sides(const json& merge) {
    if (merge.is_string()) {
      const auto& both = merge.get_ref<const std::string&>();
      const std::size_t space = both.find(' ');
      if (space != std::string::npos && both.find(' ', space + 1) == std::string::npos) {
        return {both.substr(0, space), both.substr(space + 1)};
      }
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      return {merge[0].get<std::string>(), merge[1].get<std::string>()};
    }
    throw Error(cat({"merges: ", merge.dump().substr(0, 80), " is no pair of tokens"}));
  }

  void read_added() {
    const json* list = get(root_, "added_tokens");
    if (!list) return;
    if (!list->is_array()) throw Error("added_tokens is no list");
    for (const json& entry : *list) {
      const std::string content = text(entry, "content");
      if (content.empty()) throw Error("added_tokens: a token of no letters");
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        if (flag(entry, key, false)) refuse(cat({"added token ", content, ": ", key}), true);
      }
      const json* number = get(entry, "id");
      const Token id = token_id(number ? *number : json(), content);
      const bool special = flag(entry, "special", false);
      place(id, content, special);
      const bool normalized = flag(entry, "normalized", !special);
      (normalized ? normalized_ : raw_).push_back({id, content, special});
    }
  }

  void read_normalizer(const json* normalizer) {
    if (!normalizer) return;
    const std::string type = text(*normalizer, "type");
    if (type == "NFC") {
      parts_->nfc = true;
    } else if (type == "Sequence") {
      const json* list = get(*normalizer, "normalizers");
      for (const json& step : list ? *list : json::array()) read_normalizer(&step);
    } else {
      refuse("normalizer", *normalizer);
    }
  }

  void read_pre_tokenizer(const json& step) {
    const std::string type = text(step, "type");
    if (type == "Sequence") {
      const json* list = get(step, "pretokenizers");
      if (!list || !list->is_array()) throw Error("pretokenizers is missing, or no list");
      for (const json& inner : *list) read_pre_tokenizer(inner);
      return;
    }
    if (byte_level_) refuse("pre_tokenizer after ByteLevel:", step);
    if (type == "ByteLevel") {
      byte_level_ = true;
      if (flag(step, "add_prefix_space", true)) refuse("pre_tokenizer add_prefix_space", true);
      if (flag(step, "use_regex", true)) {
        parts_->splitters.push_back(Splitter::regex(kGpt2Pattern));
      }
    } else if (type == "Split") {
      if (text(step, "behavior") != "Isolated") refuse("pre_tokenizer", step);
      const json& pattern = object(step, "pattern");
      parts_->splitters.push_back(get(pattern, "Regex")
                                      ? Splitter::regex(text(pattern, "Regex"))
                                      : Splitter::literal(text(pattern, "String")));
    } else {
      refuse("pre_tokenizer", step);
    }
  }

  void check_rest() {
    if (const json* after = get(root_, "post_processor");
        after && text(*after, "type") != "ByteLevel") {
      refuse("post_processor", (*after)["type"]);
    }
    if (const json* decoder = get(root_, "decoder");
        decoder && text(*decoder, "type") != "ByteLevel") {
      refuse("decoder", *decoder);
    }
    for (AddedToken& token : raw_) parts_->raw.add(std::move(token));
    for (AddedToken& token : normalized_) {
      if (parts_->nfc) token.content = to_nfc(token.content);
      parts_->normalized.add(std::move(token));
    }
    for (std::size_t i = 0; i < parts_bytes_.size(); ++i) {
      if (!parts_bytes_[i].empty()) parts_->ids.emplace(parts_bytes_[i], static_cast<Token>(i));
    }
    parts_->bytes = std::move(parts_bytes_);
    parts_->special = std::move(parts_special_);
  }

  const json& root_;
  ByteLetters letters_;
  std::unordered_map<std::string, Token> vocabulary_;
  std::vector<AddedToken> raw_, normalized_;
  std::vector<std::string> parts_bytes_;
  std::vector<bool> parts_special_;
  std::shared_ptr<Tokenizer::Parts> parts_;
  bool byte_level_ = false;
};

}  // namespace

Result<Tokenizer> Tokenizer::parse(std::string_view json_text, const std::string& what) {
  const auto root = parse_json(json_text, what, kLimits);
  if (!root) return tl::unexpected(root.error());
  try {
    return Tokenizer(Reader(*root).read());
  } catch (const Error& error) {
    return fault(cat({what, ": ", error.what()}));
  } catch (const json::exception& error) {
    return fault(cat({what, ": ", error.what()}));
  }
}

}  // namespace lockstep::data
