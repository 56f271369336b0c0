/// For .cu files alone: the driver's functions, by their names. Nothing links to the driver.
#pragma once

#include <cuda.h>

#include "device/cuda/check.h"

namespace lockstep::cuda {

/// Throws Error where the driver is too old for it.
template <typename Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  require(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion");
  if (found == nullptr) {
    throw Error(cat({"the NVIDIA driver knows no ", name, "; update the driver"}));
  }
  return reinterpret_cast<Function*>(found);
}

/// Throws Error "CALL: what the driver says" unless `status` is success.
inline void require(CUresult status, const char* call,
                    std::source_location where = std::source_location::current()) {
  if (status == CUDA_SUCCESS) return;
  static auto* const words = driver_function<decltype(cuGetErrorString)>("cuGetErrorString");
  const char* said = nullptr;
  words(status, &said);
  throw Error(cat({call, ": ", said == nullptr ? "an unknown error" : said}), where);
}

}  // namespace lockstep::cuda
