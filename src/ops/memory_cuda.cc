// What torch's allocator alone knows, by a header of torch's that asks for CUDA's.
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>

#include "ops/cuda.h"

namespace lockstep::ops::cuda {

void limit_memory(std::int8_t index, std::int64_t bytes, std::int64_t of) {
  using Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;
  auto* const allocator = dynamic_cast<Allocator*>(c10::getDeviceAllocator(at::kCUDA));
  TORCH_CHECK(allocator != nullptr, "torch's CUDA allocator is none that can be limited");
  const double share = static_cast<double>(bytes) / static_cast<double>(of);
  allocator->setMemoryFraction(std::clamp(share, 0.0, 1.0), index);
}

}  // namespace lockstep::ops::cuda
