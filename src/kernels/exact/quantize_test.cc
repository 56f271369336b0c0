#include "kernels/exact/quantize.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize_rows.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kLockstep = {.element = Element::kE2m1,
                                 .scale = ScaleFormat::kE4m3,
                                 .global = GlobalScale::kPerToken,
                                 .global_is_power_of_two = true};

constexpr Quantizer mx(ScaleRule rule) {
  return {.element = Element::kE2m1, .block = 32, .scale = ScaleFormat::kE8m0, .scale_rule = rule};
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
        global(static_cast<std::size_t>(rows), -1.0f) {}

  PackedView<std::uint8_t> view() {
    return {matrix(codes, rows, cols / 2),
            matrix(scales, rows, cols / block),
            {global.data(), {rows}, {1}, {}}};
  }
  bool operator==(const Packed&) const = default;

  std::int64_t rows, cols, block;
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> global;
};

/// Normal numbers times a scale that wanders over `binades`, some zeros and repeated values.
std::vector<Bf16> random_values(std::size_t count, std::uint64_t seed, int binades) {
  std::vector<Bf16> x(count);
  for (std::size_t i = 0; i < count; ++i) {
    const PhiloxWords w = philox(seed, philox_counter(i, 0, 0));
    const double normal = std::sqrt(-2.0 * std::log(unit(w[0], w[1]) + 1e-300)) *
                          std::cos(6.283185307179586 * unit(w[2], w[3]));
    const PhiloxWords b = philox(seed, philox_counter(i / 16, 1, 0));
    const int shift = static_cast<int>(b[0] % static_cast<unsigned>(2 * binades + 1)) - binades;
    x[i] = to_bf16(static_cast<float>(std::ldexp(normal, shift)));
    if (b[1] % 16 == 0) x[i] = Bf16{0};
    if (w[3] % 64 == 0) x[i] = Bf16{0x8000};
  }
  return x;
}

Packed definition(const std::vector<Bf16>& x, std::int64_t rows, std::int64_t cols,
                  const Quantizer& rule, std::int32_t n, QuantizeCounts& counts) {
  Packed out(rows, cols, rule.block);
  for (std::int64_t r = 0; r < rows; ++r) {
    const Bf16* row = x.data() + r * cols;
    const GlobalNumbers global = rule.global == GlobalScale::kStatic
                                     ? global_of_exponent(n)
                                     : global_of_amax(rule, row_amax(row, cols));
    encode_row<Bf16>({row, cols, global, out.codes.data() + r * cols / 2,
                      out.scales.data() + r * cols / rule.block},
                     rule, counts);
    out.global[static_cast<std::size_t>(r)] = stored_global(rule, global);
  }
  return out;
}

TEST(Quantize, SimdReturnsTheDefinitionsBytesAndCounts) {
  Quantizer cache = kLockstep;
  cache.global = GlobalScale::kStatic;
  const std::vector<Quantizer> rules = {kLockstep,
                                        cache,
                                        mx(ScaleRule::kMxFloor),
                                        mx(ScaleRule::kMxEven),
                                        mx(ScaleRule::kMxCeil),
                                        mx(ScaleRule::kMxRceil)};
  for (const Quantizer& rule : rules) {
    const Simd best = simd_for(rule);
    if (best == Simd::kNone) GTEST_SKIP() << "neither AVX2 nor AVX-512 on this machine";
    for (const std::int64_t cols : {32, 96, 160, 2048, 2080}) {
      for (const int binades : {0, 3, 20, 130}) {
        const std::int64_t rows = 64;
        const auto x = random_values(static_cast<std::size_t>(rows * cols), 7, binades);
        const std::int32_t n = -9;
        QuantizeCounts counts{};
        const Packed expected = definition(x, rows, cols, rule, n, counts);
        for (const Simd simd : {Simd::kAvx2, best}) {
          QuantizeCounts simd_counts{};
          Packed out = expected;
          std::fill(out.codes.begin(), out.codes.end(), std::uint8_t{0x88});
          std::fill(out.scales.begin(), out.scales.end(), std::uint8_t{0x7F});
          std::vector<std::uint16_t> amaxes(static_cast<std::size_t>(cols / rule.block));
          for (std::int64_t r = 0; r < rows; ++r) {
            const Bf16* row = x.data() + r * cols;
            const std::uint16_t bits = block_amaxes(simd, row, cols, rule.block, amaxes.data());
            ASSERT_EQ(to_float(static_cast<Bf16>(bits)), row_amax(row, cols));
            const GlobalNumbers global =
                rule.global == GlobalScale::kStatic
                    ? global_of_exponent(n)
                    : global_of_amax(rule, to_float(static_cast<Bf16>(bits)));
            encode_row(simd,
                       {row, cols, global, out.codes.data() + r * cols / 2,
                        out.scales.data() + r * cols / rule.block},
                       rule, amaxes.data(), simd_counts);
          }
          ASSERT_EQ(out.scales, expected.scales) << cols << " " << binades;
          ASSERT_EQ(out.codes, expected.codes) << cols << " " << binades;
          ASSERT_EQ(simd_counts, counts) << cols << " " << binades;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::kernels
