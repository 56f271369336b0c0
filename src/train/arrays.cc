#include "train/arrays.h"

#include "base/build.h"
#include "base/error.h"

namespace lockstep::train {
namespace {

/// A device that no array can lie on in this build.
[[noreturn]] void throw_no_backend() { throw Error("this build has no CUDA backend"); }

}  // namespace

std::int64_t first_nonfinite(const Floats& numbers, Stream stream) {
  if constexpr (build::has_cuda) {
    return cuda::first_nonfinite(numbers.device(), numbers.data(), numbers.size(), stream);
  }
  throw_no_backend();
}

double sum_of_squares(const Floats& numbers, Stream stream) {
  if constexpr (build::has_cuda) {
    return cuda::sum_of_squares(numbers.device(), numbers.data(), numbers.size(), stream);
  }
  throw_no_backend();
}

void round_to_bf16(Device device, const float* from, Bf16* to, std::int64_t count, Stream stream) {
  if constexpr (build::has_cuda) return cuda::round_to_bf16(device, from, to, count, stream);
  throw_no_backend();
}

void widen(Device device, const Bf16* from, float* to, std::int64_t count, Stream stream) {
  if constexpr (build::has_cuda) return cuda::widen(device, from, to, count, stream);
  throw_no_backend();
}

void adamw_on_device(const AdamW& args, Device device, Stream stream) {
  if constexpr (build::has_cuda) return cuda::adamw(args, device, stream);
  throw_no_backend();
}

}  // namespace lockstep::train
