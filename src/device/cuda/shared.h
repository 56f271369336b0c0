/// For .cu files alone: the shared memory that a launch asks for.
#pragma once

#include <cstddef>

namespace lockstep::cuda {

/// What any launch may ask for. A kernel has 48 KiB without leave, but what it declares itself
/// counts too: 1 KiB is kept for that.
inline constexpr std::size_t kFreeShared = 47 << 10;

/// Before a launch on the current device that asks for `bytes` of shared memory beside at most
/// 1 KiB that the kernel declares. The kernel may have all that a block can from then on, whatever
/// this launch asks for: the leave is the kernel's in the whole process, and other threads launch
/// it too. Throws Error where the device says no.
void allow_shared(const void* kernel, std::size_t bytes);

template <typename... Parameters>
void allow_shared(void (*kernel)(Parameters...), std::size_t bytes) {
  allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace lockstep::cuda
