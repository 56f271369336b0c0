#pragma once

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "cli/interrupt.h"
#include "model/file.h"

namespace lockstep::cli {

/// Refuses, before anything is computed, an output that cannot be written or is one of `inputs`:
/// `option` names it. Throws Error or Usage.
void check_output(const std::string& path, const char* option,
                  const std::vector<std::string>& inputs);

/// Lines to a file that appears whole, or to stdout as they come.
class LinesOut {
 public:
  /// An empty path is stdout. Throws Error where the file cannot be made.
  explicit LinesOut(const std::string& path);
  /// Without commit() nothing is left.
  ~LinesOut();
  LinesOut(const LinesOut&) = delete;
  LinesOut& operator=(const LinesOut&) = delete;

  /// Throws Error where the disk takes no more.
  void line(const std::string& text);
  void commit();

  /// " to FILE", "" for stdout: for messages.
  std::string where() const;

 private:
  std::filesystem::path path_;
  Destination to_{};
  std::optional<GoneOnInterrupt> gone_{};
  std::ofstream file_;
};

}  // namespace lockstep::cli
