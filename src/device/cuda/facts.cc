#include "device/cuda/facts.h"

#include "base/text.h"

namespace lockstep::cuda {
namespace {

// sm_90a runs on 9.0 alone. What is compiled for sm_100a has not run yet, and lacks the grouped
// product.
constexpr int kMajor = 9, kMinor = 0;
constexpr const char* kArchitecture = "90a";

std::string cuda_version(int number) { return cat({number / 1000, ".", number % 1000 / 10}); }

/// "90a", "90a-real" or "90a-virtual" among them.
bool is_listed(const std::string& architectures, const std::string& name) {
  const std::string list = ";" + architectures + ";";
  return list.find(";" + name + ";") != std::string::npos ||
         list.find(";" + name + "-") != std::string::npos;
}

}  // namespace

std::string why_unusable(const Facts& facts) {
  using Runtime = Facts::Runtime;
  if (facts.runtime == Runtime::kOldDriver) {
    if (facts.driver_version == 0) {
      return "there is no NVIDIA driver on this machine; use device = \"cpu\"";
    }
    return cat({"the NVIDIA driver speaks CUDA ", cuda_version(facts.driver_version),
                ", this build needs ", cuda_version(facts.runtime_version),
                "; update the driver, or use device = \"cpu\""});
  }
  if (facts.runtime == Runtime::kFails) {
    return cat({"the CUDA runtime does not start: ", facts.said, "; use device = \"cpu\""});
  }
  if (facts.runtime == Runtime::kNoDevice || facts.devices == 0) {
    return "there is no CUDA device on this machine; use device = \"cpu\"";
  }
  if (facts.index < 0 || facts.index >= facts.devices) {
    return cat({"there is no CUDA device ", facts.index, ", only ", facts.devices,
                facts.devices == 1 ? " is there" : " are there",
                "; use a lower number, or device = \"cpu\""});
  }
  if (facts.is_prohibited) {
    return cat({"CUDA device ", facts.index,
                " is in compute mode prohibited, in which no process can use it; let its "
                "administrator run nvidia-smi -i ",
                facts.index, " -c DEFAULT, use another device, or device = \"cpu\""});
  }
  if (facts.major != kMajor || facts.minor != kMinor) {
    return cat({"CUDA device ", facts.index, " has compute capability ", facts.major, ".",
                facts.minor, ", the kernels are made for ", kMajor, ".", kMinor,
                "; use device = \"cpu\""});
  }
  if (!is_listed(facts.architectures, kArchitecture)) {
    return cat({"CUDA device ", facts.index, " has compute capability ", kMajor, ".", kMinor,
                ", and this build was compiled for ", facts.architectures,
                " alone; build anew with -DCMAKE_CUDA_ARCHITECTURES=", kArchitecture, "-real"});
  }
  return "";
}

}  // namespace lockstep::cuda
