/// Values as JSON, one line each; numbers in their shortest exact form.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/id.h"

namespace lockstep::cli {

/// A string; what is no UTF-8 in it becomes U+FFFD.
std::string json_text(std::string_view text);
std::string json_text(float value);  // null where it is not finite
std::string json_text(std::span<const Token> tokens);
/// null where mask is 0.
std::string json_text(std::span<const float> values, std::span<const std::uint8_t> mask);

}  // namespace lockstep::cli
