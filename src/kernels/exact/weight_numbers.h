/// A trainer's FP32 masters on their way to a rollout: rounded to BF16, and how far codes are from
/// them. Nobody waits.
#pragma once

#include <cstdint>

#include "device/memory.h"
#include "device/view.h"

namespace lockstep::kernels {

/// rounded = to_bf16(master). *bad, which lies with them, becomes the first element, counted row by
/// row, that BF16 has no finite number for, where that is lower than what it holds.
void round_weight(TensorView<const float, 2> master, TensorView<Bf16, 2> rounded,
                  std::uint64_t* bad, Stream stream = {});

/// to = from, rows without gaps on one CUDA device, and *bad becomes the first row that holds a
/// number which is not finite, where that is lower. False, and nothing done, where rows have gaps
/// or do not lie at multiples of 16 bytes.
bool copy_weight(TensorView<const Bf16, 2> from, Bf16* to, std::int32_t* bad, Stream stream);

/// Sums of (back - master)^2 and master^2 in double, over all matrices that were added, in an order
/// that the shapes alone decide.
class WeightError {
 public:
  explicit WeightError(Device device = {}, Stream stream = {});
  /// Both on the device.
  void add(TensorView<const float, 2> master, TensorView<const float, 2> back);
  /// The two sums. Waits.
  void read(double& error, double& norm) const;

 private:
  Device device_;
  Stream stream_;
  Buffer sums_;  // [2], then what blocks leave
};

}  // namespace lockstep::kernels
