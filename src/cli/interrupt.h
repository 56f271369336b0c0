/// Ctrl-C and SIGTERM end the program at once with one line and status 130 or 143. A run directory
/// is whole at every moment, so there is nothing to wait for: what is half-written there is cleared
/// when the run goes on.
#pragma once

#include <string>

namespace lockstep::cli {

/// From here on; a signal that the caller ignores stays ignored.
void catch_interrupts();

/// What the line says after "interrupted"; the text is kept, and cut at 200 bytes.
void on_interrupt_say(const std::string& remedy);

/// A file that an interrupted program leaves nothing of; one at a time, "" ends it.
void on_interrupt_remove(const std::string& path);

}  // namespace lockstep::cli
