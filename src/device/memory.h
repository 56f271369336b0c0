/// Memory on a device and what moves it. On a CPU everything is done on return; on a CUDA device
/// in the order of the stream.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "device/view.h"

namespace lockstep {

/// Why work cannot run on `device`: one line that names what is missing. "" where it can.
std::string why_unusable(Device device);

/// The device of that name: "cpu", "cuda", which is the GPU of LOCAL_RANK (as torchrun sets it) or
/// else the first, or "cuda:1". Throws Error naming what it is instead.
Device device_named(const std::string& name);

/// Has this process a place on a CUDA device, which one in exclusive-process mode has a single one
/// of? why_unusable() needs none; all that asks for memory or gives work does.
bool holds_context(Device device);

/// Bytes of the device's memory: all, what a Buffer could still get, and what another library
/// could, which is less by what the pool keeps.
struct DeviceMemory {
  std::int64_t total = 0;
  std::int64_t free = 0;
  std::int64_t for_others = 0;
};

/// Throws Error where the device is not usable.
DeviceMemory device_memory(Device device);

/// Bytes with one owner, aligned to 256, uninitialized. On a CUDA device they come from the
/// device's pool and go back to it in the order of the stream they were asked for on.
class Buffer {
 public:
  Buffer() = default;
  /// Throws Error naming the bytes asked for and those free.
  Buffer(Device device, std::int64_t bytes, Stream stream = {});
  ~Buffer() { reset(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <typename T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  void reset();

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
    std::swap(stream_, other.stream_);
  }

  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Device device_{};
  Stream stream_{};
};

/// Host memory that a CUDA device reads and writes without a copy in between. Plain memory for a
/// CPU, which opens no CUDA device for it.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  /// Throws Error where there are not so many bytes, or where the device is not usable.
  PinnedBuffer(std::int64_t bytes, Device device);
  ~PinnedBuffer() { reset(); }
  PinnedBuffer(PinnedBuffer&& other) noexcept { swap(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  template <typename T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }
  void reset();

 private:
  void swap(PinnedBuffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
  }

  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Device device_{};
};

/// Copies between any two devices. From or to host memory that is not pinned the call waits.
void copy_bytes(void* to, Device to_device, const void* from, Device from_device,
                std::int64_t bytes, Stream stream = {});
void fill_bytes(void* to, Device device, std::uint8_t value, std::int64_t bytes,
                Stream stream = {});

/// The remedy where a CUDA device failed in its work: no later call of the process gets an answer
/// from it.
inline constexpr const char* kBeginAgain =
    "this process cannot use the device any more: give the same command again, and a run goes on "
    "from its last checkpoint";

/// Waits for all work given to the stream. Throws Error in the device's words where it failed.
void synchronize(Device device, Stream stream = {});

/// Gives what the pool holds and no Buffer owns back to the device, for another library to take.
/// Waits for the device.
void trim_pool(Device device);

/// Is so little of a CUDA device's memory free for others, less than an eighth beside `wanted`
/// bytes, that libraries which take turns there should not keep what they do not use?
bool is_short_of_memory(Device device, std::int64_t wanted = 0);

/// A tensor on a device from a host's numbers and back, for tests and tools: both wait.
template <typename T>
Buffer to_device(const std::vector<T>& values, Device device) {
  Buffer buffer(device, static_cast<std::int64_t>(values.size() * sizeof(T)));
  copy_bytes(buffer.as<void>(), device, values.data(), {}, buffer.bytes());
  synchronize(device);
  return buffer;
}
template <typename T>
std::vector<T> to_host(const Buffer& buffer) {
  std::vector<T> values(static_cast<std::size_t>(buffer.bytes()) / sizeof(T));
  copy_bytes(values.data(), {}, buffer.as<void>(), buffer.device(), buffer.bytes());
  synchronize(buffer.device());
  return values;
}

}  // namespace lockstep
