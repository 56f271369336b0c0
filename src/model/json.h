/// JSON from files that nobody has vouched for: bounded in size and depth, no key twice.
#pragma once

#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/error.h"

namespace lockstep {

struct JsonLimits {
  std::size_t bytes = std::size_t{64} << 20;
  int depth = 64;
};

/// The text's value, or what is wrong with it and at which byte. `what` names the text in
/// messages. Text that is no UTF-8 is wrong.
Result<nlohmann::json> parse_json(std::string_view text, const std::string& what,
                                  const JsonLimits& limits = {});

/// The same of a file.
Result<nlohmann::json> read_json(const std::filesystem::path& path, const JsonLimits& limits = {});

/// The whole file as text; at most `limit` bytes.
Result<std::string> read_text(const std::filesystem::path& path,
                              std::size_t limit = std::size_t{1} << 30);

/// Writes beside the target and renames: the old file or the new one, never a part. What is no
/// regular file is written as it is: destination(). Throws Error.
void write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace lockstep
