/// UTF-8 as text from outside needs it: checked once at the door.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep::data {

/// Length of the well-formed character at the front of `text`, 1 to 4; 0 where there is none. Not
/// well formed are overlong forms, surrogates and all above U+10FFFF.
std::size_t character_length(std::string_view text);

/// Where the first byte stands that belongs to no well-formed character; npos where none does.
std::size_t first_invalid(std::string_view text);

/// The text with U+FFFD in place of each ill-formed part: as long as a well-formed beginning of a
/// character goes, else one byte (what Rust and Python put there too).
std::string replace_invalid(std::string_view text);

}  // namespace lockstep::data
