/// Byte-pair merges: a piece of text to tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/id.h"

namespace lockstep::data {

/// Byte-level byte-pair encoding. Tokens are strings of bytes here; the letters that stand for
/// bytes in a tokenizer.json stay outside.
class Bpe {
 public:
  struct Merge {
    std::uint32_t rank = 0;
    Token merged = 0;
  };

  /// `bytes[b]` is byte b's token.
  explicit Bpe(const std::array<Token, 256>& bytes) : bytes_(bytes) {}

  /// The next merge in rank; false where the pair has one already.
  bool add_merge(Token left, Token right, Token merged);

  /// A piece that equals one of these becomes its token without merges (ignore_merges).
  void add_whole(std::string bytes, Token token) { whole_.emplace(std::move(bytes), token); }

  /// Appends the piece's tokens: of all pairs the one of lowest rank merges first, the leftmost of
  /// equals, until none has a merge.
  void encode(std::string_view piece, std::vector<Token>& out) const;

 private:
  const Merge* find(Token left, Token right) const;
  void merge_long(std::vector<Token> symbols, std::vector<Token>& out) const;

  std::array<Token, 256> bytes_;
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::unordered_map<std::string, Token> whole_;
};

}  // namespace lockstep::data
