/// For tests: what docs/formats/record.md shows.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep::testing {

/// The lines of a document's ```rows blocks, by their first word.
inline std::map<std::string, std::vector<std::uint8_t>> rows_in(const std::string& document) {
  std::ifstream in(document);
  std::map<std::string, std::vector<std::uint8_t>> rows;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("```", 0) == 0) {
      inside = line == "```rows";
      continue;
    }
    if (!inside) continue;
    std::istringstream words(line);
    std::string name, word;
    words >> name;
    while (words >> word) {
      rows[name].push_back(static_cast<std::uint8_t>(std::stoi(word, nullptr, 16)));
    }
  }
  return rows;
}

}  // namespace lockstep::testing
