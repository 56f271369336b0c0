#include "cli/machine.h"

#include <link.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>

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
  const std::int64_t limit = number_in("/sys/fs/cgroup/memory.max");
  if (limit > 0 && limit < memory.total) {
    const std::int64_t used = number_in("/sys/fs/cgroup/memory.current");
    memory.total = limit;
    memory.available = std::min(memory.available, std::max<std::int64_t>(limit - used, 0));
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
