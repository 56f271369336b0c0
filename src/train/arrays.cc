#include "train/arrays.h"

#include "base/build.h"
#include "base/error.h"

namespace lockstep::train {
namespace {

/// A device that no array can lie on in this build.
[[noreturn]] void throw_no_backend() { throw Error("this build has no CUDA backend"); }

}  // namespace

std::int64_t first_nonfinite(const Floats& numbers) {
  if constexpr (build::has_cuda) {
    return cuda::first_nonfinite(numbers.device(), numbers.data(), numbers.size());
  }
  throw_no_backend();
}

double sum_of_squares(const Floats& numbers) {
  if constexpr (build::has_cuda) {
    return cuda::sum_of_squares(numbers.device(), numbers.data(), numbers.size());
  }
  throw_no_backend();
}

void round_to_bf16(Device device, const float* from, Bf16* to, std::int64_t count) {
  if constexpr (build::has_cuda) return cuda::round_to_bf16(device, from, to, count);
  throw_no_backend();
}

void widen(Device device, const Bf16* from, float* to, std::int64_t count) {
  if constexpr (build::has_cuda) return cuda::widen(device, from, to, count);
  throw_no_backend();
}

void adamw_on_device(const AdamW& args, Device device) {
  if constexpr (build::has_cuda) return cuda::adamw(args, device);
  throw_no_backend();
}

}  // namespace lockstep::train
