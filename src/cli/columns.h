/// Text for people: tables and numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::cli {

/// One line a row, columns two spaces apart: the first flush left, the others flush right.
std::string columns(const std::vector<std::vector<std::string>>& rows);

/// `digits` places behind the point.
std::string fixed(double value, int digits);

/// Sixteen digits.
std::string hex(std::uint64_t value);

/// "1 prompt", "2 prompts".
std::string counted(std::size_t count, const std::string& what);

/// To stdout, whole. Throws Error where it takes no more.
void print(const std::string& text);

}  // namespace lockstep::cli
