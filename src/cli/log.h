/// What the program says beside its results: to stderr, one line each.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::cli {

void info(const std::string& line);
void warn(const std::string& line);
void error(const std::string& line);

/// A line that is overwritten as work goes on. Shown on a terminal only, and only once the work has
/// taken a second; gone when it ends.
class Progress {
 public:
  Progress(std::string what, std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void at(std::int64_t done, const std::string& more = "");

 private:
  std::string what_;
  std::int64_t total_;
  double began_, shown_ = 0;
};

/// Seconds on a clock that only goes forward.
double seconds();

}  // namespace lockstep::cli
