/// Loops over a trainer's arrays on a CUDA device, in the order of a stream: torch's, where ops
/// write and read the same arrays.
#pragma once

#include <cstdint>

#include "device/view.h"
#include "numerics/bf16.h"
#include "train/parameters.h"

namespace lockstep::train {

/// The first number that BF16 does not hold as a finite one; -1: none. Waits.
std::int64_t first_nonfinite(const Floats& numbers, Stream stream);

/// The sum of squares in double, in a fixed order. Waits.
double sum_of_squares(const Floats& numbers, Stream stream);

void round_to_bf16(Device device, const float* from, Bf16* to, std::int64_t count, Stream stream);
inline void round_to_bf16(const Floats& from, Bf16* to, Stream stream) {
  round_to_bf16(from.device(), from.data(), to, from.size(), stream);
}
void widen(Device device, const Bf16* from, float* to, std::int64_t count, Stream stream);

/// The numbers of adamw().
struct AdamW {
  float* weights = nullptr;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
  const float* grads = nullptr;
  std::int64_t count = 0;
  float beta1 = 0, beta2 = 0, rest1 = 0, rest2 = 0;
  float keep = 0, rate = 0, root = 0, eps = 0, clip = 0;
};
void adamw_on_device(const AdamW& args, Device device, Stream stream);

/// Defined where there is a CUDA compiler.
namespace cuda {
std::int64_t first_nonfinite(Device device, const float* numbers, std::int64_t count,
                             Stream stream);
double sum_of_squares(Device device, const float* numbers, std::int64_t count, Stream stream);
void round_to_bf16(Device device, const float* from, Bf16* to, std::int64_t count, Stream stream);
void widen(Device device, const Bf16* from, float* to, std::int64_t count, Stream stream);
void adamw(const AdamW& args, Device device, Stream stream);
}  // namespace cuda

}  // namespace lockstep::train
