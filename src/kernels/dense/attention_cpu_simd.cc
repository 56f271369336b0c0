#include "kernels/dense/attention_rows.h"

#if defined(__x86_64__)
// The headers of GCC 12 start some intrinsics from a register that they leave unset on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace lockstep::kernels {
namespace {

// ----------------------------------------------------------------------------------------- AVX2

/// Eight bytes of codes under one scale: even channels to out, odd ones to out + 16.
__attribute__((target("avx2,fma"), always_inline)) inline void read_codes_avx2(
    __m256 magnitudes, const std::uint8_t* codes, float scale, float* out) {
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i even =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m256i odd = _mm256_srli_epi32(even, 4);
  for (int i = 0; i < 2; ++i) {
    const __m256i code = i == 0 ? even : odd;
    const __m256 size = _mm256_permutevar8x32_ps(magnitudes, code);  // by the low three bits
    const __m256i negative = _mm256_and_si256(_mm256_slli_epi32(code, 28), sign);
    const __m256 value = _mm256_xor_ps(size, _mm256_castsi256_ps(negative));
    _mm256_storeu_ps(out + 16 * i, _mm256_mul_ps(value, _mm256_set1_ps(scale)));
  }
}

__attribute__((target("avx2,fma"))) void read_avx2(const KvBlock& block) {
  const bool plain = block.kv->rule.element == Element::kBf16;
  if (plain || block.kv->rule.is_wide() || block.kv->rule.block != 16) return read_block(block);
  float table[8];
  for (int code = 0; code < 8; ++code) table[code] = block.tables->pairs[code][0];
  const __m256 magnitudes = _mm256_loadu_ps(table);
  const std::int64_t codes_at = block.head * block.dim / 2;
  const std::int64_t scales_at = block.heads * block.dim / 2 + block.head * block.dim / 16;
  RowCursor cursor(block);
  for (std::int32_t j = 0; j < block.count; ++j) {
    if (j > 0) cursor.next();
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(cursor.row());
    float* out = block.out + j * block.stride;
    std::int64_t c = 0;
    for (; c + 32 <= block.dim; c += 32) {
      for (std::int64_t half = 0; half < 2; ++half) {
        const float scale = block.tables->scales[bytes[scales_at + c / 16 + half]];
        read_codes_avx2(magnitudes, bytes + codes_at + c / 2 + 8 * half, scale, out + c + 8 * half);
      }
    }
    if (c < block.dim) read_codes(block, cursor.row(), c, out);
  }
}

__attribute__((target("avx2,fma"), always_inline)) inline float score_avx2(const float* q,
                                                                           const float* key,
                                                                           std::int64_t stride) {
  __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
  for (std::int64_t c = 0; c < stride; c += 16) {
    low = _mm256_fmadd_ps(_mm256_loadu_ps(q + c), _mm256_loadu_ps(key + c), low);
    high = _mm256_fmadd_ps(_mm256_loadu_ps(q + c + 8), _mm256_loadu_ps(key + c + 8), high);
  }
  low = _mm256_add_ps(low, high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

__attribute__((target("avx2,fma"), always_inline)) inline void add_values_avx2(
    const HeadBlock& block, const float* p, float shrink, std::int64_t c, float* sums) {
  __m256 chain[4][2];
  for (auto& vectors : chain) vectors[0] = vectors[1] = _mm256_setzero_ps();
  for (std::int32_t j = 0; j < kKeyBlock; j += 4) {
    for (int r = 0; r < 4; ++r) {
      if (j + r >= block.count) break;
      const float* value = block.values + (j + r) * block.stride + c;
      const __m256 weight = _mm256_set1_ps(p[j + r]);
      chain[r][0] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(value), chain[r][0]);
      chain[r][1] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(value + 8), chain[r][1]);
    }
  }
  for (int i = 0; i < 2; ++i) {
    const __m256 added = _mm256_add_ps(_mm256_add_ps(chain[0][i], chain[1][i]),
                                       _mm256_add_ps(chain[2][i], chain[3][i]));
    float* sum = sums + c + 8 * i;
    const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(sum), _mm256_set1_ps(shrink));
    _mm256_storeu_ps(sum, _mm256_add_ps(old, added));
  }
}

__attribute__((target("avx2,fma"))) void take_avx2(const HeadBlock& block, HeadState& head) {
  alignas(64) float p[kKeyBlock] = {};
  for (std::int32_t j = 0; j < block.count; ++j) {
    p[j] = score_avx2(head.q, block.keys + j * block.stride, block.stride);
  }
  const float shrink = softmax_block(block, head, p);
  for (std::int64_t c = 0; c < block.stride; c += 16) {
    add_values_avx2(block, p, shrink, c, head.sums);
  }
}

// ------------------------------------------------------------------------------------- AVX-512

/// Two blocks of 16 codes: values by a table in a register, whose index is the low four bits of a
/// lane, times their scales.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline void
read_codes_avx512(__m512 values, const std::uint8_t* codes, float first, float second, float* out) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m512i even = _mm512_cvtepu8_epi32(bytes);
  const __m512i odd = _mm512_srli_epi32(even, 4);
  const __m512 scale = _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(first), _mm512_set1_ps(second));
  _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_permutexvar_ps(even, values), scale));
  _mm512_storeu_ps(out + 16, _mm512_mul_ps(_mm512_permutexvar_ps(odd, values), scale));
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline void
read_bf16_avx512(const std::byte* from, float* out) {
  const __m512i words = _mm512_loadu_si512(from);
  const __m512i odd = _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
  _mm512_storeu_ps(out, _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
  _mm512_storeu_ps(out + 16, _mm512_castsi512_ps(odd));
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
read_avx512(const KvBlock& block) {
  const bool plain = block.kv->rule.element == Element::kBf16;
  if (!plain && (block.kv->rule.is_wide() || block.kv->rule.block != 16)) return read_block(block);
  alignas(64) float table[16];
  for (int code = 0; code < 16; ++code) table[code] = block.tables->pairs[code][0];
  const __m512 values = _mm512_load_ps(table);
  const float* scale_of = block.tables->scales;
  const std::int64_t codes_at = block.head * block.dim / 2;
  const std::int64_t scales_at = block.heads * block.dim / 2 + block.head * block.dim / 16;
  RowCursor cursor(block);
  for (std::int32_t j = 0; j < block.count; ++j) {
    if (j > 0) cursor.next();
    const std::byte* row = cursor.row();
    float* out = block.out + j * block.stride;
    std::int64_t c = 0;
    if (plain) {
      for (; c + 32 <= block.dim; c += 32) {
        read_bf16_avx512(row + (block.head * block.dim + c) * 2, out + c);
      }
      if (c < block.dim) read_bf16(block, row, c, out);
      continue;
    }
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(row);
    for (; c + 32 <= block.dim; c += 32) {
      const std::uint8_t* scales = bytes + scales_at + c / 16;
      read_codes_avx512(values, bytes + codes_at + c / 2, scale_of[scales[0]], scale_of[scales[1]],
                        out + c);
    }
    if (c < block.dim) read_codes(block, row, c, out);
  }
}

/// The sums of the lanes of 16 vectors, as sum_of_lanes() adds them: a transpose by halves.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline __m512
sums_of_lanes_avx512(__m512 (&v)[16]) {
  // After each step a vector holds the partial sums of twice as many keys.
  for (int i = 0; i < 8; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44);
    const __m512 high = _mm512_shuffle_f32x4(v[i], v[i + 8], 0xEE);
    v[i] = _mm512_add_ps(low, high);  // [key i: 0..7 | key i + 8: 0..7]
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xDD);
    v[i] = _mm512_add_ps(low, high);  // [i: 0..3 | i + 8 | i + 4 | i + 12]
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 low = _mm512_shuffle_ps(v[i], v[i + 2], 0x44);
    const __m512 high = _mm512_shuffle_ps(v[i], v[i + 2], 0xEE);
    v[i] = _mm512_add_ps(low, high);  // in each quarter [i: 0, 1 | i + 2: 0, 1]
  }
  const __m512 low = _mm512_shuffle_ps(v[0], v[1], 0x88);
  const __m512 high = _mm512_shuffle_ps(v[0], v[1], 0xDD);
  // In each quarter the keys q, q + 2, q + 1, q + 3, and quarters for q = 0, 8, 4, 12.
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_ps(order, _mm512_add_ps(low, high));
}

/// kVectors: stride / 16, or 0 for any.
template <int kVectors>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline void
scores_avx512(const HeadBlock& block, const float* q, float* p) {
  const std::int64_t stride = kVectors > 0 ? 16 * kVectors : block.stride;
  for (std::int32_t first = 0; first < block.count; first += 16) {
    // Keys past the block's end are whatever lies there; their scores are not used.
    const float* keys = block.keys + first * stride;
    __m512 lanes[16];
    for (auto& lane : lanes) lane = _mm512_setzero_ps();
    for (std::int64_t c = 0; c < stride; c += 16) {
      const __m512 query = _mm512_loadu_ps(q + c);
      for (int j = 0; j < 16; ++j) {
        lanes[j] = _mm512_fmadd_ps(query, _mm512_loadu_ps(keys + j * stride + c), lanes[j]);
      }
    }
    _mm512_storeu_ps(p + first, sums_of_lanes_avx512(lanes));
  }
}

template <int kVectors>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline void
add_values_avx512(const HeadBlock& block, const float* p, float shrink, std::int64_t c,
                  float* sums) {
  __m512 chain[4][kVectors];
  for (auto& vectors : chain) {
    for (auto& v : vectors) v = _mm512_setzero_ps();
  }
  const auto take = [&](std::int32_t j, int r)
      __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl"))) {
    const __m512 weight = _mm512_set1_ps(p[j]);
    for (int i = 0; i < kVectors; ++i) {
      const __m512 value = _mm512_loadu_ps(block.values + j * block.stride + c + 16 * i);
      chain[r][i] = _mm512_fmadd_ps(weight, value, chain[r][i]);
    }
  };
  std::int32_t j = 0;
  for (; j + 4 <= block.count; j += 4) {
    for (int r = 0; r < 4; ++r) take(j + r, r);
  }
  if (j < block.count) take(j, 0);
  if (j + 1 < block.count) take(j + 1, 1);
  if (j + 2 < block.count) take(j + 2, 2);
  for (int i = 0; i < kVectors; ++i) {
    const __m512 added = _mm512_add_ps(_mm512_add_ps(chain[0][i], chain[1][i]),
                                       _mm512_add_ps(chain[2][i], chain[3][i]));
    float* sum = sums + c + 16 * i;
    const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(shrink));
    _mm512_storeu_ps(sum, _mm512_add_ps(old, added));
  }
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
take_avx512(const HeadBlock& block, HeadState& head) {
  alignas(64) float p[kKeyBlock] = {};
  switch (block.stride) {
    case 16: scores_avx512<1>(block, head.q, p); break;
    case 32: scores_avx512<2>(block, head.q, p); break;
    case 64: scores_avx512<4>(block, head.q, p); break;
    case 128: scores_avx512<8>(block, head.q, p); break;
    default: scores_avx512<0>(block, head.q, p); break;
  }
  const float shrink = softmax_block(block, head, p);
  std::int64_t c = 0;
  for (; c + 32 <= block.stride; c += 32) add_values_avx512<2>(block, p, shrink, c, head.sums);
  if (c < block.stride) add_values_avx512<1>(block, p, shrink, c, head.sums);
}

__attribute__((target("avx2,fma"))) void load_avx2(const Bf16* q, std::int64_t dim, float* out) {
  load_query(q, dim, out);
}
__attribute__((target("avx2,fma"))) void store_avx2(const HeadState& head, std::int64_t dim,
                                                    Bf16* out) {
  store_head(head, dim, out);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
load_avx512(const Bf16* q, std::int64_t dim, float* out) {
  load_query(q, dim, out);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
store_avx512(const HeadState& head, std::int64_t dim, Bf16* out) {
  store_head(head, dim, out);
}

}  // namespace

AttentionOps attention_avx512() { return {load_avx512, store_avx512, read_avx512, take_avx512}; }
AttentionOps attention_avx2() { return {load_avx2, store_avx2, read_avx2, take_avx2}; }

}  // namespace lockstep::kernels

#else

namespace lockstep::kernels {

AttentionOps attention_avx512() { return attention_portable(); }
AttentionOps attention_avx2() { return attention_portable(); }

}  // namespace lockstep::kernels

#endif
