/// Finds answers in text and compares them. Pure functions of strings; anything may stand in them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::data {

/// The last number in the text, as it is written: "1,234.5", "-3", "2/3", "\frac{1}{2}", "50%",
/// "1.5e3". A '-' behind a digit, a letter or a closing bracket is an operator, not a sign.
std::optional<std::string> last_number(std::string_view text);

/// What stands in the last \boxed{...}, with braces nested to any depth; nothing where there is
/// none or it is not closed.
std::optional<std::string> last_boxed(std::string_view text);

/// Whether two texts write the same number, exactly: integers, decimals, signs, thousands
/// separators, fractions (a/b, \frac, mixed), scientific notation. A percentage is equal to its
/// hundredth and to the bare number; a decimal of six places or more is equal to a fraction that
/// rounds to it. False where one of them is no number.
bool same_number(std::string_view a, std::string_view b);

/// Whether two texts give the same answer: the same number, or the same text once white space,
/// dollar signs, \text, \left, \right and spacing commands are taken away.
bool same_answer(std::string_view a, std::string_view b);

/// How a response is judged against the truth.
enum class Judge : std::uint8_t {
  kExact,   // the response is the truth, but for white space around it
  kNumber,  // its last number is
  kBoxed,   // what it boxes last is
  kAnswer,  // what it boxes last, or where it boxes nothing its last number
};
bool correct(Judge judge, std::string_view response, std::string_view truth);

/// A form that is asked for beside the right answer.
enum class Form : std::uint8_t {
  kAny,
  kBoxed,  // exactly one \boxed{...}
  kThink,  // "<think>...</think>" once, at the front, and an answer behind it
};
bool in_form(Form form, std::string_view response);

}  // namespace lockstep::data
