/// Guided rounding in 16-bit words: the grid V[i] * scale is eight ascending BF16 numbers, so the
/// bracket is a binary search of three shuffles, and what comes out is a fourth.
#include "kernels/exact/guide_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
// GCC 12 takes its own header's undefined operands for a mistake.
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace lockstep::kernels {

#if defined(__x86_64__)
namespace {

/// Two groups' tables: words 0 to 7 are the first group's, 8 to 15 the second's.
struct Tables {
  __m512i grid;     // V[i] * scale
  __m512i nearest;  // what a must exceed for the upper end to be nearest even
};

[[gnu::target("avx2")]] inline __m128i scaled_words(__m256 values, __m256i add, float scale) {
  const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(values, _mm256_set1_ps(scale)));
  const __m256i words = _mm256_add_epi32(_mm256_srli_epi32(bits, 16), add);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

[[gnu::target("avx512f,avx512bw,avx512vl")]] inline Tables tables_of(float first, float second) {
  const __m256 grid = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 middles = _mm256_setr_ps(0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 5.0f);
  const __m256i none = _mm256_setzero_si256();
  // From an odd lower end a tie goes up: equality must exceed, so the threshold is one less.
  const __m256i tie = _mm256_setr_epi32(0, -1, 0, -1, 0, -1, 0, 0);
  const __m256i low = _mm256_inserti128_si256(
      _mm256_castsi128_si256(scaled_words(grid, none, first)), scaled_words(grid, none, second), 1);
  const __m256i high =
      _mm256_inserti128_si256(_mm256_castsi128_si256(scaled_words(middles, tie, first)),
                              scaled_words(middles, tie, second), 1);
  return {_mm512_castsi256_si512(low), _mm512_castsi256_si512(high)};
}

/// Nibbles of 16 bytes as 32 words.
[[gnu::target("avx512f,avx512bw,avx512vl")]] inline __m512i nibbles(const std::uint8_t* plane) {
  const __m512i pairs =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(plane)));
  const __m512i words = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
  return _mm512_and_si512(words, _mm512_set1_epi16(15));
}

/// 32 elements; `first` and `second` are the scales of their halves. Returns the moved ones.
template <Choice kChoice>
[[gnu::target("avx512f,avx512bw,avx512vl")]] inline std::uint32_t guide32(const Bf16* x, Bf16* out,
                                                                          const std::uint8_t* plane,
                                                                          float first,
                                                                          float second) {
  const Tables tables = tables_of(first, second);
  const __m512i base = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(8), 1);
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i words = _mm512_loadu_si512(x);
  const __m512i a = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
  // The largest i <= 6 with grid[i] <= a.
  __m512i m = base;
  __mmask32 passed = _mm512_cmpge_epi16_mask(
      a, _mm512_permutexvar_epi16(_mm512_add_epi16(m, _mm512_set1_epi16(4)), tables.grid));
  m = _mm512_mask_add_epi16(m, passed, m, _mm512_set1_epi16(4));
  passed = _mm512_cmpge_epi16_mask(
      a, _mm512_permutexvar_epi16(_mm512_add_epi16(m, _mm512_set1_epi16(2)), tables.grid));
  m = _mm512_mask_add_epi16(m, passed, m, _mm512_set1_epi16(2));
  passed =
      _mm512_cmpge_epi16_mask(a, _mm512_permutexvar_epi16(_mm512_add_epi16(m, one), tables.grid));
  m = _mm512_mask_add_epi16(m, passed, m, one);
  m = _mm512_min_epi16(m, _mm512_add_epi16(base, _mm512_set1_epi16(6)));

  const __mmask32 near_up = _mm512_cmpgt_epi16_mask(a, _mm512_permutexvar_epi16(m, tables.nearest));
  __m512i sign = _mm512_and_si512(words, _mm512_set1_epi16(static_cast<short>(0x8000)));
  __m512i k = m;
  std::uint32_t moved = 0;
  if constexpr (kChoice == Choice::kNearest) {
    k = _mm512_mask_add_epi16(m, near_up, m, one);
  } else if constexpr (kChoice == Choice::kBit) {
    std::uint32_t bits;
    std::memcpy(&bits, plane, 4);
    const __mmask32 up = _mm512_test_epi16_mask(m, one) ^ bits;
    k = _mm512_mask_add_epi16(m, up, m, one);
    moved = up ^ near_up;
  } else {
    const __m512i code = nibbles(plane);
    const __m512i magnitude = _mm512_or_si512(_mm512_and_si512(code, _mm512_set1_epi16(7)), base);
    const __m512i code_sign = _mm512_slli_epi16(_mm512_srli_epi16(code, 3), 15);
    const __mmask32 same_side = _mm512_cmpeq_epi16_mask(code_sign, sign);
    if constexpr (kChoice == Choice::kCodeGuided) {
      const __mmask32 up = _mm512_mask_cmpgt_epi16_mask(same_side, magnitude, m);
      k = _mm512_mask_add_epi16(m, up, m, one);
      moved = up ^ near_up;
    } else {
      k = magnitude;
      const __m512i near = _mm512_mask_add_epi16(m, near_up, m, one);
      const __mmask32 zero = _mm512_cmpeq_epi16_mask(k, base);
      moved = _mm512_cmpneq_epi16_mask(k, near) | ~(same_side | zero);
      sign = code_sign;
    }
  }
  const __m512i value = _mm512_permutexvar_epi16(k, tables.grid);
  const __mmask32 nonzero = _mm512_test_epi16_mask(value, value);
  _mm512_storeu_si512(out, _mm512_or_si512(value, _mm512_maskz_mov_epi16(nonzero, sign)));
  // Under scale 0 every code is 0.
  if (!(first > 0.0f)) moved &= 0xFFFF0000u;
  if (!(second > 0.0f)) moved &= 0x0000FFFFu;
  return moved;
}

constexpr std::int64_t plane_bytes(Choice choice) {
  return choice == Choice::kNearest ? 0 : choice == Choice::kBit ? 2 : 8;
}

template <Choice kChoice>
[[gnu::target("avx512f,avx512bw,avx512vl,popcnt")]] std::int64_t groups_avx512(
    const GuideElements& args) {
  std::int64_t moved = 0;
  std::int64_t g = 0;
  for (; g + 2 <= args.groups; g += 2) {
    moved += __builtin_popcount(guide32<kChoice>(args.x + g * 16, args.out + g * 16,
                                                 args.plane + g * plane_bytes(kChoice),
                                                 args.scales[g], args.scales[g + 1]));
  }
  if (g < args.groups) {
    GuideElements last = args;
    last.x += g * 16;
    last.out += g * 16;
    last.scales += g;
    last.plane += g * plane_bytes(kChoice);
    last.groups = 1;
    moved += guide_elements_portable(last);
  }
  return moved;
}

// ---- AVX2: the same with byte shuffles, sixteen elements at a time ----

/// Word i of a table is fetched by the bytes 2i and 2i + 1.
[[gnu::target("avx2")]] inline __m256i fetch(__m256i table, __m256i index) {
  const __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(index, _mm256_set1_epi16(0x0202)),
                                         _mm256_set1_epi16(0x0100));
  return _mm256_shuffle_epi8(table, bytes);
}

/// m with `step` added where a has reached grid[m + step].
[[gnu::target("avx2")]] inline __m256i climb(__m256i a, __m256i grid, __m256i m, short step) {
  const __m256i higher = _mm256_add_epi16(m, _mm256_set1_epi16(step));
  const __m256i below = _mm256_cmpgt_epi16(fetch(grid, higher), a);
  return _mm256_blendv_epi8(higher, m, below);
}

/// The recorded bits or nibbles of sixteen elements as words.
template <Choice kChoice>
[[gnu::target("avx2")]] inline __m256i recorded(const std::uint8_t* plane) {
  if constexpr (kChoice == Choice::kBit) {
    std::uint16_t bits;
    std::memcpy(&bits, plane, 2);
    const __m256i place = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096,
                                            8192, 16384, static_cast<short>(0x8000));
    const __m256i here = _mm256_and_si256(_mm256_set1_epi16(static_cast<short>(bits)), place);
    return _mm256_and_si256(_mm256_cmpeq_epi16(here, place), _mm256_set1_epi16(1));
  }
  const __m256i pairs =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(plane)));
  const __m256i words = _mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 12));
  return _mm256_and_si256(words, _mm256_set1_epi16(15));
}

/// What is chosen from the bracket {m, m + 1}: words of all ones where m + 1.
struct Chosen {
  __m256i code;   // 0 to 7
  __m256i sign;   // 0x8000 or 0
  __m256i moved;  // all ones where it is not the nearest
};

template <Choice kChoice>
[[gnu::target("avx2")]] inline Chosen choose16(__m256i m, __m256i near_up, __m256i sign,
                                               const std::uint8_t* plane) {
  if constexpr (kChoice == Choice::kNearest) {
    return {_mm256_sub_epi16(m, near_up), sign, _mm256_setzero_si256()};
  } else if constexpr (kChoice == Choice::kBit) {
    const __m256i other =
        _mm256_and_si256(_mm256_xor_si256(m, recorded<kChoice>(plane)), _mm256_set1_epi16(1));
    const __m256i up = _mm256_sub_epi16(_mm256_setzero_si256(), other);
    return {_mm256_sub_epi16(m, up), sign, _mm256_xor_si256(up, near_up)};
  } else {
    const __m256i code = recorded<kChoice>(plane);
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(7));
    const __m256i code_sign = _mm256_slli_epi16(_mm256_srli_epi16(code, 3), 15);
    const __m256i same_side = _mm256_cmpeq_epi16(code_sign, sign);
    if constexpr (kChoice == Choice::kCodeGuided) {
      const __m256i up = _mm256_and_si256(same_side, _mm256_cmpgt_epi16(magnitude, m));
      return {_mm256_sub_epi16(m, up), sign, _mm256_xor_si256(up, near_up)};
    } else {
      const __m256i zero = _mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256());
      const __m256i same =
          _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_sub_epi16(m, near_up)),
                           _mm256_or_si256(same_side, zero));
      return {magnitude, code_sign, _mm256_xor_si256(same, _mm256_set1_epi16(-1))};
    }
  }
}

template <Choice kChoice>
[[gnu::target("avx2")]] std::int64_t groups_avx2(const GuideElements& args) {
  const __m256 grid_values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 middles = _mm256_setr_ps(0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 5.0f);
  const __m256i tie = _mm256_setr_epi32(0, -1, 0, -1, 0, -1, 0, 0);  // see tables_of
  std::int64_t moved = 0;
  for (std::int64_t g = 0; g < args.groups; ++g) {
    const float scale = args.scales[g];
    const __m256i grid =
        _mm256_broadcastsi128_si256(scaled_words(grid_values, _mm256_setzero_si256(), scale));
    const __m256i nearest = _mm256_broadcastsi128_si256(scaled_words(middles, tie, scale));
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(args.x + g * 16));
    const __m256i a = _mm256_and_si256(words, _mm256_set1_epi16(0x7FFF));
    __m256i m = climb(a, grid, _mm256_setzero_si256(), 4);
    m = climb(a, grid, m, 2);
    m = climb(a, grid, m, 1);
    m = _mm256_min_epi16(m, _mm256_set1_epi16(6));
    const __m256i near_up = _mm256_cmpgt_epi16(a, fetch(nearest, m));
    const __m256i sign = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0x8000)));
    const Chosen chosen =
        choose16<kChoice>(m, near_up, sign, args.plane + g * plane_bytes(kChoice));
    const __m256i value = fetch(grid, chosen.code);
    const __m256i zero = _mm256_cmpeq_epi16(value, _mm256_setzero_si256());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(args.out + g * 16),
                        _mm256_or_si256(value, _mm256_andnot_si256(zero, chosen.sign)));
    if (scale > 0.0f) {  // else every code is 0
      const auto mask = static_cast<std::uint32_t>(_mm256_movemask_epi8(chosen.moved));
      moved += __builtin_popcount(mask) / 2;
    }
  }
  return moved;
}

std::int64_t guide_avx512(const GuideElements& args) {
  switch (args.choice) {
    case Choice::kNearest: return groups_avx512<Choice::kNearest>(args);
    case Choice::kBit: return groups_avx512<Choice::kBit>(args);
    case Choice::kCodeGuided: return groups_avx512<Choice::kCodeGuided>(args);
    case Choice::kCodeForced: return groups_avx512<Choice::kCodeForced>(args);
  }
  return 0;
}

std::int64_t guide_avx2(const GuideElements& args) {
  switch (args.choice) {
    case Choice::kNearest: return groups_avx2<Choice::kNearest>(args);
    case Choice::kBit: return groups_avx2<Choice::kBit>(args);
    case Choice::kCodeGuided: return groups_avx2<Choice::kCodeGuided>(args);
    case Choice::kCodeForced: return groups_avx2<Choice::kCodeForced>(args);
  }
  return 0;
}

}  // namespace

GuideKernel guide_elements(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return guide_avx512;
    case Isa::kAvx2: return guide_avx2;
    case Isa::kPortable: break;
  }
  return guide_elements_portable;
}

#else

GuideKernel guide_elements(Isa) { return guide_elements_portable; }

#endif

}  // namespace lockstep::kernels
