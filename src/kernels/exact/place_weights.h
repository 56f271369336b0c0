/// FP32 masters on a CUDA device to NVFP4 codes where the product reads them, many weights in one
/// launch: quantized, written, their checksum and their flips taken while they are in registers.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>

#include "device/memory.h"
#include "device/view.h"
#include "kernels/exact/quantize_weights.h"
#include "kernels/exact/w4a4.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

/// All of it lies on one device.
struct PlacedWeight {
  TensorView<const float, 2> master;
  W4a4Weights place;
  std::int32_t expert = 0;
  std::int64_t* flips = nullptr;  // as count_flips() adds them; nullptr: nobody asks
  // Becomes the first element that is not finite, counted row by row, where that is lower.
  std::uint64_t* bad = nullptr;
  // Zero before. Becomes what crc_of_sum() makes the CRC of codes, scales and global scale of, as
  // Crc32cList has it of bytes in rows: of what was computed, not of what memory holds.
  std::uint32_t* sum = nullptr;
  std::byte* sample = nullptr;  // [sample_bytes()] aligned to 16; nullptr: nobody asks
  std::int64_t sample_step = 1;
};

/// Every so many'th row of a weight as it was computed, not as it lies: the global scale in the
/// first 16 bytes, then the rows' codes, then their scales.
constexpr std::int64_t sample_rows(std::int64_t out, std::int64_t step) {
  return (out + step - 1) / step;
}
constexpr std::int64_t sample_bytes(std::int64_t out, std::int64_t cols, std::int64_t step) {
  return 16 + sample_rows(out, step) * (cols / 2 + cols / 16);
}

class WeightPlacer {
 public:
  WeightPlacer() = default;
  WeightPlacer(Device device, Stream stream) : device_(device), stream_(stream) {}

  /// Whether place() takes such a weight: NVFP4 under one power of two a matrix, rows without gaps,
  /// multiples of 16 rows and of 64 columns, no more than all multiprocessors hold at once.
  bool takes(const Quantizer& rule, const TensorView<const float, 2>& master) const;

  /// The bytes of quantize_weights() and w4a4_replace(); of a weight that is not finite all codes
  /// and scales are zero. Their error goes into `sums`, in an order that shapes, their sequence and
  /// the device's multiprocessors decide. In the order of the stream, which must be that of `sums`.
  /// Throws Error for what it does not take, and for a place that is `scaled`.
  void place(std::span<const PlacedWeight> weights, const Quantizer& rule, WeightSums& sums);

 private:
  std::int64_t most_units() const;
  void prepare(std::int32_t out, std::int32_t cols);

  Device device_;
  Stream stream_;
  Buffer lists_, seen_, bits_;
  std::int32_t chunks_ = 0;                                         // that bits_ are of
  std::map<std::pair<std::int32_t, std::int32_t>, Buffer> powers_;  // by shape
};

}  // namespace lockstep::kernels
