/// Messages from pieces, without the compile time of a formatting library.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A piece of a message: text, a whole number, or a real number in its shortest exact form.
class Piece {
 public:
  Piece(std::string_view text) : text_(text) {}
  Piece(const char* text) : text_(text) {}
  Piece(const std::string& text) : text_(text) {}
  Piece(char c) : text_(1, c) {}
  Piece(bool value) : text_(value ? "true" : "false") {}
  template <std::integral T>
  Piece(T value) : text_(std::to_string(value)) {}
  Piece(double value);
  Piece(float value);

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// The pieces in a row: cat({"key ", key, " is ", value}).
std::string cat(std::initializer_list<Piece> pieces);

/// The one of `known` that differs least from `word`, "" where none is near: for "did you mean".
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace lockstep
