#pragma once

#include <filesystem>
#include <string_view>

namespace lockstep {

/// Makes a folder, and those above it. Where that cannot be, throws with what it was to be and the
/// remedy: Usage where the path is at fault, Error where the disk is full or read-only. True where it is new.
bool make_folder(const std::filesystem::path& folder, std::string_view what,
                 std::string_view remedy);

}  // namespace lockstep
