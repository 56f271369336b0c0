/// Text for people: tables and numbers.
#pragma once

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

/// To stdout, whole. Throws Error where it takes no more.
void print(const std::string& text);

}  // namespace lockstep::cli
