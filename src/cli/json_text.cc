#include "cli/json_text.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace lockstep::cli {

std::string json_text(std::string_view text) {
  using nlohmann::json;
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string json_text(float value) { return std::isfinite(value) ? cat({value}) : "null"; }

std::string json_text(std::span<const Token> tokens) {
  std::string text = "[";
  for (const Token token : tokens) {
    if (text.size() > 1) text += ',';
    text += std::to_string(token);
  }
  return text + "]";
}

std::string json_text(std::span<const float> values, std::span<const std::uint8_t> mask) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += ',';
    text += mask[i] != 0 ? json_text(values[i]) : "null";
  }
  return text + "]";
}

}  // namespace lockstep::cli
