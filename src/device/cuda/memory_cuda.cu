#include <array>
#include <limits>
#include <mutex>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"

namespace lockstep::cuda {
namespace {

// sm_90a runs on 9.0 alone. What is compiled for sm_100a has not run yet, and lacks the grouped
// product.
bool has_kernels_for(int major, int minor) { return major == 9 && minor == 0; }

std::string look(std::int8_t index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0;
    int runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) return "there is no NVIDIA driver on this machine; use device = \"cpu\"";
    return cat({"the NVIDIA driver speaks CUDA ", driver / 1000, ".", driver % 1000 / 10,
                ", this build needs ", runtime / 1000, ".", runtime % 1000 / 10,
                "; update the driver"});
  }
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
    return "there is no CUDA device on this machine; use device = \"cpu\"";
  }
  if (status != cudaSuccess) {
    return cat({"the CUDA runtime does not start: ", cudaGetErrorString(status)});
  }
  if (index < 0 || index >= count) {
    return cat({"there is no CUDA device ", static_cast<int>(index), ", only ", count,
                count == 1 ? " is there" : " are there"});
  }
  int major = 0;
  int minor = 0;
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
          "cudaDeviceGetAttribute");
  require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
          "cudaDeviceGetAttribute");
  if (!has_kernels_for(major, minor)) {
    return cat({"CUDA device ", static_cast<int>(index), " has compute capability ", major, ".",
                minor, ", the kernels are made for 9.0; use device = \"cpu\""});
  }
  return "";
}

/// The device's own pool, told once to keep what it is given back.
cudaMemPool_t pool_of(std::int8_t index) {
  cudaMemPool_t pool = nullptr;
  require(cudaDeviceGetDefaultMemPool(&pool, index), "cudaDeviceGetDefaultMemPool");
  static std::array<std::once_flag, 128> told;
  std::call_once(told[static_cast<std::size_t>(index)], [pool] {
    std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
    require(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all),
            "cudaMemPoolSetAttribute");
  });
  return pool;
}

}  // namespace

std::string why_unusable(std::int8_t index) {
  if (index != 0) return look(index);
  static const std::string first = look(0);
  return first;
}

DeviceMemory memory(std::int8_t index) {
  const OnDevice scope(index);
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  std::uint64_t reserved = 0;
  std::uint64_t used = 0;
  const cudaMemPool_t pool = pool_of(index);
  require(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved),
          "cudaMemPoolGetAttribute");
  require(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used),
          "cudaMemPoolGetAttribute");
  return {static_cast<std::int64_t>(total), static_cast<std::int64_t>(free + reserved - used)};
}

void* allocate(std::int8_t index, std::int64_t bytes, Stream stream) {
  const OnDevice scope(index);
  void* data = nullptr;
  const cudaError_t status = cudaMallocFromPoolAsync(&data, static_cast<std::size_t>(bytes),
                                                     pool_of(index), stream_of(stream));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it is answered here, and the next launch must not report it
    return nullptr;
  }
  require(status, "cudaMallocFromPoolAsync");
  return data;
}

// A device that failed before answers every call with that failure, which was reported where it
// showed: memory goes with the process then.
void release(std::int8_t index, void* data, Stream stream) noexcept {
  int before = 0;
  cudaGetDevice(&before);
  if (before != index) cudaSetDevice(index);
  cudaFreeAsync(data, stream_of(stream));
  if (before != index) cudaSetDevice(before);
}

// Any device reads it; that of its owner is opened anyway, the first one may be another's.
void* allocate_pinned(std::int8_t index, std::int64_t bytes) {
  const OnDevice scope(index);
  void* data = nullptr;
  require(cudaMallocHost(&data, static_cast<std::size_t>(bytes)), "cudaMallocHost");
  return data;
}

void release_pinned(std::int8_t index, void* data) noexcept {
  int before = 0;
  cudaGetDevice(&before);
  if (before != index) cudaSetDevice(index);
  cudaFreeHost(data);
  if (before != index) cudaSetDevice(before);
}

void copy(void* to, const void* from, std::int64_t bytes, std::int8_t index, Stream stream) {
  const OnDevice scope(index);
  require(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                          stream_of(stream)),
          "cudaMemcpyAsync");
}

void fill(void* to, std::uint8_t value, std::int64_t bytes, std::int8_t index, Stream stream) {
  const OnDevice scope(index);
  require(cudaMemsetAsync(to, value, static_cast<std::size_t>(bytes), stream_of(stream)),
          "cudaMemsetAsync");
}

void synchronize(std::int8_t index, Stream stream) {
  const OnDevice scope(index);
  require(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

void trim_pool(std::int8_t index) {
  const OnDevice scope(index);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  require(cudaMemPoolTrimTo(pool_of(index), 0), "cudaMemPoolTrimTo");
}

int multiprocessors(std::int8_t index) {
  int count = 0;
  require(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index),
          "cudaDeviceGetAttribute");
  return count;
}

}  // namespace lockstep::cuda
