#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace lockstep::cli {

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
  std::filesystem::path path_, part_;
  std::ofstream file_;
};

}  // namespace lockstep::cli
