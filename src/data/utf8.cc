#include "data/utf8.h"

#include <cstdint>

namespace lockstep::data {
namespace {

/// What may follow the first byte of a character (Unicode, table 3-7).
struct Form {
  std::size_t length = 0;                // 0: no first byte
  std::uint8_t low = 0x80, high = 0xBF;  // of the second byte
};

Form form(std::uint8_t first) {
  if (first < 0x80) return {1};
  if (first < 0xC2) return {0};
  if (first < 0xE0) return {2};
  if (first == 0xE0) return {3, 0xA0, 0xBF};
  if (first == 0xED) return {3, 0x80, 0x9F};
  if (first < 0xF0) return {3};
  if (first == 0xF0) return {4, 0x90, 0xBF};
  if (first < 0xF4) return {4};
  if (first == 0xF4) return {4, 0x80, 0x8F};
  return {0};
}

struct Scan {
  std::size_t bytes;  // looked at, at least 1
  bool complete;
};

/// The longest beginning of a character at the front of `text`, which is not empty.
Scan scan(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const Form expected = form(byte(0));
  if (expected.length == 0) return {1, false};
  for (std::size_t i = 1; i < expected.length; ++i) {
    const std::uint8_t low = i == 1 ? expected.low : 0x80;
    const std::uint8_t high = i == 1 ? expected.high : 0xBF;
    if (i == text.size() || byte(i) < low || byte(i) > high) return {i, false};
  }
  return {expected.length, true};
}

}  // namespace

std::size_t character_length(std::string_view text) {
  if (text.empty()) return 0;
  const Scan found = scan(text);
  return found.complete ? found.bytes : 0;
}

std::size_t first_invalid(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    if (static_cast<std::uint8_t>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const Scan found = scan(text.substr(i));
    if (!found.complete) return i;
    i += found.bytes;
  }
  return std::string_view::npos;
}

std::string replace_invalid(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const Scan found = scan(text.substr(i));
    out += found.complete ? text.substr(i, found.bytes) : std::string_view("\xEF\xBF\xBD");
    i += found.bytes;
  }
  return out;
}

}  // namespace lockstep::data
