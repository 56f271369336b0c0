/// QuantizeArgs as they travel into a CUDA kernel. For kernels/exact/*_cuda.cu.
#pragma once

#include "kernels/exact/quantize_rows.h"

namespace lockstep::kernels {

/// `x` is x or x_f32; null pointers stand for views that are not there.
struct QuantizeParams {
  Quantizer rule;
  const void* x = nullptr;
  std::int64_t x_stride = 0;  // in elements
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const float* amax = nullptr;
  std::int64_t amax_stride = 0;
  std::int32_t exponent = 0;
  float static_amax = 0.0f;
  std::uint8_t* codes = nullptr;
  std::int64_t codes_stride = 0;
  std::uint8_t* scales = nullptr;
  std::int64_t scales_stride = 0;
  float* global = nullptr;  // holds the matrix's amax while a per-tensor rule is at work
  std::int64_t global_stride = 0;
  std::int64_t globals = 0;
  RowLayout layout;
  std::int64_t slots = 1;
  std::uint8_t* records = nullptr;
  std::int64_t records_stride = 0;
  std::uint8_t* nonfinite = nullptr;
  std::int64_t nonfinite_stride = 0;
  std::int64_t* counts = nullptr;
  std::int64_t counts_stride = 0;
};

/// BF16 rows under the rules of `lockstep` and MXFP4, at the speed of memory. False, and nothing
/// done, where rule, layout, alignment or the length of a row is another.
bool quantize_lanes(const QuantizeParams& params, Stream stream);

/// The amax of the finite rows of BF16 into *params.global, which began as 0; or false.
bool amax_lanes(const QuantizeParams& params, Device device, Stream stream);

}  // namespace lockstep::kernels
