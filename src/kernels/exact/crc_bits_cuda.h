/// Checksums as products of bits, for .cu files: 16 rows of 256 bits, codes as lanes have them,
/// times what each bit is worth at its place in the row (gf2.h). Tensor cores count the bits that
/// both have; their parities are the sum's.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

/// d = c + a b. Lane 4 g + q: a has bits of rows g, g + 8, g, g + 8; b of column g; d of rows g, g,
/// g + 8, g + 8 columns 2 q, 2 q + 1.
__device__ inline void count_common(std::int32_t (&d)[4], const std::uint32_t (&a)[4],
                                    std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The same over 128 bits.
__device__ inline void count_common(std::int32_t (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                    std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

/// The last bytes of four counts.
__device__ inline std::uint32_t last_bytes(std::int32_t a, std::int32_t b, std::int32_t c,
                                           std::int32_t d) {
  const auto ab = __byte_perm(static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(b), 0x0040);
  const auto cd = __byte_perm(static_cast<std::uint32_t>(c), static_cast<std::uint32_t>(d), 0x0040);
  return __byte_perm(ab, cd, 0x5410);
}

/// Of counts for columns 8 t + 2 q and the next one the parities, at bits 8 t: of rows g and g + 8.
__device__ inline void parities(const std::int32_t (&d)[4][4], std::uint32_t& low,
                                std::uint32_t& high) {
  constexpr std::uint32_t kOnes = 0x01010101u;
  const std::uint32_t first[2] = {last_bytes(d[0][0], d[1][0], d[2][0], d[3][0]),
                                  last_bytes(d[0][2], d[1][2], d[2][2], d[3][2])};
  const std::uint32_t second[2] = {last_bytes(d[0][1], d[1][1], d[2][1], d[3][1]),
                                   last_bytes(d[0][3], d[1][3], d[2][3], d[3][3])};
  low = (first[0] & kOnes) | (second[0] & kOnes) << 1;
  high = (first[1] & kOnes) | (second[1] & kOnes) << 1;
}

/// Four words whose bits lanes 4 g .. 4 g + 3 have in turn: lane 4 g + q gets word q.
__device__ inline std::uint32_t of_lane(const std::uint32_t (&words)[4]) {
  const int quad = static_cast<int>(threadIdx.x) % 4;
  const bool odd = (quad & 1) != 0, upper = (quad & 2) != 0;
  std::uint32_t kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t even = words[2 * i] << 2 * quad, other = words[2 * i + 1] << 2 * quad;
    kept[i] = (odd ? other : even) | __shfl_xor_sync(0xFFFFFFFFu, odd ? even : other, 1);
  }
  return (upper ? kept[1] : kept[0]) | __shfl_xor_sync(0xFFFFFFFFu, upper ? kept[0] : kept[1], 2);
}

/// Blocks of threads that make a table, an entry or so a thread.
inline constexpr int kTableThreads = 64;
inline unsigned int table_blocks(std::int64_t threads) {
  return static_cast<unsigned int>((threads + kTableThreads - 1) / kTableThreads);
}

}  // namespace lockstep::kernels
