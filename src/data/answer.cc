#include "data/answer.h"

#include <cctype>

#include "data/number.h"

namespace lockstep::data {
namespace {

bool space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::string_view trim(std::string_view text) {
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  return text;
}

bool may_begin_number(std::string_view text) {
  return is_digit(text[0]) || (text[0] == '.' && text.size() > 1 && is_digit(text[1])) ||
         text.starts_with("\\frac") || text.starts_with("\\dfrac") || text.starts_with("\\tfrac");
}

/// Where the number at `at` begins, its sign included: a '-' behind an operand is an operator.
std::size_t with_sign(std::string_view text, std::size_t at) {
  constexpr std::string_view kMinus = "\xE2\x88\x92";
  std::size_t sign = at;
  if (at >= 1 && (text[at - 1] == '-' || text[at - 1] == '+')) sign = at - 1;
  if (text.substr(0, at).ends_with(kMinus)) sign = at - kMinus.size();
  if (sign == at || sign == 0) return sign;
  const auto before = static_cast<unsigned char>(text[sign - 1]);
  const bool operand = std::isalnum(before) || before == ')' || before == '}' || before == ']';
  return operand ? at : sign;
}

/// Text without what only sets it: white space, dollar signs, \text, \left, \right, spacing.
std::string bare(std::string_view text) {
  constexpr std::string_view kDropped[] = {"\\left", "\\right", "\\text",   "\\mathrm", "\\mbox",
                                           "\\!",    "\\,",     "\\;",      "\\:",      "\\ ",
                                           "\\$",    "^\\circ", "^{\\circ}"};
  std::string out;
  text = trim(text);
  while (!text.empty()) {
    bool dropped = false;
    for (std::string_view word : kDropped) {
      // "\text" is no part of "\texttt"
      const bool whole = text.starts_with(word) &&
                         (word.size() < 5 || word[0] != '\\' || text.size() == word.size() ||
                          !std::isalpha(static_cast<unsigned char>(text[word.size()])));
      if (!whole) continue;
      text.remove_prefix(word.size());
      dropped = true;
      break;
    }
    if (dropped) continue;
    if (text.starts_with("\\dfrac") || text.starts_with("\\tfrac")) {
      out += "\\frac";
      text.remove_prefix(6);
      continue;
    }
    if (!space(text.front()) && text.front() != '$') out += text.front();
    text.remove_prefix(1);
  }
  while (out.ends_with('.')) out.pop_back();
  // braces around the whole, which \text leaves behind
  while (out.size() > 1 && out.front() == '{' && out.find('}') == out.size() - 1) {
    out = out.substr(1, out.size() - 2);
  }
  return out;
}

std::optional<Number> whole_number(std::string_view text) {
  const auto number = take_number(text);
  if (!number || !text.empty()) return std::nullopt;
  return number;
}

std::size_t count(std::string_view text, std::string_view what) {
  std::size_t found = 0;
  for (std::size_t at = text.find(what); at != std::string_view::npos;
       at = text.find(what, at + what.size())) {
    ++found;
  }
  return found;
}

}  // namespace

std::optional<std::string> last_number(std::string_view text) {
  std::optional<std::string> last;
  for (std::size_t at = 0; at < text.size();) {
    std::string_view rest = text.substr(at);
    if (!may_begin_number(rest) || !skip_number(rest)) {
      ++at;
      continue;
    }
    const std::size_t end = text.size() - rest.size();
    const std::size_t first = with_sign(text, at);
    last = text.substr(first, end - first);
    at = end;
  }
  return last;
}

std::optional<std::string> last_boxed(std::string_view text) {
  constexpr std::string_view kBoxed = "\\boxed";
  const std::size_t at = text.rfind(kBoxed);
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = text.substr(at + kBoxed.size());
  while (!rest.empty() && space(rest.front())) rest.remove_prefix(1);
  if (rest.empty()) return std::nullopt;
  if (rest.front() != '{') {  // "\boxed 7"
    std::size_t end = 0;
    while (end < rest.size() && !space(rest[end]) && rest[end] != '$') ++end;
    return std::string(rest.substr(0, end));
  }
  std::int64_t depth = 0;
  for (std::size_t i = 0; i < rest.size(); ++i) {
    if (rest[i] == '\\') {
      ++i;  // "\{" and "\}" are set, not grouping
    } else if (rest[i] == '{') {
      ++depth;
    } else if (rest[i] == '}' && --depth == 0) {
      return std::string(rest.substr(1, i - 1));
    }
  }
  return std::nullopt;
}

bool same_number(std::string_view a, std::string_view b) {
  const auto first = whole_number(bare(a));
  const auto second = whole_number(bare(b));
  return first && second && equal(*first, *second);
}

bool same_answer(std::string_view a, std::string_view b) {
  return same_number(a, b) || bare(a) == bare(b);
}

bool correct(Judge judge, std::string_view response, std::string_view truth) {
  if (judge == Judge::kExact) return trim(response) == trim(truth);
  std::optional<std::string> answer;
  if (judge != Judge::kNumber) answer = last_boxed(response);
  if (!answer && judge != Judge::kBoxed) answer = last_number(response);
  return answer && same_answer(*answer, truth);
}

bool in_form(Form form, std::string_view response) {
  switch (form) {
    case Form::kAny: return true;
    case Form::kBoxed: return count(response, "\\boxed") == 1 && last_boxed(response).has_value();
    case Form::kThink: {
      const std::string_view text = trim(response);
      const std::size_t end = text.find("</think>");
      return text.starts_with("<think>") && count(text, "<think>") == 1 &&
             count(text, "</think>") == 1 &&
             !trim(text.substr(end + std::string_view("</think>").size())).empty();
    }
  }
  return false;
}

}  // namespace lockstep::data
