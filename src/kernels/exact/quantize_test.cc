#include "kernels/exact/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/exact/dequantize.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kRule = {.element = Element::kE2m1,
                             .scale = ScaleFormat::kE4m3,
                             .global = GlobalScale::kPerToken,
                             .global_is_power_of_two = true};

template <typename T>
TensorView<T, 2> matrix(std::vector<T>& data, std::int64_t rows, std::int64_t cols) {
  return {data.data(), {rows, cols}, {cols, 1}, {}};
}

struct Packed {
  Packed(std::int64_t rows, std::int64_t cols, std::int64_t block = 16)
      : rows(rows),
        cols(cols),
        block(block),
        codes(static_cast<std::size_t>(rows * cols / 2), 0xEE),
        scales(static_cast<std::size_t>(rows * cols / block), 0xEE),
        global(static_cast<std::size_t>(rows), -1.0f) {}

  PackedView<std::uint8_t> view() {
    return {matrix(codes, rows, cols / 2),
            matrix(scales, rows, cols / block),
            {global.data(), {rows}, {1}, {}}};
  }

  std::int64_t rows, cols, block;
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> global;
};

TEST(Quantize, DequantizedValuesAreTheNearestOnes) {
  std::vector<Bf16> x(64);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = to_bf16(std::sin(static_cast<float>(i)) * static_cast<float>(i));
  }
  Packed out(2, 32);
  quantize({.x = matrix(x, 2, 32), .rule = kRule, .out = out.view()});
  std::vector<float> back(64);
  dequantize({.codes = out.view(), .rule = kRule, .f32 = matrix(back, 2, 32)});
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float scale = to_float(static_cast<E4m3>(out.scales[i / 16])) * out.global[i / 32];
    float best = std::numeric_limits<float>::infinity();
    for (std::uint8_t code = 0; code < 16; ++code) {
      best = std::min(best, std::abs(to_float(static_cast<E2m1>(code)) * scale - to_float(x[i])));
    }
    EXPECT_EQ(std::abs(back[i] - to_float(x[i])), best) << i;
  }
}

}  // namespace
}  // namespace lockstep::kernels
