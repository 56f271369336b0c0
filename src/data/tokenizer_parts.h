/// What a tokenizer is made of; between tokenizer.cc, which uses it, and tokenizer_json.cc, which
/// makes it.
#pragma once

#include <array>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/bpe.h"
#include "data/split.h"
#include "data/tokenizer.h"

namespace lockstep::data {

struct AddedToken {
  Token id = 0;
  std::string content{};
  bool special = false;
};

/// Finds added tokens in text: the leftmost, of those the longest.
class AddedTokens {
 public:
  void add(AddedToken token);
  bool empty() const { return empty_; }

  /// The token that `text` begins with; nullptr where it begins with none.
  const AddedToken* at(std::string_view text) const;

 private:
  std::array<std::vector<AddedToken>, 256> by_first_;  // byte; longest first
  bool empty_ = true;
};

struct Tokenizer::Parts {
  Bpe bpe;
  bool nfc = false;
  std::vector<Splitter> splitters{};
  AddedTokens raw{};                 // looked for in the text as it is
  AddedTokens normalized{};          // looked for after normalization
  std::vector<std::string> bytes{};  // of each token; empty: there is no such token
  std::vector<bool> special{};
  std::unordered_map<std::string, Token> ids{};  // by bytes
};

/// `text`, well-formed UTF-8, in Unicode's normal form C.
std::string to_nfc(std::string_view text);

}  // namespace lockstep::data
