#include "cli/interrupt.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <csignal>
#include <cstring>

namespace lockstep::cli {
namespace {

// A handler may read what no lock guards: fixed memory, and a flag that says whether it is whole.
template <std::size_t kSize>
struct Text {
  std::array<char, kSize> bytes{};
  std::atomic<bool> whole = false;

  void set(const std::string& text) {
    whole = false;
    const std::size_t n = std::min(text.size(), kSize - 1);
    std::copy_n(text.begin(), n, bytes.begin());
    bytes[n] = '\0';
    whole = n == text.size() && n > 0;
  }
};
Text<256> remedy;
std::array<Text<PATH_MAX>, 8> parts;

/// Calls nothing but what a signal handler may.
void end(int signal) {
  for (std::size_t i = parts.size(); i-- > 0;) {
    if (!parts[i].whole) continue;
    if (::unlink(parts[i].bytes.data()) != 0) ::rmdir(parts[i].bytes.data());
  }
  std::array<char, 512> line{};
  std::strcpy(line.data(),
              signal == SIGINT ? "error: interrupted by SIGINT" : "error: interrupted by SIGTERM");
  if (remedy.whole) std::strcat(line.data(), remedy.bytes.data());
  std::strcat(line.data(), "\n");
  [[maybe_unused]] const ssize_t written =
      ::write(STDERR_FILENO, line.data(), std::strlen(line.data()));
  ::_exit(128 + signal);
}

}  // namespace

void catch_interrupts() {
  for (const int signal : {SIGINT, SIGTERM}) {
    if (std::signal(signal, end) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
}

void on_interrupt_say(const std::string& text) { remedy.set("; " + text.substr(0, 200)); }

GoneOnInterrupt::GoneOnInterrupt(const std::string& path) : slot_(0) {
  while (slot_ < parts.size() && parts[slot_].whole) ++slot_;
  if (slot_ < parts.size()) parts[slot_].set(path);
}

GoneOnInterrupt::~GoneOnInterrupt() {
  if (slot_ < parts.size()) parts[slot_].whole = false;
}

}  // namespace lockstep::cli
