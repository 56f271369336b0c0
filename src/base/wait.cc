#include "base/wait.h"

#include <sys/file.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {
namespace {

void to_stderr(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

void (*teller)(const std::string&) = to_stderr;
double default_wait = 10;

}  // namespace

double longest_wait() {
  constexpr double kMost = 86400;
  const char* const text = std::getenv("LOCKSTEP_WAIT");
  if (text == nullptr || *text == '\0') return default_wait;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds >= 0 && seconds <= kMost)) {
    throw Usage(cat(
        {"LOCKSTEP_WAIT is '", text, "'; a number of seconds from 0 to ", kMost, " is expected"}));
  }
  return seconds;
}

void set_default_wait(double seconds) { default_wait = seconds; }

bool wait_for(const std::string& what, const std::function<bool()>& is_there) {
  if (is_there()) return true;
  using Clock = std::chrono::steady_clock;
  const double longest = longest_wait();
  if (longest == 0) return false;
  teller(cat({"waiting up to ", longest, " s for ", what}));
  const auto end = Clock::now() + std::chrono::duration<double>(longest);
  while (Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (is_there()) return true;
  }
  return false;
}

bool wait_for_lock(int descriptor, const std::string& name) {
  return wait_for(cat({name, ", which another process has locked"}),
                  [=] { return ::flock(descriptor, LOCK_EX | LOCK_NB) == 0; });
}

void tell_of_waiting(void (*tell)(const std::string& line)) { teller = tell; }

}  // namespace lockstep
