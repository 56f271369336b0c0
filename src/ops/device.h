/// Torch's tensors and the house's views of the same memory.
#pragma once

#include <cstdint>
#include <vector>

#include "device/view.h"
#include "ops/torch.h"

namespace lockstep::ops {

/// Makes torch ready to compute on `device`: on a CUDA device with FP32 sums and in a fixed order.
/// Must come before the process's first backward pass and first call into torch for that device.
/// Throws Error where the device or torch's part for it is missing, or where it comes too late.
void prepare_torch(Device device);

/// Comes before every backward pass. Torch makes a queue for each device that it knows at the
/// process's first one, and none later: on a device without one a backward pass ends in an
/// assertion of torch's. So from here on prepare_torch() refuses a CUDA device, unless one was
/// prepared before.
void begin_backward();

/// Gives the memory that torch keeps and no tensor owns back to the device.
void empty_cache(Device device);

/// Bytes of a CUDA device that torch holds: of tensors, and what it keeps for later.
std::int64_t kept_memory(Device device);

/// From now on torch takes at most so many bytes of the device, what it keeps for later included.
/// Negative: as many as there are.
void limit_memory(Device device, std::int64_t bytes);

at::Device torch_device(Device device);
Device house_device(const at::Tensor& x);

/// The stream that torch gives its work on `device` to.
Stream stream_on(Device device);
inline Stream stream_of(const at::Tensor& x) { return stream_on(house_device(x)); }

/// `host` on a device, by pinned memory and without waiting; on a CPU itself.
at::Tensor upload(const at::Tensor& host, const at::Device& device);

/// A tensor over a host's numbers, which outlive it.
template <typename T>
at::Tensor over(const std::vector<T>& values, at::ScalarType type) {
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<std::int64_t>(values.size())},
                       type);
}

/// Views of contiguous tensors [rows, cols]; `T` is what lies there.
template <typename T>
TensorView<T, 2> view_of(const at::Tensor& x) {
  return {static_cast<T*>(x.data_ptr()), {x.size(0), x.size(1)}, {x.size(1), 1}, house_device(x)};
}

}  // namespace lockstep::ops
