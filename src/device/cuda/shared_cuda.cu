#include "device/cuda/shared.h"

#include <mutex>
#include <set>
#include <utility>

#include "device/cuda/check.h"

namespace lockstep::cuda {

void allow_shared(const void* kernel, std::size_t bytes) {
  if (bytes <= kFreeShared) return;
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  int device = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  if (allowed.contains({kernel, device})) return;
  int most = 0;
  require(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute");
  cudaFuncAttributes declared{};
  require(cudaFuncGetAttributes(&declared, kernel), "cudaFuncGetAttributes");
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               most - static_cast<int>(declared.sharedSizeBytes)),
          "cudaFuncSetAttribute");
  allowed.emplace(kernel, device);
}

}  // namespace lockstep::cuda
