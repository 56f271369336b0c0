/// Waiting for what a neighbour process is about to give up: the memory and the locks of one that
/// was killed are freed a while after it has gone.
#pragma once

#include <functional>
#include <string>

namespace lockstep {

/// How long: LOCKSTEP_WAIT seconds, 10 where that is not set. Throws Usage where it is no number.
double longest_wait();

/// Another number of seconds where LOCKSTEP_WAIT is not set.
void set_default_wait(double seconds);

/// Asks `is_there` again and again until it says yes or longest_wait() has passed; its last answer.
/// When the first is no, one line tells what is waited for.
bool wait_for(const std::string& what, const std::function<bool()>& is_there);

/// Takes a file's advisory lock, after waiting for it. False: another process holds it still.
bool wait_for_lock(int descriptor, const std::string& name);

/// Who is told; stderr unless somebody else is named.
void tell_of_waiting(void (*tell)(const std::string& line));

}  // namespace lockstep
