/// For .cu files alone: how a call of the CUDA runtime that failed becomes an Error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <source_location>

#include "base/error.h"
#include "base/text.h"
#include "device/memory.h"

namespace lockstep::cuda {

/// Whether a failure is of work that ran on the device, after which the process's every call there
/// fails alike.
inline bool is_lasting(cudaError_t status) {
  switch (status) {
    case cudaErrorLaunchFailure:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
    case cudaErrorUnknown: return true;
    default: return false;
  }
}

/// Throws Error "CALL: what the runtime says" unless `status` is success.
inline void require(cudaError_t status, const char* call,
                    std::source_location where = std::source_location::current()) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // it is told here; the next launch must not be blamed for it
  const bool lasting = is_lasting(status);
  if (status == cudaErrorDevicesUnavailable) {
    throw Error(cat({call, ": ", cudaGetErrorString(status),
                     "; where the device is in exclusive-process mode another process has it: wait "
                     "for that one, or share the device under NVIDIA's MPS"}),
                where);
  }
  throw Error(cat({call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")",
                   lasting ? "; " : "", lasting ? kBeginAgain : ""}),
              where);
}

/// After a launch: throws where the kernel could not start. What goes wrong inside it shows at the
/// next synchronize().
inline void require_launch(const char* kernel,
                           std::source_location where = std::source_location::current()) {
  require(cudaGetLastError(), kernel, where);
}

inline cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

/// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(std::int8_t index) {
    require(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != index) require(cudaSetDevice(index), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace lockstep::cuda
