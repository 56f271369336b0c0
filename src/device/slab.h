/// Much memory at one address, of which the device gets back what lies there while nobody needs it.
#pragma once

#include <cstdint>
#include <utility>

#include "device/memory.h"

namespace lockstep {

/// Bytes with one owner, uninitialized, aligned to 256. On a CUDA device they are no part of the
/// pool, and between give_back() and take() there are addresses alone: what knows these, a graph,
/// stays good. On a CPU the bytes stay where they are.
class Slab {
 public:
  Slab() = default;
  /// With its memory, for which it waits as take() does. Throws Error naming the bytes asked for
  /// and those free.
  Slab(Device device, std::int64_t bytes);
  ~Slab() { reset(); }
  Slab(Slab&& other) noexcept { swap(other); }
  Slab& operator=(Slab&& other) noexcept {
    swap(other);
    return *this;
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  template <typename T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// Bytes of the device that take() would need: 0 unless they were given back.
  std::int64_t owed() const;
  /// What was written is lost, except on a CPU. Waits for the device.
  void give_back();
  /// Does nothing where the memory is there. Waits for a neighbour that gives it up within
  /// longest_wait(). Throws Error naming the bytes asked for and those
  /// free, and can be called again.
  void take();

 private:
  void swap(Slab& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(range_, other.range_);
    std::swap(memory_, other.memory_);
    std::swap(device_, other.device_);
    std::swap(on_host_, other.on_host_);
  }
  void reset();

  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  std::int64_t range_ = 0;         // bytes of addresses and of the device
  unsigned long long memory_ = 0;  // the driver's name for what lies there; 0: nothing
  Device device_{};
  Buffer on_host_;
};

}  // namespace lockstep
