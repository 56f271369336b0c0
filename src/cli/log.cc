#include "cli/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

namespace lockstep::cli {
namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto made = spdlog::stderr_color_st("lockstep");
    made->set_pattern("%^%v%$");
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return *instance;
}

/// What a message quotes may be anything: it stays one line, of a length that can be read.
std::string one_line(const std::string& text) {
  constexpr std::size_t kMost = 2000;
  constexpr const char* kHex = "0123456789abcdef";
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      line += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      (line += "\\x") += {kHex[byte >> 4], kHex[byte & 15]};
    } else {
      line += c;
    }
  }
  if (line.size() <= kMost) return line;
  return line.substr(0, kMost / 2) + " ... " + line.substr(line.size() - kMost / 2);
}

}  // namespace

void info(const std::string& line) { logger().info("{}", line); }
void warn(const std::string& line) { logger().warn("warning: {}", line); }
void error(const std::string& line) { logger().error("error: {}", one_line(line)); }

double seconds() {
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  return now.count();
}

Progress::Progress(std::string what, std::int64_t total)
    : what_(std::move(what)), total_(total), began_(seconds()) {}

void Progress::at(std::int64_t done, const std::string& more) {
  static const bool terminal = isatty(STDERR_FILENO) != 0;
  const double now = seconds();
  if (!terminal || now - began_ < 1 || now - shown_ < 0.1) return;
  shown_ = now;
  std::fprintf(stderr, "\r\033[K%s %lld/%lld %s", what_.c_str(), static_cast<long long>(done),
               static_cast<long long>(total_), more.c_str());
  std::fflush(stderr);
}

Progress::~Progress() {
  if (shown_ > 0) std::fprintf(stderr, "\r\033[K");
}

}  // namespace lockstep::cli
