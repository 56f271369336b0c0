/// What stands behind residual(): one row on a CPU. Inside kernels/exact/ only.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/exact/isa.h"
#include "kernels/exact/residual.h"
#include "numerics/e2m1.h"
#include "numerics/scale.h"

namespace lockstep::kernels {

inline constexpr std::int64_t kResidualBlockRows = 32;  // of ResidualPattern::kBlocks
inline constexpr std::int64_t kResidualBlockCols = 64;

struct ResidualRow {
  const Bf16* x = nullptr;               // [groups * 16], finite
  const std::uint8_t* codes = nullptr;   // [groups * 8]
  const std::uint8_t* scales = nullptr;  // [groups]
  std::int32_t n = 0;
  std::int64_t groups = 0;
  Bf16* residual = nullptr;  // [groups * 16] Q(x) - x, exact
  float* scores = nullptr;   // [groups]
};

using ResidualKernel = void (*)(const ResidualRow&);

void residual_row_portable(const ResidualRow& row);  // the definition
ResidualKernel residual_row(Isa isa);

/// residual() on a CUDA device, of arguments that it has checked; at least one row and column.
void residual_cuda(const ResidualArgs& args, Stream stream);

/// rest = x - Q(x) in FP32, and the body of add_residual(), of views on a CUDA device.
void residual_rest_cuda(TensorView<const Bf16, 2> x, const Quantizer& rule,
                        const PackedView<const std::uint8_t>& q, TensorView<float, 2> rest,
                        Stream stream);
void add_residual_cuda(const PackedView<const std::uint8_t>& q,
                       const PackedView<const std::uint8_t>& rest, const Quantizer& rule,
                       float alpha, TensorView<Bf16, 2> out, Stream stream);
void add_product_cuda(TensorView<const float, 2> x, float alpha, TensorView<float, 2> y,
                      Stream stream);

/// The body of every backend. No branches, so that compilers make vectors of it.
[[gnu::always_inline]] inline void residual_row_body(const ResidualRow& row) {
  const float inverse = power_of_two(-row.n);
  for (std::int64_t g = 0; g < row.groups; ++g) {
    const float scale = scale_value(static_cast<E4m3>(row.scales[g]), row.n);
    std::uint32_t codes[16];
    for (std::int64_t i = 0; i < 8; ++i) {
      const std::uint32_t pair = row.codes[g * 8 + i];
      codes[2 * i] = pair & 15u;
      codes[2 * i + 1] = pair >> 4;
    }
    float squares[16];
    std::uint16_t words[16];
    const Bf16* x = row.x + g * 16;
    for (std::int64_t i = 0; i < 16; ++i) {
      const float magnitude = e2m1_magnitude(codes[i] & 7u) * scale;
      const float value = float_of(float_bits(magnitude) | (codes[i] & 8u) << 28);
      const float r = value - to_float(x[i]);
      words[i] = static_cast<std::uint16_t>(float_bits(r) >> 16);
      const float scaled = r * inverse;
      squares[i] = scaled * scaled;
    }
    std::memcpy(row.residual + g * 16, words, sizeof words);
    float score = 0.0f;
    for (std::uint32_t i = 0; i < 16; ++i) score += squares[i];
    row.scores[g] = score;
  }
}

}  // namespace lockstep::kernels
