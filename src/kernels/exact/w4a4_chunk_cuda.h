/// For .cu files alone: a chunk of 64 columns of a tile of 16 outputs times up to eight items.
///
/// A product takes 16 outputs, two blocks of 16 columns, and 8 columns of activations. Of up to two
/// items those of block i of a chunk stand in columns 2 i and 2 i + 1, and zeros elsewhere: two
/// products into one accumulator give each lane the dots of one block alone. Of four items each
/// product has the dots of two blocks, and none waits for another.
#pragma once

#include "kernels/exact/w4a4_work_cuda.h"

namespace lockstep::kernels::w4a4_device {

/// What the loop keeps in registers. They come from shared memory, from places that differ between
/// lanes: constants that the compiler knows, and what is one for a warp, it would move anew to a
/// register before every use.
struct Constants {
  std::uint32_t raised;
  std::uint32_t lowered;
  std::uint32_t mine[kBlocksInChunk];  // masks: of the block whose activations the lane brings
  std::uint32_t a_at;                  // where these begin in Operand::a[part][first item]
};

/// How a unit's items are multiplied, by their number: up to two at once, kFours = 0, or four.
constexpr int sums_of(int fours) { return fours == 0 ? 1 : fours; }
constexpr int values_of(int fours) { return fours == 0 ? 1 : 2 * fours; }
constexpr int rows_taken(int items) { return items <= 2 ? 2 : (items + 3) / 4 * 4; }

/// A segment of a unit's items, unpacked. Everything of a chunk lies 64 bytes behind what the chunk
/// before has there.
template <int kParts>
struct Operand {
  alignas(16) std::uint8_t a[kParts][kItems][kRowBytes];  // signed bytes of each item
  // Of a block of 16 columns and two items: what the product starts with, -64 times the sum of
  // each item's codes, and the scales, those of two pairs beside each other.
  alignas(16) int4 start[kParts][kItems / 2][kSegmentBlocks];
  alignas(16) int2 scale[kParts][kItems / 4][kSegmentBlocks][2];

  __device__ const Operand& from(int chunk) const {
    return *reinterpret_cast<const Operand*>(reinterpret_cast<const std::uint8_t*>(this) +
                                             chunk * kChunk);
  }
};

template <int kFours, typename Shared>
__device__ inline Constants constants_of(const Shared& s, int lane) {
  Constants c{};
  c.raised = *const_cast<volatile const unsigned*>(&s.tables[lane / 8].x);
  c.lowered = *const_cast<volatile const unsigned*>(&s.tables[lane / 8].y);
#pragma unroll
  for (int i = 0; i < (kFours == 0 ? kBlocksInChunk : 2); ++i) {
    c.mine[i] = *const_cast<volatile const std::uint32_t*>(
        kFours == 0 ? &s.mine[lane / 8][i] : &s.mine_of_two[lane / 16][i]);
  }
  c.a_at = static_cast<std::uint32_t>(
      kFours == 0 ? lane / 4 % 2 * kRowBytes + lane / 8 * 16 + lane % 4 * 4
                  : lane / 4 % 4 * kRowBytes + lane / 16 * 32 + lane % 4 * 4);
  return c;
}

using UnpackedChunk = std::uint32_t[kBlocksInChunk][2];

/// Of up to two items: a product for each half of a chunk, into one accumulator; a lane has block
/// t.
template <int kParts>
__device__ inline void multiply_two(std::int64_t (&acc)[4], const Operand<kParts>& s,
                                    const UnpackedChunk& w, std::uint32_t scales, int at,
                                    const Constants& c) {
  const unsigned t = threadIdx.x % 4;
  const std::int32_t low_scale = scale_units(scales << 20);
  const std::int32_t high_scale = scale_units(scales << 12);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const std::uint32_t a =
        *reinterpret_cast<const std::uint32_t*>(s.a[part][0] + c.a_at + at * kChunk);
    std::int32_t d[4];
    multiply_blocks(d, w[0], w[1], a & c.mine[0], a & c.mine[1],
                    s.start[part][0][at * kBlocksInChunk + t]);
    multiply_blocks(d, w[2], w[3], a & c.mine[2], a & c.mine[3], int4{d[0], d[1], d[2], d[3]});
    const int2 scale = s.scale[part][0][at * kBlocksInChunk + t][0];
    acc[0] += std::int64_t{d[0] * low_scale} * scale.x;
    acc[1] += std::int64_t{d[1] * low_scale} * scale.y;
    acc[2] += std::int64_t{d[2] * high_scale} * scale.x;
    acc[3] += std::int64_t{d[3] * high_scale} * scale.y;
  }
}

/// Of four items each: a product for blocks 0 and 2 and one for 1 and 3, which do not wait for each
/// other; a lane has block t / 2 * 2 of the one and the next of the other, and of each two items.
template <int kParts, int kFours>
__device__ inline void multiply_fours(std::int64_t (&acc)[kFours][4], const Operand<kParts>& s,
                                      const UnpackedChunk& w, std::uint32_t scales, int at,
                                      const Constants& c) {
  const unsigned t = threadIdx.x % 4;
  const unsigned block = at * kBlocksInChunk + t / 2 * 2;
  const std::int32_t w_scale[2][2] = {{scale_units(scales << 20), scale_units(scales << 12)},
                                      {scale_units(scales << 4), scale_units(scales >> 4)}};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    std::int32_t d[kFours][2][4];
#pragma unroll
    for (int i = 0; i < 2 * kFours; ++i) {
      const int four = i / 2;
      const int next = i % 2;
      const std::uint32_t a = *reinterpret_cast<const std::uint32_t*>(s.a[part][4 * four] + c.a_at +
                                                                      at * kChunk + next * 16);
      multiply_blocks(d[four][next], w[next], w[2 + next], a & c.mine[0], a & c.mine[1],
                      s.start[part][2 * four + t % 2][block + next]);
    }
#pragma unroll
    for (int i = 0; i < 2 * kFours; ++i) {
      const int four = i / 2;
      const int next = i % 2;
      const auto& sum = d[four][next];
      const int2 scale = s.scale[part][four][block + next][t % 2];
      acc[four][0] += std::int64_t{sum[0] * w_scale[next][0]} * scale.x;
      acc[four][1] += std::int64_t{sum[1] * w_scale[next][0]} * scale.y;
      acc[four][2] += std::int64_t{sum[2] * w_scale[next][1]} * scale.x;
      acc[four][3] += std::int64_t{sum[3] * w_scale[next][1]} * scale.y;
    }
  }
}

/// One chunk of a tile times the items. unpacked() is called as soon as codes have been read.
template <int kParts, int kFours, typename Then>
__device__ inline void multiply_chunk(std::int64_t (&acc)[sums_of(kFours)][4],
                                      const Operand<kParts>& s, const uint4& codes,
                                      std::uint32_t scales, int at, const Constants& c,
                                      const Then& unpacked) {
  UnpackedChunk w;
  const std::uint32_t words[kBlocksInChunk] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < kBlocksInChunk; ++i) {
    const std::uint32_t flipped = words[i] ^ 0x88888888u;
    w[i][0] = raised_codes(c.raised, c.lowered, words[i], flipped);
    w[i][1] = raised_codes(c.raised, c.lowered, words[i] >> 16, flipped >> 16);
  }
  unpacked();
  if constexpr (kFours == 0) {
    multiply_two<kParts>(acc[0], s, w, scales, at, c);
  } else {
    multiply_fours<kParts, kFours>(acc, s, w, scales, at, c);
  }
}

/// A lane's values of a tile: of output g + 8 (t / 2) its row_of() items.
template <int kFours>
__device__ inline std::int64_t value_of(const std::int64_t (&acc)[sums_of(kFours)][4], int i,
                                        int t) {
  if constexpr (kFours == 0) {
    return sum_over_quad(acc[0], t);
  } else {
    const auto& sums = acc[i / 2];
    const bool high = t >= 2;
    return (high ? sums[2 + i % 2] : sums[i % 2]) +
           __shfl_xor_sync(0xFFFFFFFFu, high ? sums[i % 2] : sums[2 + i % 2], 2);
  }
}
template <int kFours>
__device__ inline int row_of(int i, int lane) {
  return kFours == 0 ? lane % 2 : i / 2 * 4 + lane % 2 * 2 + i % 2;
}

}  // namespace lockstep::kernels::w4a4_device
