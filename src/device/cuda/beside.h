/// For .cu files alone: kernels that start beside the launch before them, so that nothing is lost
/// between two of a chain. Such a kernel waits before it touches what others write or read.
#pragma once

#include <cstddef>

#include "device/cuda/check.h"

namespace lockstep::cuda {

/// Until the launch before this one has ended, and with it all before that. Each thread for itself.
__device__ inline void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// Lets the next launch start once all blocks have come here, or ended. Only after this one has
/// waited itself: else the next might start before the one before this has ended. (The launches of
/// kernels/exact/moe_w4a4_cuda.cu break this: what their next but one reads early is older than the
/// first of them.)
__device__ inline void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// A kernel's first words.
__device__ inline void take_turn() {
  wait_for_predecessor();
  release_successor();
}

/// For a kernel whose successor wants most of a multiprocessor's shared memory: laid out otherwise,
/// it would take none of its blocks before this one's have ended.
template <typename Kernel>
void lay_out_for_shared(Kernel kernel) {
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "cudaFuncSetAttribute");
}

/// Launches a kernel that waits itself for its predecessor.
template <typename... Parameters>
void launch_beside(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   std::size_t shared_bytes, Stream stream, const Parameters&... parameters) {
  cudaLaunchAttribute beside{};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream_of(stream);
  config.attrs = &beside;
  config.numAttrs = 1;
  require(cudaLaunchKernelEx(&config, kernel, parameters...), name);
}

}  // namespace lockstep::cuda
