/// For .cu files alone: the shared memory that a launch asks for.
#pragma once

#include <cstddef>

#include "device/cuda/check.h"

namespace lockstep::cuda {

/// What any launch may ask for. A kernel has 48 KiB without leave, but what it declares itself
/// counts too: 1 KiB is kept for that.
inline constexpr std::size_t kFreeShared = 47 << 10;

/// Before a launch that asks for `bytes` of shared memory beside at most 1 KiB that the kernel
/// declares. `most` is the largest that any launch of the kernel asks for, never this one's: the
/// leave is the kernel's in the whole process, and other threads launch it too.
template <typename Kernel>
void allow_shared(Kernel kernel, std::size_t bytes, std::size_t most) {
  if (bytes <= kFreeShared) return;
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(most)),
          "cudaFuncSetAttribute");
}

}  // namespace lockstep::cuda
