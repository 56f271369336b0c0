#include <array>
#include <limits>
#include <mutex>

#include "base/build.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/driver.h"
#include "device/cuda/facts.h"

namespace lockstep::cuda {
namespace {

Facts look(std::int8_t index) {
  using Runtime = Facts::Runtime;
  Facts facts = {.index = index, .architectures = build::cuda_architectures};
  const cudaError_t status = cudaGetDeviceCount(&facts.devices);
  cudaDriverGetVersion(&facts.driver_version);
  cudaRuntimeGetVersion(&facts.runtime_version);
  if (status != cudaSuccess) {
    cudaGetLastError();  // it is answered here
    facts.runtime = status == cudaErrorInsufficientDriver ? Runtime::kOldDriver
                    : status == cudaErrorNoDevice         ? Runtime::kNoDevice
                                                          : Runtime::kFails;
    facts.said = cudaGetErrorString(status);
    return facts;
  }
  if (index < 0 || index >= facts.devices) return facts;
  require(cudaDeviceGetAttribute(&facts.major, cudaDevAttrComputeCapabilityMajor, index),
          "cudaDeviceGetAttribute");
  require(cudaDeviceGetAttribute(&facts.minor, cudaDevAttrComputeCapabilityMinor, index),
          "cudaDeviceGetAttribute");
  int mode = cudaComputeModeDefault;
  require(cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, index), "cudaDeviceGetAttribute");
  facts.is_prohibited = mode == cudaComputeModeProhibited;
  return facts;
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
  if (index != 0) return why_unusable(look(index));
  static const std::string first = why_unusable(look(0));
  return first;
}

bool holds_context(std::int8_t index) {
  static auto* const state =
      driver_function<decltype(cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
  unsigned flags = 0;
  int active = 0;
  require(state(index, &flags, &active), "cuDevicePrimaryCtxGetState");
  return active != 0;
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
  return {static_cast<std::int64_t>(total), static_cast<std::int64_t>(free + reserved - used),
          static_cast<std::int64_t>(free)};
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
