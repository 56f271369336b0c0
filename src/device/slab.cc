#include "device/slab.h"

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "base/wait.h"
#include "device/cuda/cuda.h"

namespace lockstep {

Slab::Slab(Device device, std::int64_t bytes) : bytes_(bytes), device_(device) {
  if (bytes < 0) throw Error(cat({"device: a slab of ", bytes, " bytes was asked for"}));
  if (bytes == 0) return;
  if constexpr (build::has_cuda) {
    if (device.kind == Device::Kind::kCuda) {
      range_ = cuda::slab_bytes(device.index, bytes);
      data_ = cuda::reserve_addresses(device.index, range_);
      try {
        take();
      } catch (...) {
        reset();
        throw;
      }
      return;
    }
  }
  on_host_ = Buffer(device, bytes);
  data_ = on_host_.as<void>();
}

std::int64_t Slab::owed() const { return memory_ == 0 ? range_ : 0; }

void Slab::give_back() {
  if constexpr (build::has_cuda) {
    if (memory_ != 0) cuda::unmap(device_.index, data_, range_, memory_);
  }
}

void Slab::take() {
  if constexpr (build::has_cuda) {
    if (owed() == 0) return;
    memory_ = cuda::map(device_.index, data_, range_);
    if (memory_ == 0) {  // the pool may keep what nobody owns
      trim_pool(device_);
      memory_ = cuda::map(device_.index, data_, range_);
    }
    // A neighbour that was killed may hold it still.
    if (memory_ == 0 && range_ <= device_memory(device_).total) {
      wait_for(cat({range_, " bytes of CUDA device ", static_cast<int>(device_.index)}), [&] {
        memory_ = cuda::map(device_.index, data_, range_);
        return memory_ != 0;
      });
    }
    if (memory_ == 0) {
      throw Error(cat({"device: ", range_, " bytes were asked for on CUDA device ",
                       static_cast<int>(device_.index), ", ", device_memory(device_).for_others,
                       " are free"}));
    }
  }
}

void Slab::reset() {
  if constexpr (build::has_cuda) {
    if (range_ > 0) cuda::drop_addresses(device_.index, data_, range_, memory_);
  }
  data_ = nullptr;
  bytes_ = range_ = 0;
  memory_ = 0;
  on_host_.reset();
}

}  // namespace lockstep
