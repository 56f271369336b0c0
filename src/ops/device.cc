#include "ops/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "device/memory.h"

namespace lockstep::ops {

void prepare_torch(Device device) {
  if (device.kind == Device::Kind::kCpu) return;
  if (const std::string why = why_unusable(device); !why.empty()) {
    throw Error("device = \"cuda\": " + why);
  }
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);  // for products in one order
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw Error(std::string("device = \"cuda\" needs a torch built for CUDA: ") + dlerror());
  }
  at::Context& context = at::globalContext();
  context.setDeterministicFillUninitializedMemory(false);
  context.setAllowTF32CuBLAS(false);
  context.setAllowBF16ReductionCuBLAS(false);
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
