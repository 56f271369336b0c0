/// What this machine and this build have.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::cli {

struct CpuFeature {
  std::string name;
  bool there = false;
};

/// "Intel(R) Xeon(R) ...", or "an unnamed CPU".
std::string cpu_name();

/// What kernels choose by. Empty where the instruction set is another one.
std::vector<CpuFeature> cpu_features();

/// Whether numbers below 2^-126 are kept: the numerics rely on it.
bool keeps_subnormals();

struct Memory {
  std::int64_t total = 0;      // of the machine, or the container's limit where that is less
  std::int64_t available = 0;  // 0: unknown
};
Memory memory();

/// The torch that this program has loaded: "2.11.0 in /usr/lib/python3/dist-packages/torch"; ""
/// where none is.
std::string torch();

/// The driver's version where there is an NVIDIA device, else "".
std::string nvidia_driver();

}  // namespace lockstep::cli
