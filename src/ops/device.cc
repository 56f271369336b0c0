#include "ops/device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <string>

#include "base/build.h"
#include "base/error.h"
#include "device/memory.h"
#include "ops/cuda.h"

namespace lockstep::ops {

namespace {

enum class Queues { kUnmade, kOfCpu, kOfAll };
std::atomic<Queues> queues = Queues::kUnmade;

}  // namespace

void begin_backward() {
  Queues unmade = Queues::kUnmade;
  queues.compare_exchange_strong(unmade, Queues::kOfCpu);
}

void prepare_torch(Device device) {
  if (device.kind == Device::Kind::kCpu) return;
  if (queues == Queues::kOfCpu) {
    throw Error(
        "device = \"cuda\": a trainer on the CPU has run in this process, and torch takes no other "
        "device after that; train on the CUDA device first, or in a process of its own");
  }
  if (const std::string why = why_unusable(device); !why.empty()) {
    throw Error("device = \"cuda\": " + why);
  }
  // Products have one order without CUBLAS_WORKSPACE_CONFIG, for torch gives cuBLAS a workspace and
  // there is one stream. Where it is set torch parses it at every product, which takes some 80 us.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw Error(std::string("device = \"cuda\" needs a torch built for CUDA: ") + dlerror());
  }
  at::Context& context = at::globalContext();
  context.setDeterministicFillUninitializedMemory(false);
  context.setAllowTF32CuBLAS(false);
  context.setAllowBF16ReductionCuBLAS(false);
  Queues unmade = Queues::kUnmade;
  queues.compare_exchange_strong(unmade, Queues::kOfAll);
}

void empty_cache(Device device) {
  if (device.kind == Device::Kind::kCpu) return;
  c10::getDeviceAllocator(at::kCUDA)->emptyCache();
}

std::int64_t kept_memory(Device device) {
  if (device.kind == Device::Kind::kCpu) return 0;
  using c10::CachingAllocator::StatType;
  return c10::getDeviceAllocator(at::kCUDA)
      ->getDeviceStats(device.index)
      .reserved_bytes[static_cast<std::size_t>(StatType::AGGREGATE)]
      .current;
}

void limit_memory(Device device, std::int64_t bytes) {
  if (device.kind == Device::Kind::kCpu) return;
  static std::atomic<bool> limited = false;
  if (bytes < 0 && !limited) return;  // what the environment says of it stays
  if constexpr (build::has_cuda) {
    limited = bytes >= 0;
    at::empty({1}, at::TensorOptions(torch_device(device)));  // wakes the allocator
    const std::int64_t all = device_memory(device).total;
    cuda::limit_memory(device.index, bytes < 0 ? all : bytes, all);
  }
}

at::Device torch_device(Device device) {
  if (device.kind == Device::Kind::kCpu) return at::kCPU;
  return {at::kCUDA, device.index};
}

Device house_device(const at::Tensor& x) {
  if (!x.is_cuda()) return {};
  return {Device::Kind::kCuda, static_cast<std::int8_t>(x.get_device())};
}

Stream stream_on(Device device) {
  if (device.kind == Device::Kind::kCpu) return {};
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  return {guard.getStream(torch_device(device)).native_handle()};
}

at::Tensor upload(const at::Tensor& host, const at::Device& device) {
  if (device.is_cpu()) return host;
  const at::Tensor pinned = at::empty(host.sizes(), host.options().pinned_memory(true));
  std::memcpy(pinned.data_ptr(), host.data_ptr(), host.nbytes());
  return pinned.to(device, /*non_blocking=*/true);
}

}  // namespace lockstep::ops
