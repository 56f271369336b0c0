/// For tests: matrices that own their bytes, and values to fill them with.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/philox.h"
#include "device/view.h"
#include "numerics/bf16.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

inline constexpr Quantizer kLockstep = {.element = Element::kE2m1,
                                        .scale = ScaleFormat::kE4m3,
                                        .global = GlobalScale::kPerToken,
                                        .global_is_power_of_two = true};

constexpr Quantizer mx_rule(ScaleRule rule) {
  return {.element = Element::kE2m1, .block = 32, .scale = ScaleFormat::kE8m0, .scale_rule = rule};
}

/// MXFP4 in macro blocks.
constexpr Quantizer macro_rule(ScaleRule scale_rule) {
  Quantizer rule = mx_rule(scale_rule);
  rule.macro_block = 128;
  return rule;
}

constexpr Quantizer four_over_six(Quantizer rule, FourOverSix metric) {
  rule.denominator = 256;
  rule.four_over_six = metric;
  return rule;
}

template <typename T>
TensorView<T, 2> matrix(std::vector<T>& data, std::int64_t rows, std::int64_t cols) {
  return {data.data(), {rows, cols}, {cols, 1}, {}};
}

/// Codes of a matrix, over bytes that no quantizer writes: what is left alone shows.
struct Packed {
  Packed(std::int64_t rows, std::int64_t cols, std::int64_t block)
      : rows(rows),
        cols(cols),
        block(block),
        codes(static_cast<std::size_t>(rows * cols / 2), 0x88),
        scales(static_cast<std::size_t>(rows * cols / block), 0x7F),
        global(static_cast<std::size_t>(rows), -1.0f),
        bands(rows),
        code_cols(cols / 2),
        scale_cols(cols / block) {}

  Packed(std::int64_t rows, std::int64_t cols, const Quantizer& rule)
      : rows(rows),
        cols(cols),
        block(rule.block),
        codes(static_cast<std::size_t>(rows * rule.code_bytes(cols)), 0x88),
        scales(static_cast<std::size_t>(rule.scale_rows(rows) * rule.scale_cols(cols)), 0x7F),
        global(static_cast<std::size_t>(rows), -1.0f),
        bands(rule.scale_rows(rows)),
        code_cols(rule.code_bytes(cols)),
        scale_cols(rule.scale_cols(cols)),
        macro_cols(rule.macro_cols(cols)),
        mantissas(static_cast<std::size_t>(rows * macro_cols), 9) {}

  PackedView<std::uint8_t> view() {
    return {matrix(codes, rows, code_cols),
            matrix(scales, bands, scale_cols),
            {global.data(), {rows}, {1}, {}},
            macro_cols > 0 ? matrix(mantissas, rows, macro_cols) : TensorView<std::uint8_t, 2>{}};
  }
  std::uint8_t code(std::int64_t row, std::int64_t col) const {
    return codes[static_cast<std::size_t>((row * cols + col) / 2)] >> (col % 2 * 4) & 15;
  }
  bool operator==(const Packed&) const = default;

  std::int64_t rows, cols, block;
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> global;
  std::int64_t bands, code_cols, scale_cols;  // rows of scales, bytes of a row of either
  std::int64_t macro_cols = 0;
  std::vector<std::uint8_t> mantissas{};
};

inline float normal(std::uint64_t seed, std::uint64_t i) {
  const PhiloxWords w = philox(seed, philox_counter(i, 0, 0));
  return static_cast<float>(std::sqrt(-2.0 * std::log(unit(w[0], w[1]) + 1e-300)) *
                            std::cos(6.283185307179586 * unit(w[2], w[3])));
}

/// Normal numbers times a scale that wanders over `binades` from one sixteen to the next; some
/// sixteens are zero, and some numbers -0.
inline std::vector<Bf16> random_values(std::size_t count, std::uint64_t seed, int binades) {
  std::vector<Bf16> x(count);
  for (std::size_t i = 0; i < count; ++i) {
    const PhiloxWords w = philox(seed, philox_counter(i / 16, 1, 0));
    const int shift = static_cast<int>(w[0] % static_cast<unsigned>(2 * binades + 1)) - binades;
    x[i] = to_bf16(std::ldexp(normal(seed, i), shift));
    if (w[1] % 16 == 0) x[i] = Bf16{0};
    if (philox(seed, philox_counter(i, 2, 0))[0] % 64 == 0) x[i] = Bf16{0x8000};
  }
  return x;
}

}  // namespace lockstep::kernels
