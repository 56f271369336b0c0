#include "cli/jobs.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "cli/log.h"

namespace lockstep::cli {
namespace {

std::string why(int error) { return std::generic_category().message(error); }

/// Two ends of a pipe that processes started later do not have.
std::array<int, 2> pipe_ends() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw Error("cannot make a pipe: " + why(errno));
  return ends;
}

/// A process, and the lines that come out of it.
class Running {
 public:
  /// `lane`: which of those that run at once. `answer`: where its stdout goes; -1: nowhere.
  Running(const Job& job, std::size_t index, int lane, int at_once,
          const std::vector<std::string>& cards, int answer = -1)
      : index_(index), lane_(lane), name_(job.name) {
    // Made before the fork: between it and exec nothing may be allocated.
    std::vector<std::string> variables = environment(lane, at_once, cards);
    std::vector<char*> envp;
    for (std::string& variable : variables) envp.push_back(variable.data());
    envp.push_back(nullptr);
    std::vector<std::string> args = job.args;
    args.insert(args.begin(), "lockstep");
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);

    const std::array<int, 2> ends = pipe_ends();
    const pid_t parent = ::getpid();
    process_ = ::fork();
    if (process_ == 0) become(argv.data(), envp.data(), answer, ends[1], parent);
    ::close(ends[1]);
    from_ = ends[0];
    if (process_ < 0) {
      const int error = errno;
      ::close(from_);
      throw Error("cannot start another process: " + why(error));
    }
  }
  ~Running() {
    if (from_ < 0) return;
    ::kill(process_, SIGTERM);
    ::close(from_);
    ::waitpid(process_, nullptr, 0);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  int from() const { return from_; }
  std::size_t index() const { return index_; }
  int lane() const { return lane_; }

  /// Passes on what has come. False when the process has closed its end.
  bool read() {
    std::array<char, 4096> bytes{};
    const ssize_t n = ::read(from_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) return true;
    if (n <= 0) {
      if (!line_.empty()) pass_on();
      return false;
    }
    for (const char c : std::string_view(bytes.data(), static_cast<std::size_t>(n))) {
      if (c == '\n') {
        pass_on();
      } else {
        line_ += c;
      }
    }
    return true;
  }

  /// Waits for its end. Why it failed, or nothing.
  std::string end() {
    int status = 0;
    while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) continue;
    ::close(std::exchange(from_, -1));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
    if (!error_.empty()) return error_;
    if (WIFSIGNALED(status)) {
      return cat(
          {"it was ended by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")"});
    }
    return cat({"it ended with status ", WEXITSTATUS(status)});
  }

 private:
  static std::vector<std::string> environment(int lane, int at_once,
                                              const std::vector<std::string>& cards) {
    std::vector<std::string> variables;
    const bool choose = cards.size() > 1;
    const bool share = std::getenv("LOCKSTEP_THREADS") == nullptr;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      if (choose && std::strncmp(*variable, "CUDA_VISIBLE_DEVICES=", 21) == 0) continue;
      variables.emplace_back(*variable);
    }
    if (choose) {
      const auto card = static_cast<std::size_t>(lane) % cards.size();
      variables.push_back("CUDA_VISIBLE_DEVICES=" + cards[card]);
    }
    if (share) variables.push_back(cat({"LOCKSTEP_THREADS=", std::max(1, threads() / at_once)}));
    return variables;
  }

  [[noreturn]] static void become(char** argv, char** envp, int answer, int to, pid_t parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);  // it ended before the line above
    const int nowhere = ::open("/dev/null", O_RDWR);
    if (nowhere >= 0) {
      ::dup2(nowhere, STDIN_FILENO);
      ::dup2(nowhere, STDOUT_FILENO);
    }
    if (answer >= 0) ::dup2(answer, STDOUT_FILENO);
    ::dup2(to, STDERR_FILENO);
    ::execve("/proc/self/exe", argv, envp);
    ::_exit(127);
  }

  void pass_on() {
    constexpr std::string_view kError = "error: ";
    if (line_.starts_with(kError)) error_ = line_.substr(kError.size());
    const std::size_t text = line_.find_first_not_of(' ');
    // An error is why it failed: told once it has ended.
    if (text != std::string::npos && !line_.starts_with(kError)) {
      info(name_.empty() ? line_ : name_ + "  " + line_.substr(text));
    }
    line_.clear();
  }

  std::size_t index_;
  int lane_;
  std::string name_;
  pid_t process_ = -1;
  int from_ = -1;
  std::string line_, error_;
};

using Processes = std::vector<std::unique_ptr<Running>>;

/// Waits until some process has written or ended; the ended one, taken out of `running`.
std::unique_ptr<Running> next_ended(Processes& running) {
  std::vector<pollfd> waits;
  for (const auto& each : running) waits.push_back({each->from(), POLLIN, 0});
  if (::poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) {
    throw Error("cannot wait for the other processes: " + why(errno));
  }
  for (std::size_t i = 0; i < waits.size(); ++i) {
    if (waits[i].revents == 0 || running[i]->read()) continue;
    std::unique_ptr<Running> ended = std::move(running[i]);
    running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
    return ended;
  }
  return nullptr;
}

}  // namespace

std::string answer_of(const std::vector<std::string>& args) {
  const std::array<int, 2> ends = pipe_ends();
  std::string failed, answer;
  try {
    Running process({.name = "", .args = args}, 0, 0, 1, {}, ends[1]);
    while (process.read()) continue;
    failed = process.end();
  } catch (...) {
    ::close(ends[0]);
    ::close(ends[1]);
    throw;
  }
  ::close(ends[1]);
  std::array<char, 4096> bytes{};
  for (ssize_t n = 0; (n = ::read(ends[0], bytes.data(), bytes.size())) > 0;) {
    answer.append(bytes.data(), static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  if (!failed.empty()) throw Error(failed);
  return answer;
}

std::vector<std::string> gpus() {
  std::vector<std::string> names;
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    const std::string text = visible;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find(',', at), text.size());
      names.push_back(text.substr(at, end - at));
      at = end + 1;
    }
    return names;
  }
  for (int i = 0; std::filesystem::exists(cat({"/dev/nvidia", i})); ++i) {
    names.push_back(cat({i}));
  }
  return names;
}

std::vector<std::string> run_jobs(const std::vector<Job>& jobs, int at_once,
                                  const std::vector<std::string>& cards) {
  at_once = std::clamp(at_once, 1, std::max(1, static_cast<int>(jobs.size())));
  std::vector<std::string> failed(jobs.size());
  const auto fail = [&](std::size_t job, const std::string& reason) {
    failed[job] = reason;
    warn(cat({jobs[job].name, " stopped: ", reason}));
  };
  std::vector<int> lanes;  // which are free, the first one last
  for (int lane = at_once; lane-- > 0;) lanes.push_back(lane);
  Processes running;
  for (std::size_t next = 0; next < jobs.size() || !running.empty();) {
    if (next < jobs.size() && !lanes.empty()) {
      if (at_once == 1) {
        info(cat({jobs[next].name, ", run ", next + 1, " of ", jobs.size()}));
      }
      try {
        running.push_back(
            std::make_unique<Running>(jobs[next], next, lanes.back(), at_once, cards));
        lanes.pop_back();
      } catch (const Error& error) {
        fail(next, error.what());
      }
      ++next;
    } else if (const auto ended = next_ended(running)) {
      lanes.push_back(ended->lane());
      if (const std::string reason = ended->end(); !reason.empty()) fail(ended->index(), reason);
    }
  }
  return failed;
}

}  // namespace lockstep::cli
