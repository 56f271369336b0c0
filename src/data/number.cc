#include "data/number.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace lockstep::data {
namespace {

constexpr int kMaxDigits = 18;  // products of two such numbers fit 128 bits

bool take(std::string_view& text, std::string_view what) {
  if (!text.starts_with(what)) return false;
  text.remove_prefix(what.size());
  return true;
}

std::string_view take_digits(std::string_view& text) {
  std::size_t n = 0;
  while (n < text.size() && is_digit(text[n])) ++n;
  const std::string_view digits = text.substr(0, n);
  text.remove_prefix(n);
  return digits;
}

bool take_sign(std::string_view& text) {
  if (take(text, "-") || take(text, "\xE2\x88\x92")) return true;  // U+2212, the minus sign
  take(text, "+");
  return false;
}

/// A number's parts as text: integer digits without separators, digits behind the point, exponent.
struct Mantissa {
  std::string whole{};
  std::string_view places{};
  std::int64_t exponent = 0;
};

/// "1,234,567": groups of three behind one to three digits.
void take_groups(std::string_view& text, std::string& whole) {
  while (whole.size() > 0 && text.starts_with(',')) {
    std::string_view rest = text.substr(1);
    const std::string_view group = take_digits(rest);
    if (group.size() != 3) return;
    whole += group;
    text = rest;
  }
}

/// "e5", "E-5", "\times 10^{5}", "×10^5".
void take_exponent(std::string_view& text, std::int64_t& exponent) {
  std::string_view rest = text;
  bool braces = false;
  if (!take(rest, "e") && !take(rest, "E")) {
    while (take(rest, " ")) {
    }
    if (!take(rest, "\\times") && !take(rest, "\xC3\x97")) return;
    while (take(rest, " ")) {
    }
    if (!take(rest, "10^")) return;
    braces = take(rest, "{");
  }
  const bool negative = take_sign(rest);
  const std::string_view digits = take_digits(rest);
  if (digits.empty() || digits.size() > 4) return;
  if (braces && !take(rest, "}")) return;
  exponent = std::stoll(std::string(digits));
  if (negative) exponent = -exponent;
  text = rest;
}

std::optional<Mantissa> take_mantissa(std::string_view& text) {
  std::string_view rest = text;
  Mantissa mantissa;
  mantissa.whole = take_digits(rest);
  if (!mantissa.whole.empty() && mantissa.whole.size() <= 3) take_groups(rest, mantissa.whole);
  if (rest.size() > 1 && rest[0] == '.' && is_digit(rest[1])) {
    rest.remove_prefix(1);
    mantissa.places = take_digits(rest);
  }
  if (mantissa.whole.empty() && mantissa.places.empty()) return std::nullopt;
  take_exponent(rest, mantissa.exponent);
  text = rest;
  return mantissa;
}

Int128 power10(std::int64_t exponent) {
  Int128 power = 1;
  for (std::int64_t i = 0; i < exponent; ++i) power *= 10;
  return power;
}

bool fits(Int128 value) { return value < power10(kMaxDigits) && value > -power10(kMaxDigits); }

bool reduce(Number& number) {
  if (number.den == 0) return false;
  Int128 a = number.num < 0 ? -number.num : number.num;
  Int128 b = number.den;
  while (b != 0) {
    const Int128 rest = a % b;
    a = b;
    b = rest;
  }
  if (a > 1) {
    number.num /= a;
    number.den /= a;
  }
  return fits(number.num) && fits(number.den);
}

std::optional<Number> to_number(const Mantissa& mantissa) {
  std::string_view behind = mantissa.places;
  while (behind.ends_with('0')) behind.remove_suffix(1);
  std::string digits = mantissa.whole + std::string(behind);
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
  const std::int64_t shift = mantissa.exponent - static_cast<std::int64_t>(behind.size());
  if (digits.size() > kMaxDigits || shift > kMaxDigits || shift < -kMaxDigits) return std::nullopt;
  Number number = {.places = static_cast<int>(std::min<std::size_t>(mantissa.places.size(), 999)),
                   .exponent = static_cast<int>(mantissa.exponent)};
  for (char c : digits) number.num = number.num * 10 + (c - '0');
  if (shift > 0 && !fits(number.num)) return std::nullopt;
  number.num *= power10(std::max<std::int64_t>(shift, 0));
  number.den = power10(std::max<std::int64_t>(-shift, 0));
  if (!reduce(number)) return std::nullopt;
  return number;
}

std::optional<Number> take_decimal(std::string_view& text) {
  std::string_view rest = text;
  const auto mantissa = take_mantissa(rest);
  if (!mantissa) return std::nullopt;
  const auto number = to_number(*mantissa);
  if (number) text = rest;
  return number;
}

std::optional<Number> divide(const Number& a, const Number& b) {
  Number result = {.num = a.num * b.den, .den = a.den * b.num, .fraction = true};
  if (result.den < 0) {
    result.den = -result.den;
    result.num = -result.num;
  }
  if (!reduce(result)) return std::nullopt;
  return result;
}

/// "{-3}", "{ 12 }", or a single digit.
std::optional<Number> take_group(std::string_view& text) {
  std::string_view rest = text;
  while (take(rest, " ")) {
  }
  if (!rest.empty() && is_digit(rest.front())) {
    const Number number = {.num = rest.front() - '0'};
    text = rest.substr(1);
    return number;
  }
  if (!take(rest, "{")) return std::nullopt;
  while (take(rest, " ")) {
  }
  const bool negative = take_sign(rest);
  auto number = take_decimal(rest);
  while (take(rest, " ")) {
  }
  if (!number || !take(rest, "}")) return std::nullopt;
  if (negative) number->num = -number->num;
  text = rest;
  return number;
}

std::optional<Number> take_fraction(std::string_view& text) {
  std::string_view rest = text;
  if (!take(rest, "\\frac") && !take(rest, "\\dfrac") && !take(rest, "\\tfrac")) {
    return std::nullopt;
  }
  const auto above = take_group(rest);
  if (!above) return std::nullopt;
  const auto below = take_group(rest);
  if (!below) return std::nullopt;
  const auto quotient = divide(*above, *below);
  if (quotient) text = rest;
  return quotient;
}

/// What may follow a decimal: "/4", or "\frac{1}{2}" behind a whole number.
Number with_fraction(const Number& first, std::string_view& text) {
  std::string_view rest = text;
  if (take(rest, "/")) {
    const auto below = take_decimal(rest);
    const auto quotient = below ? divide(first, *below) : std::nullopt;
    if (!quotient) return first;
    text = rest;
    return *quotient;
  }
  if (first.places > 0 || first.den != 1) return first;
  const auto part = take_fraction(rest);
  if (!part || part->num < 0) return first;
  Number sum = {.num = first.num * part->den + part->num, .den = part->den, .fraction = true};
  if (!reduce(sum)) return first;
  text = rest;
  return sum;
}

/// Whether the decimal `a`, of at least six places as it is written and as it counts, is what `b`
/// rounds to: they differ by half of a's last digit at most.
bool rounds_to(const Number& a, const Number& b) {
  constexpr int kLeastPlaces = 6;
  constexpr int kMostPlaces = 37;  // past it the half digit is less than any gap there can be
  const int places = a.places - a.exponent;
  if (a.fraction || !b.fraction || a.places < kLeastPlaces || places < kLeastPlaces ||
      places > kMostPlaces) {
    return false;
  }
  Int128 gap = a.num * b.den - b.num * a.den;  // times a.den * b.den; below 2^127 all of it
  if (gap < 0) gap = -gap;
  return gap <= a.den * b.den / power10(places) / 2;
}

bool same(const Number& a, const Number& b) {
  if (a.num * b.den == b.num * a.den) return true;
  return rounds_to(a, b) || rounds_to(b, a);
}

Number hundredth(Number number) {
  number.den *= 100;
  number.exponent -= 2;
  return number;
}

}  // namespace

std::optional<Number> take_number(std::string_view& text) {
  std::string_view rest = text;
  const bool negative = take_sign(rest);
  std::optional<Number> number = take_fraction(rest);
  if (!number) {
    number = take_decimal(rest);
    if (number) number = with_fraction(*number, rest);
  }
  if (!number) return std::nullopt;
  if (take(rest, "\\%") || take(rest, "%")) number->percent = true;
  if (negative) number->num = -number->num;
  text = rest;
  return number;
}

bool skip_number(std::string_view& text) {
  if (take_number(text)) return true;
  return take_mantissa(text).has_value();
}

bool equal(const Number& a, const Number& b) {
  if (a.percent == b.percent) return same(a, b);
  const Number& percent = a.percent ? a : b;
  const Number& bare = a.percent ? b : a;
  return same(percent, bare) || same(hundredth(percent), bare);
}

}  // namespace lockstep::data
