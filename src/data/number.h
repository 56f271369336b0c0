/// Numbers as people and models write them, read exactly; for answer.cc.
#pragma once

#include <optional>
#include <string_view>

namespace lockstep::data {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

__extension__ using Int128 = __int128;

/// num / den in lowest terms, and how it was written. Both fit 18 digits.
struct Number {
  Int128 num = 0;
  Int128 den = 1;
  int places = 0;         // digits behind the decimal point
  int exponent = 0;       // of ten; the last of those digits counts 10^(exponent - places)
  bool fraction = false;  // a/b, \frac, or a mixed number
  bool percent = false;
};

/// Takes the number that `text` begins with off its front; nothing where it begins with none, or
/// with one of more than 18 digits, and then `text` is as it was. A sign is part of it.
std::optional<Number> take_number(std::string_view& text);

/// Takes digits, separators, fractions and exponents off the front, whatever their length; false
/// where there are none. No sign is taken.
bool skip_number(std::string_view& text);

bool equal(const Number& a, const Number& b);

}  // namespace lockstep::data
