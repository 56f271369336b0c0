/// Rotary embedding of queries and keys, with the norm of each head before it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.h"

namespace lockstep::kernels {

/// cos and sin of position * theta^(-2i / C), computed in double on the host and rounded to FP32.
class RopeTable {
 public:
  RopeTable(double theta, std::int32_t head_dim, Device device = {});

  /// Makes positions 0..count-1 available. Where they lie may change: no kernel may be under way,
  /// nor a graph be kept that reads them.
  void grow(std::int32_t count);
  std::int32_t positions() const { return positions_; }
  Device device() const { return device_; }

  /// [C / 2] each, on the device; position after position.
  const float* cos(std::int32_t position) const { return cos_at_ + position * half_; }
  const float* sin(std::int32_t position) const { return sin_at_ + position * half_; }

 private:
  double theta_;
  std::int64_t half_;
  std::int32_t positions_ = 0;
  Device device_;
  std::vector<float> cos_, sin_;
  Buffer cos_copy_, sin_copy_;  // on another device than the CPU
  const float* cos_at_ = nullptr;
  const float* sin_at_ = nullptr;
};

struct RopeArgs {
  TensorView<Bf16, 2> x;                    // [rows, heads * C], in place
  std::int32_t head_dim = 0;                // C, even
  std::span<const std::int32_t> positions;  // [rows]
  const RopeTable* table = nullptr;         // has all of them
  std::span<const Bf16> norm{};             // [C] RMSNorm of each head first; empty: none
  float eps = 1e-6f;
};

/// Each head: RMSNorm (as rms_norm.h), then (a, b) -> (a cos - b sin, b cos + a sin) over the pairs
/// (i, i + C / 2), in FP32, rounded once. On every device the same bits; spans and table lie where
/// x does. Throws Error naming what is wrong; positions on a CUDA device are not looked at.
void rope(const RopeArgs& args, Stream stream);

}  // namespace lockstep::kernels
