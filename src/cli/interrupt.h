/// Ctrl-C and SIGTERM end the program at once with one line and status 130 or 143. A run directory
/// is whole at every moment, so there is nothing to wait for: what is half-written there is cleared
/// when the run goes on.
#pragma once

#include <cstddef>
#include <string>

namespace lockstep::cli {

/// From here on; a signal that the caller ignores stays ignored.
void catch_interrupts();

/// What the line says after "interrupted"; the text is kept, and cut at 200 bytes.
void on_interrupt_say(const std::string& remedy);

/// While it lives, an interrupted program leaves nothing of a file, or of a folder that the younger
/// ones have emptied. A few at a time; one too many, or a path too long, stays.
class GoneOnInterrupt {
 public:
  explicit GoneOnInterrupt(const std::string& path);
  ~GoneOnInterrupt();
  GoneOnInterrupt(const GoneOnInterrupt&) = delete;
  GoneOnInterrupt& operator=(const GoneOnInterrupt&) = delete;

 private:
  std::size_t slot_;
};

}  // namespace lockstep::cli
