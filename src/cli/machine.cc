#include "cli/machine.h"

#include <link.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

namespace lockstep::cli {
namespace {

/// What stands behind `key` and its separator in the first line of a file that begins with it.
std::string value_of(const char* file, const std::string& key) {
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    if (!line.starts_with(key)) continue;
    const std::size_t at = line.find_first_not_of("\t :=", key.size());
    return at == std::string::npos ? "" : line.substr(at);
  }
  return "";
}

/// "16336320 kB" in bytes; 0 where it says nothing.
std::int64_t kilobytes(const std::string& text) {
  return text.empty() ? 0 : std::atoll(text.c_str()) * 1024;
}

/// A number that is all of a file; 0 where there is none, or "max".
std::int64_t number_in(const char* file) {
  std::int64_t number = 0;
  std::ifstream(file) >> number;
  return number;
}

/// A limit of the process's control groups, and what counts towards it but for cached files, which
/// the kernel gives up first.
struct GroupLimit {
  std::int64_t limit, used;
};
std::vector<GroupLimit> group_limits() {
  std::vector<GroupLimit> limits;
  std::ifstream groups("/proc/self/cgroup");  // lines of NUMBER:CONTROLLERS:PATH
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && (',' + controllers + ',').find(",memory,") == std::string::npos) continue;
    const std::filesystem::path root = is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    // A container may show its own group as the root, and tell the path that the host sees.
    std::filesystem::path path = std::filesystem::path(line.substr(second + 1)).relative_path();
    for (bool more = true; more; path = path.parent_path()) {
      more = !path.empty();
      const std::filesystem::path folder = root / path;
      const auto number = [&](const char* file) { return number_in((folder / file).c_str()); };
      const std::int64_t limit = number(is_v2 ? "memory.max" : "memory.limit_in_bytes");
      if (limit <= 0) continue;
      const std::string stat = (folder / "memory.stat").string();
      const auto cached = [&](const char* key) {
        const std::string text = value_of(stat.c_str(), key);
        return text.empty() ? std::int64_t{0} : std::atoll(text.c_str());
      };
      limits.push_back({limit, number(is_v2 ? "memory.current" : "memory.usage_in_bytes") -
                                   cached(is_v2 ? "inactive_file " : "total_inactive_file ") -
                                   cached(is_v2 ? "active_file " : "total_active_file ")});
    }
  }
  return limits;
}

int find_torch(dl_phdr_info* library, std::size_t, void* found) {
  const std::filesystem::path path = library->dlpi_name;
  if (path.filename() != "libtorch_cpu.so") return 0;
  *static_cast<std::filesystem::path*>(found) = path.parent_path().parent_path();
  return 1;
}

}  // namespace

std::string cpu_name() {
  const std::string name = value_of("/proc/cpuinfo", "model name");
  return name.empty() ? "an unnamed CPU" : name;
}

std::vector<CpuFeature> cpu_features() {
#if defined(__x86_64__)
  return {{"AVX2", __builtin_cpu_supports("avx2") != 0},
          {"AVX-512",
           __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0},
          {"VNNI", __builtin_cpu_supports("avx512vnni") != 0},
          {"BF16", __builtin_cpu_supports("avx512bf16") != 0}};
#else
  return {};
#endif
}

bool keeps_subnormals() {
  volatile float small = std::numeric_limits<float>::min();
  small = small * 0.5f;
  return small != 0.0f;
}

Memory memory() {
  Memory memory = {.total = kilobytes(value_of("/proc/meminfo", "MemTotal")),
                   .available = kilobytes(value_of("/proc/meminfo", "MemAvailable"))};
  for (const auto& [limit, used] : group_limits()) {
    memory.total = std::min(memory.total, limit);
    memory.available = std::min(memory.available, std::max<std::int64_t>(limit - used, 1));
  }
  return memory;
}

std::string torch() {
  std::filesystem::path folder;
  dl_iterate_phdr(find_torch, &folder);
  if (folder.empty()) return "";
  std::string version = value_of((folder / "version.py").c_str(), "__version__");
  std::erase(version, '\'');
  return (version.empty() ? "of unknown version" : version) + " in " + folder.string();
}

std::string nvidia_driver() { return value_of("/proc/driver/nvidia/version", "NVRM version"); }

}  // namespace lockstep::cli
