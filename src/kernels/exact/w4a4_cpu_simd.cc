/// The tile under AVX-512 with VNNI and under AVX2. Weights are read as code + 12, unsigned; the
/// surplus, 12 * sum(a), is where each block's sum starts. |dot| <= 2304 and s_w <= 229,376, so
/// that dot * s_w fits int32; times s_a it is widened to int64, even and odd outputs apart.
#include "kernels/exact/w4a4_tile.h"
#include "numerics/e4m3.h"

#if defined(__x86_64__)
// GCC 12 takes its own undefined-vector idiom for a mistake.
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kCodeBytes = 128;  // of a block of 16 outputs

/// Sixteen codes to half units at a time. Their sum is that of the values + 12, less 16 * 12.
[[gnu::target("avx2")]] void unpack_row_avx2(const PartialRow& row) {
  const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i low = _mm_set1_epi8(15);
  for (std::int64_t b = 0; b < row.blocks; ++b) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row.codes + b * 8));
    const __m128i codes =
        _mm_unpacklo_epi8(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
    const __m128i values = _mm_shuffle_epi8(table, codes);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row.a + b * row.stride * 16), values);
    const __m128i sums = _mm_sad_epu8(_mm_add_epi8(values, _mm_set1_epi8(12)), _mm_setzero_si128());
    const std::int32_t sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 12;
    row.info[b * row.stride] = {-12 * sum,
                                row.factor * e4m3_units(static_cast<E4m3>(row.scales[b]))};
  }
}

std::int32_t four_codes(const std::int8_t* a) {
  std::int32_t word;
  std::memcpy(&word, a, 4);
  return word;
}

// ---- AVX-512 ----

/// 2 * value + 12 of each nibble.
[[gnu::target("avx512f,avx512bw")]] inline __m512i shifted_codes(__m512i nibbles) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm512_shuffle_epi8(table, nibbles);
}

/// s8 * 2^9 of 16 scale bytes.
[[gnu::target("avx512f,avx512bw,avx512vl")]] inline __m512i scale_units(const std::uint8_t* s8) {
  const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s8)));
  const __m512i exponent = _mm512_srli_epi32(code, 3);
  const __m512i mantissa = _mm512_and_si512(code, _mm512_set1_epi32(7));
  const __mmask16 normal = _mm512_test_epi32_mask(exponent, exponent);
  const __m512i significand =
      _mm512_mask_or_epi32(mantissa, normal, mantissa, _mm512_set1_epi32(8));
  const __m512i shift = _mm512_mask_sub_epi32(exponent, normal, exponent, _mm512_set1_epi32(1));
  return _mm512_sllv_epi32(significand, shift);
}

template <int kRows, int kParts>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]] void tile_avx512(
    const Tile& tile) {
  __m512i even[kRows];
  __m512i odd[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_si512();
  const __m512i low = _mm512_set1_epi8(15);
  const std::uint8_t* scales = tile.weights + tile.blocks * kCodeBytes;
  const std::int64_t blocks = tile.blocks;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const __m512i c0 = _mm512_loadu_si512(tile.weights + b * kCodeBytes);
    const __m512i c1 = _mm512_loadu_si512(tile.weights + b * kCodeBytes + 64);
    const __m512i w0 = shifted_codes(_mm512_and_si512(c0, low));
    const __m512i w1 = shifted_codes(_mm512_and_si512(_mm512_srli_epi32(c0, 4), low));
    const __m512i w2 = shifted_codes(_mm512_and_si512(c1, low));
    const __m512i w3 = shifted_codes(_mm512_and_si512(_mm512_srli_epi32(c1, 4), low));
    const __m512i s_w = scale_units(scales + b * kTileOut);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        const std::int64_t block = b * (kRows * kParts) + r * kParts + p;
        const std::int8_t* a = tile.a + block * 16;
        __m512i dot = _mm512_set1_epi32(tile.info[block].start);
        dot = _mm512_dpbusd_epi32(dot, w0, _mm512_set1_epi32(four_codes(a)));
        dot = _mm512_dpbusd_epi32(dot, w1, _mm512_set1_epi32(four_codes(a + 4)));
        dot = _mm512_dpbusd_epi32(dot, w2, _mm512_set1_epi32(four_codes(a + 8)));
        dot = _mm512_dpbusd_epi32(dot, w3, _mm512_set1_epi32(four_codes(a + 12)));
        dot = _mm512_mullo_epi32(dot, s_w);
        const __m512i s_a = _mm512_set1_epi32(tile.info[block].scale);
        even[r] = _mm512_add_epi64(even[r], _mm512_mul_epi32(dot, s_a));
        odd[r] = _mm512_add_epi64(odd[r], _mm512_mul_epi32(_mm512_srli_epi64(dot, 32), s_a));
      }
    }
  }
  const auto mask = static_cast<__mmask16>((1u << tile.width) - 1u);
  const __m512i in_order =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m512 e = _mm512_castps256_ps512(_mm512_cvtepi64_ps(even[r]));
    const __m512 o = _mm512_castps256_ps512(_mm512_cvtepi64_ps(odd[r]));
    const PowerPair power = power_pair(tile.shift[r]);
    const __m512 sum = _mm512_permutex2var_ps(e, in_order, o);
    const __m512 y = _mm512_mul_ps(_mm512_mul_ps(sum, _mm512_set1_ps(power.first)),
                                   _mm512_set1_ps(power.second));
    _mm512_mask_storeu_ps(tile.out[r] + tile.column, mask, y);
  }
}

template <int kParts>
void by_rows_avx512(const Tile& tile) {
  switch (tile.rows) {
    case 1: return tile_avx512<1, kParts>(tile);
    case 2: return tile_avx512<2, kParts>(tile);
    case 3: return tile_avx512<3, kParts>(tile);
    case 4: return tile_avx512<4, kParts>(tile);
    case 5: return tile_avx512<5, kParts>(tile);
    case 6: return tile_avx512<6, kParts>(tile);
    case 7: return tile_avx512<7, kParts>(tile);
    case 8: return tile_avx512<8, kParts>(tile);
    default: return;
  }
}

void w4a4_tile_avx512(const Tile& tile, std::int32_t parts) {
  parts == 1 ? by_rows_avx512<1>(tile) : by_rows_avx512<2>(tile);
}

// ---- AVX2: eight outputs at a time ----

[[gnu::target("avx2")]] inline __m256i shifted_codes(__m256i nibbles) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm256_shuffle_epi8(table, nibbles);
}

[[gnu::target("avx2")]] inline __m256i scale_units_avx2(const std::uint8_t* s8) {
  const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(s8)));
  const __m256i exponent = _mm256_srli_epi32(code, 3);
  const __m256i mantissa = _mm256_and_si256(code, _mm256_set1_epi32(7));
  const __m256i subnormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i hidden = _mm256_andnot_si256(subnormal, _mm256_set1_epi32(8));
  const __m256i one = _mm256_andnot_si256(subnormal, _mm256_set1_epi32(1));
  return _mm256_sllv_epi32(_mm256_or_si256(mantissa, hidden), _mm256_sub_epi32(exponent, one));
}

/// One row, outputs [half * 8, half * 8 + 8): two rows at a time fill the registers.
template <int kRows>
[[gnu::target("avx2")]] void half_tile_avx2(const Tile& tile, std::int32_t first_row,
                                            std::int32_t parts, std::int32_t half,
                                            std::int64_t (*sums)[kTileOut]) {
  __m256i even[kRows];
  __m256i odd[kRows];
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm256_setzero_si256();
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i ones = _mm256_set1_epi16(1);
  const std::uint8_t* scales = tile.weights + tile.blocks * kCodeBytes + half * 8;
  const std::int64_t blocks = tile.blocks;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto* codes = reinterpret_cast<const __m256i*>(tile.weights + b * kCodeBytes + half * 32);
    const __m256i c0 = _mm256_loadu_si256(codes);
    const __m256i c1 = _mm256_loadu_si256(codes + 2);
    const __m256i w0 = shifted_codes(_mm256_and_si256(c0, low));
    const __m256i w1 = shifted_codes(_mm256_and_si256(_mm256_srli_epi32(c0, 4), low));
    const __m256i w2 = shifted_codes(_mm256_and_si256(c1, low));
    const __m256i w3 = shifted_codes(_mm256_and_si256(_mm256_srli_epi32(c1, 4), low));
    const __m256i s_w = scale_units_avx2(scales + b * kTileOut);
    for (int r = 0; r < kRows; ++r) {
      for (std::int32_t p = 0; p < parts; ++p) {
        const std::int64_t block = (b * tile.rows + first_row + r) * parts + p;
        const std::int8_t* a = tile.a + block * 16;
        // Eight products of at most 24 * 12 in an int16: 2304, no saturation.
        const __m256i d01 =
            _mm256_add_epi16(_mm256_maddubs_epi16(w0, _mm256_set1_epi32(four_codes(a))),
                             _mm256_maddubs_epi16(w1, _mm256_set1_epi32(four_codes(a + 4))));
        const __m256i d23 =
            _mm256_add_epi16(_mm256_maddubs_epi16(w2, _mm256_set1_epi32(four_codes(a + 8))),
                             _mm256_maddubs_epi16(w3, _mm256_set1_epi32(four_codes(a + 12))));
        __m256i dot = _mm256_madd_epi16(_mm256_add_epi16(d01, d23), ones);
        dot = _mm256_add_epi32(dot, _mm256_set1_epi32(tile.info[block].start));
        dot = _mm256_mullo_epi32(dot, s_w);
        const __m256i s_a = _mm256_set1_epi32(tile.info[block].scale);
        even[r] = _mm256_add_epi64(even[r], _mm256_mul_epi32(dot, s_a));
        odd[r] = _mm256_add_epi64(odd[r], _mm256_mul_epi32(_mm256_srli_epi64(dot, 32), s_a));
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    alignas(32) std::int64_t lanes[2][4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[0]), even[r]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[1]), odd[r]);
    for (int j = 0; j < 8; ++j) sums[r][half * 8 + j] = lanes[j & 1][j >> 1];
  }
}

template <int kRows>
void rows_avx2(const Tile& tile, std::int32_t first_row, std::int32_t parts) {
  std::int64_t sums[kRows][kTileOut];
  for (std::int32_t half = 0; half < 2; ++half) {
    half_tile_avx2<kRows>(tile, first_row, parts, half, sums);
  }
  for (std::int32_t r = 0; r < kRows; ++r) {
    const PowerPair power = power_pair(tile.shift[first_row + r]);
    for (std::int32_t j = 0; j < tile.width; ++j) {
      tile.out[first_row + r][tile.column + j] =
          static_cast<float>(sums[r][j]) * power.first * power.second;
    }
  }
}

void w4a4_tile_avx2(const Tile& tile, std::int32_t parts) {
  std::int32_t r = 0;
  for (; r + 2 <= tile.rows; r += 2) rows_avx2<2>(tile, r, parts);
  if (r < tile.rows) rows_avx2<1>(tile, r, parts);
}

}  // namespace

TileBackend w4a4_backend(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return {unpack_row_avx2, w4a4_tile_avx512};
    case Isa::kAvx2: return {unpack_row_avx2, w4a4_tile_avx2};
    case Isa::kPortable: break;
  }
  return w4a4_portable();
}

}  // namespace lockstep::kernels

#else

namespace lockstep::kernels {

TileBackend w4a4_backend(Isa) { return w4a4_portable(); }

}  // namespace lockstep::kernels

#endif
