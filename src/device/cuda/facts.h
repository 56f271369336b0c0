/// Whether a CUDA device can be used, from what was found out about it. Apart from the finding out,
/// so that every answer is tested where there is no device.
#pragma once

#include <string>

namespace lockstep::cuda {

struct Facts {
  enum class Runtime {
    kStarts,
    kOldDriver,  // or none at all: cudaErrorInsufficientDriver says both
    kNoDevice,
    kFails,
  };
  Runtime runtime = Runtime::kStarts;
  std::string said{};       // by the runtime, where it fails
  int driver_version = 0;   // 12020 is CUDA 12.2; 0 without a driver
  int runtime_version = 0;  // what this build was linked to
  int devices = 0;
  int index = 0;                // of the one that is meant
  int major = 0, minor = 0;     // its compute capability
  bool is_prohibited = false;   // by its compute mode: no process may use it
  std::string architectures{};  // of the build, as CMake has them: "90a-real;100a-real"
};

/// One line that names what is missing, and the remedy; "" where the device can be used.
std::string why_unusable(const Facts& facts);

}  // namespace lockstep::cuda
