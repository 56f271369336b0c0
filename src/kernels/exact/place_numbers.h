/// FP32 masters on a CUDA device to BF16 where they are read, many weights in one launch: rounded,
/// written, and their checksum taken while they are in registers.
#pragma once

#include <cstdint>
#include <span>

#include "device/memory.h"
#include "device/view.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {

/// All of it lies on one device.
struct PlacedNumbers {
  TensorView<const float, 2> master;
  Bf16* to = nullptr;  // rows without gaps
  // Becomes the first element that BF16 has no finite number for, counted row by row, where that is
  // lower.
  std::uint64_t* bad = nullptr;
  // Zero before. Becomes what crc_of_sum() makes the CRC of the numbers of.
  std::uint32_t* sum = nullptr;
};

class NumberPlacer {
 public:
  NumberPlacer() = default;
  NumberPlacer(Device device, Stream stream) : device_(device), stream_(stream) {}

  /// Whether place() takes them: rows of multiples of eight numbers without gaps, at multiples of
  /// 16 bytes.
  bool takes(const TensorView<const float, 2>& master, const Bf16* to) const;
  /// to_bf16() of all, in the order of the stream.
  void place(std::span<const PlacedNumbers> weights);

 private:
  Device device_;
  Stream stream_;
  Buffer lists_, tables_;
};

}  // namespace lockstep::kernels
