// A fault that is planted in a CUDA device, for device_fault_test.cc.
#include "device/cuda/check.h"
#include "device_fault.h"

namespace lockstep::testing {
namespace {

__global__ void trap_kernel(std::uint64_t nanoseconds) {
  std::uint64_t began = 0, now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - began < nanoseconds);
  asm volatile("trap;");
}

}  // namespace

void plant_fault(std::int8_t index, double milliseconds) {
  const cuda::OnDevice scope(index);
  cudaStream_t beside = nullptr;  // of its own: what is given to others goes on until it happens
  cuda::require(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking),
                "cudaStreamCreateWithFlags");
  trap_kernel<<<1, 1, 0, beside>>>(static_cast<std::uint64_t>(milliseconds * 1e6));
  cuda::require_launch("trap_kernel");
}

}  // namespace lockstep::testing
