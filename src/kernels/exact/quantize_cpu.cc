#include <algorithm>

#include "kernels/exact/quantize_rows.h"

namespace lockstep::kernels {

template <typename T>
float row_amax(const T* x, std::int64_t cols) {
  return amax_of(x, cols);
}

namespace {

/// E4M3 elements: blocks at the edge are smaller; without scales the row is one block.
template <typename T>
void encode_wide(const EncodeRow<T>& row, const Quantizer& rule, QuantizeCounts& counts) {
  const std::int64_t block = rule.is_mx() ? rule.block : row.cols;
  for (std::int64_t first = 0; first < row.cols; first += block) {
    const std::int64_t size = std::min(block, row.cols - first);
    const T* x = row.x + first;
    const float amax = amax_of(x, size);
    std::uint8_t byte = 0;
    if (rule.is_mx()) row.scales[first / block] = byte = scale_byte(rule, amax, row.global);
    encode_e4m3(x, size, scale_value(rule, byte, row.global.exponent), row.codes + first);
    count_wide_block(amax, rule, row.global, counts);
  }
}

}  // namespace

template <typename T>
void encode_e4m3(const T* x, std::int64_t count, float scale, std::uint8_t* codes) {
  const float inverse = inverse_of(scale);
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = bits_of(to_e4m3_scaled(value_of(x[i]), inverse));
  }
}

template void encode_e4m3(const Bf16*, std::int64_t, float, std::uint8_t*);
template void encode_e4m3(const float*, std::int64_t, float, std::uint8_t*);

template <typename T>
void encode_row(const EncodeRow<T>& row, const Quantizer& rule, QuantizeCounts& counts) {
  if (rule.is_wide()) return encode_wide(row, rule, counts);
  const std::int32_t block = rule.block;
  for (std::int64_t first = 0; first < row.cols; first += block) {
    row.scales[first / block] =
        encode_block(row.x + first, rule, row.global, row.codes + first / 2, counts);
  }
}

template float row_amax(const Bf16*, std::int64_t);
template float row_amax(const float*, std::int64_t);
template void encode_row(const EncodeRow<Bf16>&, const Quantizer&, QuantizeCounts&);
template void encode_row(const EncodeRow<float>&, const Quantizer&, QuantizeCounts&);

}  // namespace lockstep::kernels
