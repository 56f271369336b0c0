#include "kernels/dense/linear_rows.h"
#include "numerics/bf16.h"

#if defined(__x86_64__)
// The headers of GCC 12 start some intrinsics from a register that they leave unset on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cassert>
#include <cstring>

namespace lockstep::kernels {
namespace {

/// Even and odd input of a pair as one word.
inline std::int32_t pair_at(const Bf16* x) {
  std::int32_t word;
  std::memcpy(&word, x, sizeof(word));
  return word;
}

// ------------------------------------------------------------------ AVX-512 with BF16 products
// 12 rows by 32 outputs are 24 sums in registers; a pair's weights are read once for the 12 rows.

template <int kRows>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"), always_inline)) inline void
sums_avx512(const Bf16* x, std::int64_t x_stride, const Bf16* panel, std::int64_t first,
            std::int64_t end, __m512 (&sum)[kRows][2]) {
  for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
  for (std::int64_t pair = first; pair < end; ++pair) {
    const Bf16* w = panel + pair * kPanel * 2;
    const auto low = (__m512bh)_mm512_loadu_si512(w);
    const auto high = (__m512bh)_mm512_loadu_si512(w + kPanel);
    for (int row = 0; row < kRows; ++row) {
      const auto both = (__m512bh)_mm512_set1_epi32(pair_at(x + row * x_stride + 2 * pair));
      sum[row][0] = _mm512_dpbf16_ps(sum[row][0], both, low);
      sum[row][1] = _mm512_dpbf16_ps(sum[row][1], both, high);
    }
  }
}

/// to_bf16 of 16 numbers; vcvtneps2bf16 would flush subnormals.
__attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) inline __m256i round_avx512(
    __m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), lowest);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}

template <int kRows>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void tile_avx512(
    const PanelArgs& args, std::int64_t first_row) {
  const Bf16* x = args.x + first_row * args.x_stride;
  __m512 sum[kRows][2];
  sums_avx512<kRows>(x, args.x_stride, args.panel, args.split, args.pairs, sum);
  if (args.split > 0) {
    __m512 half[kRows][2];
    sums_avx512<kRows>(x, args.x_stride, args.panel, 0, args.split, half);
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < 2; ++i) {
        const __m512i a = _mm512_cvtepu16_epi32(round_avx512(half[row][i]));
        const __m512i b = _mm512_cvtepu16_epi32(round_avx512(sum[row][i]));
        sum[row][i] = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                    _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
      }
    }
  }
  const auto mask = static_cast<std::uint32_t>((1ull << args.columns) - 1);
  const __mmask16 masks[2] = {static_cast<__mmask16>(mask), static_cast<__mmask16>(mask >> 16)};
  for (int row = 0; row < kRows; ++row) {
    const std::int64_t at = offset_of(args, first_row + row);
    for (int i = 0; i < 2; ++i) {
      if (args.y != nullptr) _mm512_mask_storeu_ps(args.y + at + 16 * i, masks[i], sum[row][i]);
      if (args.y_bf16 != nullptr) {
        _mm256_mask_storeu_epi16(args.y_bf16 + at + 16 * i, masks[i], round_avx512(sum[row][i]));
      }
    }
  }
}

// ------------------------------------------------------------------------------- AVX2 with FMA
// 4 rows by 8 outputs, each BF16 widened as it is read.

template <int kRows>
__attribute__((target("avx2,fma"), always_inline)) inline void sums_avx2(
    const Bf16* x, std::int64_t x_stride, const Bf16* panel, std::int64_t first, std::int64_t end,
    __m256 (&sum)[kRows][2]) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  for (auto& row : sum) row[0] = row[1] = _mm256_setzero_ps();
  for (std::int64_t pair = first; pair < end; ++pair) {
    __m256 odd[2], even[2];
    for (int i = 0; i < 2; ++i) {
      const Bf16* w = panel + pair * kPanel * 2 + 16 * i;
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
      odd[i] = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
      even[i] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    }
    for (int row = 0; row < kRows; ++row) {
      const __m256i both = _mm256_set1_epi32(pair_at(x + row * x_stride + 2 * pair));
      const __m256 x_odd = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
      const __m256 x_even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      for (int i = 0; i < 2; ++i) {
        sum[row][i] = _mm256_fmadd_ps(x_odd, odd[i], sum[row][i]);
        sum[row][i] = _mm256_fmadd_ps(x_even, even[i], sum[row][i]);
      }
    }
  }
}

template <int kRows>
__attribute__((target("avx2,fma"))) void tile_avx2(const PanelArgs& args, std::int64_t first_row) {
  const Bf16* x = args.x + first_row * args.x_stride;
  for (int part = 0; part < kPanel / 16; ++part) {
    const Bf16* panel = args.panel + part * 32;
    float sum[kRows][16], half[kRows][16];
    const auto store = [](const __m256(&from)[kRows][2], float(&to)[kRows][16])
        __attribute__((target("avx2,fma"))) {
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < 2; ++i) _mm256_storeu_ps(to[row] + 8 * i, from[row][i]);
      }
    };
    __m256 registers[kRows][2];
    sums_avx2<kRows>(x, args.x_stride, panel, args.split, args.pairs, registers);
    store(registers, sum);
    if (args.split > 0) {
      sums_avx2<kRows>(x, args.x_stride, panel, 0, args.split, registers);
      store(registers, half);
      for (int row = 0; row < kRows; ++row) {
        for (int o = 0; o < 16; ++o) {
          sum[row][o] = to_float(to_bf16(half[row][o])) + to_float(to_bf16(sum[row][o]));
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const std::int64_t at = offset_of(args, first_row + row) + part * 16;
      for (int o = 0; o < 16 && part * 16 + o < args.columns; ++o) {
        if (args.y != nullptr) args.y[at + o] = sum[row][o];
        if (args.y_bf16 != nullptr) args.y_bf16[at + o] = to_bf16(sum[row][o]);
      }
    }
  }
}

}  // namespace

void linear_panel_avx512_bf16(const PanelArgs& args) {
  std::int64_t row = 0;
  for (; row + 12 <= args.rows; row += 12) tile_avx512<12>(args, row);
  for (; row + 8 <= args.rows; row += 8) tile_avx512<8>(args, row);
  for (; row + 4 <= args.rows; row += 4) tile_avx512<4>(args, row);
  for (; row + 2 <= args.rows; row += 2) tile_avx512<2>(args, row);
  for (; row < args.rows; ++row) tile_avx512<1>(args, row);
}

void linear_panel_avx2(const PanelArgs& args) {
  std::int64_t row = 0;
  for (; row + 4 <= args.rows; row += 4) tile_avx2<4>(args, row);
  for (; row < args.rows; ++row) tile_avx2<1>(args, row);
}

}  // namespace lockstep::kernels

#else

namespace lockstep::kernels {

void linear_panel_avx512_bf16(const PanelArgs& args) { linear_panel_portable(args); }
void linear_panel_avx2(const PanelArgs& args) { linear_panel_portable(args); }

}  // namespace lockstep::kernels

#endif
