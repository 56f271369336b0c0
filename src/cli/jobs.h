/// This program's verbs in processes of their own, several at once.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

struct Job {
  std::string name;               // stands before each line that the process writes to stderr
  std::vector<std::string> args;  // behind the program's name
};

/// What this program writes to stdout when it is given `args`, in a process of its own: one that
/// touches a GPU and leaves it. What it writes to stderr comes through. Throws Error with its own
/// line where it fails.
std::string answer_of(const std::vector<std::string>& args);

/// The GPUs that processes can be spread over, as CUDA_VISIBLE_DEVICES names them.
std::vector<std::string> gpus();

/// Runs all of them, at most `at_once` at a time, in order. The machine is shared out: each has its
/// part of the threads (unless LOCKSTEP_THREADS says how many), and of `cards` one, in turn, where
/// there are several. What they write to stdout is dropped. They end when this process does,
/// however it ends. Returns for each why it failed or could not be started, empty where it ended
/// well.
std::vector<std::string> run_jobs(const std::vector<Job>& jobs, int at_once,
                                  const std::vector<std::string>& cards);

}  // namespace lockstep::cli
