/// For tests of what must survive a loss of power: which files were brought to the disk. Include
/// it in one file of a test program, for it takes the place of the system's fsync and fdatasync.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace lockstep {

class SyncedFiles {
 public:
  static SyncedFiles& all() {
    static SyncedFiles synced;
    return synced;
  }

  void add(int descriptor) {
    std::array<char, 4096> name{};
    const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
    const ssize_t size = ::readlink(link.c_str(), name.data(), name.size());
    const std::lock_guard lock(mutex_);
    if (size > 0) names_.emplace(name.data(), static_cast<std::size_t>(size));
  }

  /// The paths since the last call; a file that was renamed since counts by its name then.
  std::set<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(names_, {});
  }

 private:
  std::mutex mutex_;
  std::set<std::string> names_;
};

}  // namespace lockstep

extern "C" int fsync(int descriptor) {
  lockstep::SyncedFiles::all().add(descriptor);
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

extern "C" int fdatasync(int descriptor) {
  lockstep::SyncedFiles::all().add(descriptor);
  return static_cast<int>(::syscall(SYS_fdatasync, descriptor));
}
