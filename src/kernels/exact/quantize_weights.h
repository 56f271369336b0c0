/// A few weights at a time from FP32 masters on a CUDA device to codes, and codes to where the
/// product reads them: what a refit repeats ten thousand times. Nobody waits, nothing is allocated.
#pragma once

#include <cstdint>
#include <span>

#include "device/memory.h"
#include "device/view.h"
#include "kernels/exact/w4a4.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

inline constexpr int kMostWeights = 4;    // that go at once, so that masters stay in the cache
inline constexpr int kMostReplaced = 16;  // experts

/// A master, and room for its codes, all on one device and without gaps between rows.
struct WeightOnItsWay {
  TensorView<const float, 2> master;
  PackedView<std::uint8_t> out;  // global is one float
  // Zero before. Afterwards the largest magnitude as BF16's bits, 0x7F80 or more where there is one
  // that is not finite.
  std::uint32_t* amax = nullptr;
  // Becomes the first element that is not finite, counted row by row, where that is lower.
  std::uint64_t* bad = nullptr;
};

/// Whether it is NVFP4 under one power of two a matrix, whose kernels take sixteen numbers a
/// thread.
bool takes_nvfp4_weights(const Quantizer& rule);

/// Whether quantize_weights() has a kernel for that: NVFP4 under one power of two a matrix, rows
/// without gaps.
bool quantizes_at_once(const Quantizer& rule, const TensorView<const float, 2>& master);

/// Sums over all elements of (code's worth - master)^2 and master^2, those of some in FP32, of
/// these in double, in an order that shapes and the device's multiprocessors decide: equal runs may
/// differ in the last digits where they have other shares of a device.
class WeightSums {
 public:
  WeightSums() = default;
  WeightSums(Device device, Stream stream);
  /// ||worth - master|| and ||master||, squared, of all so far. Waits.
  void read(double& error, double& norm);

 private:
  friend void quantize_weights(std::span<const WeightOnItsWay>, const Quantizer&, WeightSums&);
  friend class WeightPlacer;
  void fold();

  Device device_;
  Stream stream_;
  Buffer sums_;
  int parts_ = 0;
};

/// Codes, scales and global scale as quantize_weight() gives them, of at most kMostWeights that
/// quantizes_at_once(); of a weight that is not finite all are zero. In the order of the sums'
/// stream.
void quantize_weights(std::span<const WeightOnItsWay> weights, const Quantizer& rule,
                      WeightSums& sums);

/// An expert to be replaced.
struct Replaced {
  PackedView<const std::uint8_t> now;  // rows without gaps; global is one float
  W4a4Weights place;
  std::int32_t expert = 0;
  std::int64_t* flips = nullptr;  // as count_flips() adds them; nullptr: nobody asks
};

/// w4a4_fill() of all rows of at most kMostReplaced experts, and count_flips() before it. Under
/// powers of two: throws Error for a place that is `scaled`.
void w4a4_replace(std::span<const Replaced> experts, Stream stream);

}  // namespace lockstep::kernels
