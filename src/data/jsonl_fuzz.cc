// Rows from anybody, and answers: a row is read or refused with one line, an answer is judged.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "data/answer.h"
#include "data/jsonl.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace lockstep::data;
  const std::string_view text(reinterpret_cast<const char*>(bytes), size);
  const auto row = parse_row(text);
  if (!row && row.error().message.empty()) std::abort();
  if (row && row->prompt.empty() == row->messages.empty()) std::abort();

  const std::size_t half = text.find('\n');
  const std::string_view response = text.substr(0, half);
  const std::string_view truth = half == text.npos ? "1/2" : text.substr(half + 1);
  const auto last = last_number(response);
  if (last && last->empty()) std::abort();
  for (Judge judge : {Judge::kExact, Judge::kNumber, Judge::kBoxed, Judge::kAnswer}) {
    (void)correct(judge, response, truth);
  }
  for (Form form : {Form::kAny, Form::kBoxed, Form::kThink}) (void)in_form(form, response);
  if (same_answer(response, truth) != same_answer(truth, response)) std::abort();
  if (!same_answer(response, response)) std::abort();
  return 0;
}
