#include "device/memory.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "device/cuda/cuda.h"

namespace lockstep {
namespace {

constexpr const char* kNoBackend =
    "this build has no CUDA part, which ./lockstep makes where it finds both nvcc 13 and an NVIDIA "
    "GPU (/dev/nvidiactl): run it there, or use device = \"cpu\"";

constexpr std::size_t kAlignment = 256;

bool on_cuda(Device device) { return device.kind == Device::Kind::kCuda; }

[[noreturn]] void throw_no_backend() { throw Error(std::string("device is cuda: ") + kNoBackend); }

}  // namespace

std::string why_unusable(Device device) {
  if (!on_cuda(device)) return "";
  if constexpr (build::has_cuda) return cuda::why_unusable(device.index);
  return kNoBackend;
}

Device device_named(const std::string& name) {
  constexpr std::string_view kCuda = "cuda";
  if (name == "cpu") return {};
  std::string number;
  if (name == kCuda) {
    const char* rank = std::getenv("LOCAL_RANK");
    number = rank == nullptr || *rank == '\0' ? "0" : rank;
  } else if (name.starts_with("cuda:")) {
    number = name.substr(kCuda.size() + 1);
  }
  int index = 0;
  const char* end = number.data() + number.size();
  const auto [stop, error] = std::from_chars(number.data(), end, index);
  if (number.empty() || error != std::errc() || stop != end || index < 0 || index > 127) {
    throw Error(
        cat({"device is '", name, "'", name == kCuda ? " and LOCAL_RANK '" + number + "'" : "",
             "; expected cpu, cuda, or cuda:N with N from 0 to 127, or in a recipe auto"}));
  }
  return {Device::Kind::kCuda, static_cast<std::int8_t>(index)};
}

bool holds_context(Device device) {
  if (!on_cuda(device)) return false;
  if constexpr (build::has_cuda) return cuda::holds_context(device.index);
  return false;
}

DeviceMemory device_memory(Device device) {
  if (!on_cuda(device)) {
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    const std::int64_t free = page * sysconf(_SC_AVPHYS_PAGES);
    return {page * sysconf(_SC_PHYS_PAGES), free, free};
  }
  if constexpr (build::has_cuda) return cuda::memory(device.index);
  throw_no_backend();
}

Buffer::Buffer(Device device, std::int64_t bytes, Stream stream)
    : bytes_(bytes), device_(device), stream_(stream) {
  if (bytes < 0) throw Error(cat({"device: a buffer of ", bytes, " bytes was asked for"}));
  if (bytes == 0) return;
  if (!on_cuda(device)) {
    data_ = ::operator new(static_cast<std::size_t>(bytes), std::align_val_t(kAlignment));
    return;
  }
  if constexpr (build::has_cuda) {
    data_ = cuda::allocate(device.index, bytes, stream);
    if (data_ == nullptr) {
      throw Error(cat({"device: ", bytes, " bytes were asked for on CUDA device ",
                       static_cast<int>(device.index), ", ", cuda::memory(device.index).free,
                       " are free"}));
    }
    return;
  }
  throw_no_backend();
}

void Buffer::reset() {
  void* const data = std::exchange(data_, nullptr);
  bytes_ = 0;
  if (data == nullptr) return;
  if constexpr (build::has_cuda) {
    if (on_cuda(device_)) return cuda::release(device_.index, data, stream_);
  }
  ::operator delete(data, std::align_val_t(kAlignment));
}

PinnedBuffer::PinnedBuffer(std::int64_t bytes, Device device) : bytes_(bytes), device_(device) {
  if (bytes < 0) throw Error(cat({"device: a buffer of ", bytes, " bytes was asked for"}));
  if (bytes == 0) return;
  if (!on_cuda(device)) {
    data_ = ::operator new(static_cast<std::size_t>(bytes), std::align_val_t(kAlignment));
    return;
  }
  if constexpr (build::has_cuda) {
    data_ = cuda::allocate_pinned(device.index, bytes);
    return;
  }
  throw_no_backend();
}

void PinnedBuffer::reset() {
  void* const data = std::exchange(data_, nullptr);
  bytes_ = 0;
  if (data == nullptr) return;
  if constexpr (build::has_cuda) {
    if (on_cuda(device_)) return cuda::release_pinned(device_.index, data);
  }
  ::operator delete(data, std::align_val_t(kAlignment));
}

void copy_bytes(void* to, Device to_device, const void* from, Device from_device,
                std::int64_t bytes, Stream stream) {
  if (bytes == 0) return;
  if (!on_cuda(to_device) && !on_cuda(from_device)) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  if constexpr (build::has_cuda) {
    const Device& device = on_cuda(to_device) ? to_device : from_device;
    return cuda::copy(to, from, bytes, device.index, stream);
  }
  throw_no_backend();
}

void fill_bytes(void* to, Device device, std::uint8_t value, std::int64_t bytes, Stream stream) {
  if (bytes == 0) return;
  if (!on_cuda(device)) {
    std::memset(to, value, static_cast<std::size_t>(bytes));
    return;
  }
  if constexpr (build::has_cuda) return cuda::fill(to, value, bytes, device.index, stream);
  throw_no_backend();
}

void synchronize(Device device, Stream stream) {
  if (!on_cuda(device)) return;
  if constexpr (build::has_cuda) return cuda::synchronize(device.index, stream);
  throw_no_backend();
}

void trim_pool(Device device) {
  if (!on_cuda(device)) return;
  if constexpr (build::has_cuda) return cuda::trim_pool(device.index);
  throw_no_backend();
}

bool is_short_of_memory(Device device, std::int64_t wanted) {
  if (!on_cuda(device)) return false;
  const DeviceMemory memory = device_memory(device);
  return memory.for_others - wanted < memory.total / 8;
}

}  // namespace lockstep
