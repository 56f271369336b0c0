// The definition of quantize_cpu.cc with integer compares: midpoint * s8 * 2^n (or 2^e) are seven
// ascending BF16 numbers, a code is how many of them |x| passes, and a binary search over them is
// three shuffles. Compiled for AVX by function and not by file: inline functions of numerics/ must
// not leak out of here in another instruction set.
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/exact/isa.h"
#include "kernels/exact/quantize_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
// GCC 12 warns of its own header's deliberately undefined operands.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace lockstep::kernels {

#if defined(__x86_64__)
namespace {

constexpr std::int64_t kChunk = 64;  // blocks whose scales are made at once

struct Scales {
  std::array<std::uint8_t, kChunk> bytes{};
  alignas(32) std::array<float, kChunk> values{};  // Inf for a zero scale: nothing passes
};

/// to_e4m3(amax * 2^-n / 6) of eight blocks, and what the scale is worth. Both branches of the
/// rounding are computed and one is chosen.
__attribute__((target("avx2"))) void nvfp4_scales(const std::uint16_t* amaxes, std::int32_t n,
                                                  std::uint8_t* bytes, float* values) {
  const __m128i bits16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(amaxes));
  const __m256 amax = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits16), 16));
  const __m256 raw =
      _mm256_div_ps(_mm256_mul_ps(amax, _mm256_set1_ps(power_of_two(-n))), _mm256_set1_ps(6.0f));
  const __m256i bits = _mm256_castps_si256(raw);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFFF)), odd);
  const __m256i normal = _mm256_min_epi32(
      _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3)),
      _mm256_set1_epi32(kE4m3Max));
  const __m256 magic = _mm256_set1_ps(0x1p14f);
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(raw, magic)), _mm256_castps_si256(magic));
  const __m256i is_normal = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x3C800000 - 1));
  const __m256i code = _mm256_blendv_epi8(subnormal, normal, is_normal);
  alignas(32) std::array<std::int32_t, 8> codes;
  _mm256_store_si256(reinterpret_cast<__m256i*>(codes.data()), code);
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(codes[i]);

  // The value: a normal's bits are the code's shifted into place, a subnormal is code * 2^-9.
  const __m256 as_normal = _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(code, _mm256_set1_epi32(120 << 3)), 20));
  const __m256 as_subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(0x1p-9f));
  const __m256 value = _mm256_blendv_ps(
      as_subnormal, as_normal, _mm256_castsi256_ps(_mm256_cmpgt_epi32(code, _mm256_set1_epi32(7))));
  const __m256 zero = _mm256_castsi256_ps(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()));
  const __m256 scaled = _mm256_mul_ps(value, _mm256_set1_ps(power_of_two(n)));
  _mm256_storeu_ps(values, _mm256_blendv_ps(scaled, _mm256_set1_ps(float_of(0x7F800000u)), zero));
}

/// Scales of up to kChunk blocks. Amaxes behind `count` are read in eights, as zeros.
__attribute__((target("avx2"))) void make_scales(const Quantizer& rule, std::int32_t n,
                                                 const Bf16* x, const std::uint16_t* amaxes,
                                                 std::int64_t count, Scales& out) {
  if (rule.four_over_six != FourOverSix::kOff) {
    // Which map is better is the definition's to say; codes follow from scales as ever.
    const GlobalNumbers global = global_of_exponent(n);
    for (std::int64_t j = 0; j < count; ++j) {
      const float amax = to_float(static_cast<Bf16>(amaxes[j]));
      const std::uint8_t byte = block_byte(x + j * rule.block, amax, rule, global);
      const float value = scale_value(static_cast<E4m3>(byte), n);
      out.bytes[static_cast<std::size_t>(j)] = byte;
      out.values[static_cast<std::size_t>(j)] = byte == 0 ? float_of(0x7F800000u) : value;
    }
    return;
  }
  if (rule.is_mx()) {
    const MxRule mx = rule.scale_rule == ScaleRule::kMxEven    ? MxRule::kEven
                      : rule.scale_rule == ScaleRule::kMxCeil  ? MxRule::kCeil
                      : rule.scale_rule == ScaleRule::kMxRceil ? MxRule::kRceil
                                                               : MxRule::kFloor;
    for (std::int64_t j = 0; j < count; ++j) {
      const E8m0 e = mx_scale(to_float(static_cast<Bf16>(amaxes[j])), mx);
      out.bytes[static_cast<std::size_t>(j)] = bits_of(e);
      out.values[static_cast<std::size_t>(j)] = to_float(e);
    }
    return;
  }
  for (std::int64_t j = 0; j < count; j += 8) {
    std::array<std::uint16_t, 8> eight{};
    const std::uint16_t* from = amaxes + j;
    if (count - j < 8) {
      std::copy(from, amaxes + count, eight.begin());
      from = eight.data();
    }
    nvfp4_scales(from, n, out.bytes.data() + j, out.values.data() + j);
  }
}

/// What |x| must be greater than: the seven midpoints times a scale as BF16 bits, less one where a
/// tie goes up, so that equality passes. The eighth is never looked at. The products are exact, so
/// the bits below are zero.
__attribute__((target("avx2"))) inline __m128i thresholds(float value) {
  const __m256 midpoints = _mm256_setr_ps(0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 5.0f);
  const __m256i equal = _mm256_setr_epi32(0, -1, 0, -1, 0, -1, 0, 0);
  const __m256 product = _mm256_mul_ps(midpoints, _mm256_set1_ps(value));
  const __m256i bits = _mm256_add_epi32(_mm256_srli_epi32(_mm256_castps_si256(product), 16), equal);
  return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/// Codes of sixteen elements as 16-bit words.
__attribute__((target("avx2"))) inline __m256i codes16(__m256i x, __m256i table) {
  const __m256i a = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
  // Word i of the table is fetched by the bytes 2i and 2i + 1. First midpoint 3, then 1 or 5, then
  // the one between.
  __m256i at = _mm256_set1_epi16(0x0706);
  const __m256i first = _mm256_cmpgt_epi16(a, _mm256_shuffle_epi8(table, at));
  at = _mm256_add_epi16(_mm256_and_si256(first, _mm256_set1_epi16(0x0808)),
                        _mm256_set1_epi16(0x0302));
  const __m256i second = _mm256_cmpgt_epi16(a, _mm256_shuffle_epi8(table, at));
  at = _mm256_add_epi16(_mm256_sub_epi16(at, _mm256_set1_epi16(0x0202)),
                        _mm256_and_si256(second, _mm256_set1_epi16(0x0404)));
  const __m256i third = _mm256_cmpgt_epi16(a, _mm256_shuffle_epi8(table, at));
  const __m256i m = _mm256_or_si256(_mm256_or_si256(_mm256_and_si256(first, _mm256_set1_epi16(4)),
                                                    _mm256_and_si256(second, _mm256_set1_epi16(2))),
                                    _mm256_and_si256(third, _mm256_set1_epi16(1)));
  // The sign, except of a zero.
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(x, 12), _mm256_set1_epi16(8));
  const __m256i zero = _mm256_cmpeq_epi16(m, _mm256_setzero_si256());
  return _mm256_or_si256(m, _mm256_andnot_si256(zero, sign));
}

/// Two words' codes to one byte, sixteen elements to eight.
__attribute__((target("avx2"))) inline void store_codes16(__m256i codes, std::uint8_t* out) {
  const __m256i pairs = _mm256_or_si256(codes, _mm256_srli_epi32(codes, 12));
  const __m256i gather =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8(pairs, gather);
  const __m128i joined =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), joined);
}

__attribute__((target("avx2"))) void encode_avx2(const Bf16* x, std::int32_t block,
                                                 std::int64_t blocks, const float* values,
                                                 std::uint8_t* codes) {
  for (std::int64_t j = 0; j < blocks; ++j) {
    const __m256i table = _mm256_broadcastsi128_si256(thresholds(values[j]));
    for (std::int32_t i = 0; i < block; i += 16) {
      const std::int64_t at = j * block + i;
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + at));
      store_codes16(codes16(words, table), codes + at / 2);
    }
  }
}

/// Codes of 32 elements, 16 under each half of the table.
__attribute__((target("avx512f,avx512bw,avx512vl"))) inline void store_codes32(const Bf16* x,
                                                                               __m512i table,
                                                                               __m512i base,
                                                                               std::uint8_t* out) {
  const __m512i words = _mm512_loadu_si512(x);
  const __m512i a = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i two = _mm512_set1_epi16(2);
  __m512i m = base;  // 0 or 8: where the element's half of the table begins
  __mmask32 passed = _mm512_cmpgt_epi16_mask(
      a, _mm512_permutexvar_epi16(_mm512_add_epi16(m, _mm512_set1_epi16(3)), table));
  m = _mm512_mask_add_epi16(m, passed, m, _mm512_set1_epi16(4));
  passed = _mm512_cmpgt_epi16_mask(a, _mm512_permutexvar_epi16(_mm512_add_epi16(m, one), table));
  m = _mm512_mask_add_epi16(m, passed, m, two);
  passed = _mm512_cmpgt_epi16_mask(a, _mm512_permutexvar_epi16(m, table));
  m = _mm512_mask_add_epi16(m, passed, m, one);
  m = _mm512_and_si512(m, _mm512_set1_epi16(7));
  const __mmask32 nonzero = _mm512_test_epi16_mask(m, m);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(words, 12), _mm512_set1_epi16(8));
  m = _mm512_or_si512(m, _mm512_maskz_mov_epi16(nonzero, sign));
  const __m512i pairs = _mm512_or_si512(m, _mm512_srli_epi32(m, 12));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(pairs));
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) void encode_avx512(const Bf16* x,
                                                                        std::int32_t block,
                                                                        std::int64_t blocks,
                                                                        const float* values,
                                                                        std::uint8_t* codes) {
  if (block % 32 == 0) {
    for (std::int64_t j = 0; j < blocks; ++j) {
      const __m512i table = _mm512_castsi128_si512(thresholds(values[j]));
      for (std::int64_t at = j * block; at < (j + 1) * block; at += 32) {
        store_codes32(x + at, table, _mm512_setzero_si512(), codes + at / 2);
      }
    }
    return;
  }
  const __m512i base =
      _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(8), 1);  // the second block's
  std::int64_t j = 0;
  for (; j + 2 <= blocks; j += 2) {
    const __m256i tables = _mm256_inserti128_si256(_mm256_castsi128_si256(thresholds(values[j])),
                                                   thresholds(values[j + 1]), 1);
    store_codes32(x + j * 16, _mm512_castsi256_si512(tables), base, codes + j * 8);
  }
  if (j < blocks) encode_avx2(x + j * 16, 16, 1, values + j, codes + j * 8);
}

/// The largest of sixteen magnitudes' bits. The horizontal minimum is an instruction.
__attribute__((target("avx2"))) inline __m128i fold16(const Bf16* x) {
  const __m256i a = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)),
                                     _mm256_set1_epi16(0x7FFF));
  return _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}

__attribute__((target("avx2"))) std::uint16_t amaxes_avx2(const Bf16* x, std::int64_t blocks,
                                                          std::int32_t block,
                                                          std::uint16_t* amaxes) {
  __m128i most = _mm_setzero_si128();
  const __m128i ones = _mm_set1_epi16(-1);
  for (std::int64_t j = 0; j < blocks; ++j) {
    __m128i here = fold16(x + j * block);
    for (std::int32_t i = 16; i < block; i += 16) {
      here = _mm_max_epu16(here, fold16(x + j * block + i));
    }
    most = _mm_max_epu16(most, here);
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(here, ones));
    amaxes[j] = static_cast<std::uint16_t>(~_mm_extract_epi16(least, 0));
  }
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(most, ones));
  return static_cast<std::uint16_t>(~_mm_extract_epi16(least, 0));
}

bool knows(const Quantizer& rule) {
  if (rule.is_wide() || rule.code_rule != CodeRule::kExact || rule.tie != Tie::kEven ||
      rule.sign_of_zero != SignOfZero::kDropped || (rule.block != 16 && rule.block % 32 != 0)) {
    return false;
  }
  return rule.is_mx() || (rule.global_is_power_of_two && rule.global != GlobalScale::kNone &&
                          rule.scale_rule == ScaleRule::kExact);
}

void count(const std::uint16_t* amaxes, std::int64_t blocks, const std::uint8_t* bytes,
           const Quantizer& rule, std::int32_t n, QuantizeCounts& counts) {
  counts[kBlocks] += blocks;
  std::int64_t zero = 0;
  std::int64_t without_scale = 0;
  for (std::int64_t j = 0; j < blocks; ++j) {
    zero += amaxes[j] == 0;
    without_scale += bytes[j] == 0;
  }
  counts[kZeroBlocks] += zero;
  if (rule.is_mx()) return;
  counts[kUnderflowBlocks] += without_scale - zero;
  if (rule.global != GlobalScale::kStatic) return;
  for (std::int64_t j = 0; j < blocks; ++j) {
    counts[kSaturatedBlocks] += is_saturated(to_float(static_cast<Bf16>(amaxes[j])), n);
  }
}

}  // namespace

Simd simd_for(const Quantizer& rule) {
  if (!knows(rule) || best_isa() == Isa::kPortable) return Simd::kNone;
  return best_isa() == Isa::kAvx512 ? Simd::kAvx512 : Simd::kAvx2;
}

std::uint16_t block_amaxes(Simd, const Bf16* x, std::int64_t cols, std::int32_t block,
                           std::uint16_t* amaxes) {
  return amaxes_avx2(x, cols / block, block, amaxes);
}

void encode_row(Simd simd, const EncodeRow<Bf16>& row, const Quantizer& rule,
                const std::uint16_t* amaxes, QuantizeCounts& counts) {
  const std::int32_t n = row.global.exponent;
  const std::int64_t blocks = row.cols / rule.block;
  Scales scales;
  for (std::int64_t j = 0; j < blocks; j += kChunk) {
    const std::int64_t some = std::min(kChunk, blocks - j);
    const Bf16* x = row.x + j * rule.block;
    make_scales(rule, n, x, amaxes + j, some, scales);
    std::memcpy(row.scales + j, scales.bytes.data(), static_cast<std::size_t>(some));
    std::uint8_t* codes = row.codes + j * rule.block / 2;
    if (simd == Simd::kAvx512) {
      encode_avx512(x, rule.block, some, scales.values.data(), codes);
    } else {
      encode_avx2(x, rule.block, some, scales.values.data(), codes);
    }
    count(amaxes + j, some, scales.bytes.data(), rule, n, counts);
  }
}

#else

Simd simd_for(const Quantizer&) { return Simd::kNone; }
std::uint16_t block_amaxes(Simd, const Bf16*, std::int64_t, std::int32_t, std::uint16_t*) {
  return 0;
}
void encode_row(Simd, const EncodeRow<Bf16>&, const Quantizer&, const std::uint16_t*,
                QuantizeCounts&) {}

#endif

}  // namespace lockstep::kernels
