/// BF16 activations times NVFP4 weights on a CUDA device: the exact product's walk over the work
/// and its stream of weights, with BF16 tensor cores.
///
/// A weight's bits become BF16 by shifts, 2^-126 too small, and its scale, 2^119 too large, makes
/// it right but for 2^-7, exactly; so blocks may meet in one step of the tensor core, and a
/// register pairs the columns of two blocks, which lie in the same halves of two words. A warp adds
/// its range of K in order, and the four ranges are added in order: the same for every row,
/// whatever the batch.
#include <cuda.h>

#include "kernels/dense/w4a16_cuda.h"
#include "kernels/dense/wgmma_cuda.h"
#include "kernels/exact/w4a4_ring_cuda.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

using namespace w4a4_device;

// Eight lanes read two rows at once, 64 bytes of each.
constexpr int kXBytes = kSegment * 2 + 64;

struct Params16 {
  Params work;
  const Bf16* x;
  std::int64_t x_stride;
};

struct Shared16 {
  alignas(16) std::uint8_t ring[kWarps][kStages][kStageChunks * kChunkBytes];
  // For each chunk, pair of blocks (2 q, 2 q + 1) and lane t of a quad: four words, each column
  // 4 t + j of both blocks.
  alignas(16) std::uint8_t x[kItems][kXBytes];
  float sums[kSplits][kTiles][kItems][16];
  std::uint64_t arrived[kWarps][kStages];
  WeightStream stream[kWarps];
  Place found[2];
  Work work;
  std::int32_t from[kItems];
  std::int32_t to[kItems];
  float power[kItems][2];
};

__device__ uint2 load_four(const Bf16* x) {
  if ((reinterpret_cast<std::uintptr_t>(x) & 7u) == 0) return *reinterpret_cast<const uint2*>(x);
  return {bits_of(x[0]) | static_cast<std::uint32_t>(bits_of(x[1])) << 16,
          bits_of(x[2]) | static_cast<std::uint32_t>(bits_of(x[3])) << 16};
}

__device__ void unpack_x(const Params16& p, Shared16& s, int count, int segment) {
  const int blocks = min(kSegmentBlocks, p.work.blocks - segment * kSegmentBlocks);
  const int chunks = (blocks + kBlocksInChunk - 1) / kBlocksInChunk;
  for (int i = static_cast<int>(threadIdx.x); i < kItems * chunks * 8; i += kThreads) {
    const int place = i % 8;  // pair of blocks and lane
    const int chunk = i / 8 % chunks;
    const int row = i / 8 / chunks;
    const int block = chunk * kBlocksInChunk + place / 4 * 2;
    uint2 first{0, 0};
    uint2 second{0, 0};
    if (row < count) {
      const Bf16* x = p.x + s.from[row] * p.x_stride + segment * kSegment + place % 4 * 4;
      if (block < blocks) first = load_four(x + block * 16);
      if (block + 1 < blocks) second = load_four(x + (block + 1) * 16);
    }
    *reinterpret_cast<uint4*>(&s.x[row][chunk * 128 + place * 16]) = {
        __byte_perm(first.x, second.x, 0x5410), __byte_perm(first.x, second.x, 0x7632),
        __byte_perm(first.y, second.y, 0x5410), __byte_perm(first.y, second.y, 0x7632)};
  }
}

/// s8 2^119 of the byte whose bits stand from bit 20 on, where they mean s8 2^-120; in the upper
/// half.
__device__ std::uint32_t raised_scale(std::uint32_t bits) {
  return __float_as_uint(__uint_as_float(bits) * 0x1p120f * 0x1p119f);
}

/// Codes j of two words' halves, as BF16 times 2^-126.
__device__ std::uint32_t lowered_codes(std::uint32_t codes, int j) {
  const std::uint32_t at = codes << (12 - 4 * j);
  return (at & 0x80008000u) | (at >> 6 & 0x01C001C0u);
}

__device__ std::uint32_t multiply_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ void multiply_step(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                              std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ void multiply_chunk16(float (&d)[4], const Shared16& s, const std::uint8_t* chunk,
                                 int at, int lane) {
  const uint4 codes = *reinterpret_cast<const uint4*>(chunk + lane * 16);
  const std::uint32_t stored =
      *reinterpret_cast<const std::uint16_t*>(chunk + kChunkCodeBytes + lane * 2);
  // The lane's block, outputs g and g + 8; the quad has all four blocks.
  const std::uint32_t mine = __byte_perm(raised_scale(stored << 20 & 0x07F00000u),
                                         raised_scale(stored << 12 & 0x07F00000u), 0x7632);
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const std::uint32_t even = __shfl_sync(0xFFFFFFFFu, mine, 2 * q, 4);
    const std::uint32_t odd = __shfl_sync(0xFFFFFFFFu, mine, 2 * q + 1, 4);
    const std::uint32_t low_scale = __byte_perm(even, odd, 0x5410);
    const std::uint32_t high_scale = __byte_perm(even, odd, 0x7632);
    const std::uint32_t low = __byte_perm(words[2 * q], words[2 * q + 1], 0x5410);
    const std::uint32_t high = __byte_perm(words[2 * q], words[2 * q + 1], 0x7632);
    const uint4 x =
        *reinterpret_cast<const uint4*>(&s.x[lane / 4][at * 128 + q * 64 + lane % 4 * 16]);
    multiply_step(d, multiply_bf16(lowered_codes(low, 0), low_scale),
                  multiply_bf16(lowered_codes(high, 0), high_scale),
                  multiply_bf16(lowered_codes(low, 1), low_scale),
                  multiply_bf16(lowered_codes(high, 1), high_scale), x.x, x.y);
    multiply_step(d, multiply_bf16(lowered_codes(low, 2), low_scale),
                  multiply_bf16(lowered_codes(high, 2), high_scale),
                  multiply_bf16(lowered_codes(low, 3), low_scale),
                  multiply_bf16(lowered_codes(high, 3), high_scale), x.z, x.w);
  }
}

__device__ void run16(const Params16& p, Shared16& s, int count, int first, int end,
                      Reader& reader) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int split = warp % kSplits;
  const int tile = warp / kSplits;
  const int segments = (p.work.chunks + kSegmentChunks - 1) / kSegmentChunks;
  for (int group = first; group < end; ++group) {
    float d[4] = {};
    const bool has_tile = (group * kTiles + tile) * 16 < p.work.out_rows;
    for (int segment = 0; segment < segments; ++segment) {
      if (segments > 1 || group == first) {
        __syncthreads();
        unpack_x(p, s, count, segment);
        __syncthreads();
      }
      const Range range = range_of(p.work, segment, split);
      const int range_end = has_tile ? range.first + range.count : 0;
      for (int at = range.first; at < range_end; at += kStageChunks) {
        std::uint8_t* stage = s.ring[warp][reader.slot];
        std::uint64_t* arrived = &s.arrived[warp][reader.slot];
        wait_for_copy(arrived, reader.parity);
#pragma unroll
        for (int i = 0; i < kStageChunks; ++i) {
          if (at + i < range_end) multiply_chunk16(d, s, stage + i * kChunkBytes, at + i, lane);
        }
        __syncwarp();
        if (lane == 0) reader.fetch(p.work, s.stream[warp], stage, arrived);
        reader.step();
      }
    }
    if (group > first) __syncthreads();  // the sums of the last group have been read
    const int item = lane % 4 * 2;
    s.sums[split][tile][item][lane / 4] = d[0];
    s.sums[split][tile][item + 1][lane / 4] = d[1];
    s.sums[split][tile][item][lane / 4 + 8] = d[2];
    s.sums[split][tile][item + 1][lane / 4 + 8] = d[3];
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) / kGroup;
    const int column = static_cast<int>(threadIdx.x) % kGroup;
    if (row < count && group * kGroup + column < p.work.out_rows) {
      float sum = s.sums[0][column / 16][row][column % 16];
      for (int i = 1; i < kSplits; ++i) {
        sum = __fadd_rn(sum, s.sums[i][column / 16][row][column % 16]);
      }
      p.work.out[s.to[row] * p.work.out_stride + group * kGroup + column] =
          __fmul_rn(__fmul_rn(sum, s.power[row][0]), s.power[row][1]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 3) w4a16_kernel(const __grid_constant__ Params16 p) {
  extern __shared__ __align__(16) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<Shared16*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  cuda::take_turn();
  Reader reader;
  if (thread < 64) find_work(p.work, s.found, thread);
  __syncthreads();
  if (thread == 0) s.work = work_between(p.work, s.found[0], s.found[1]);
  __syncthreads();
  if (s.work.left == 0) return;
  if (thread % 32 == 0) {
    reader.start(p.work, s.work, s.stream[warp], s.ring[warp], s.arrived[warp], warp);
  }
  __syncthreads();
  while (true) {
    const Unit unit = s.work.unit;
    const int first = s.work.group;
    const int end = min(first + s.work.left, p.work.groups);
    if (thread < unit.count()) {  // read behind the barriers of run16()
      const std::int32_t item = unit.first + thread;
      s.from[thread] = p.work.from == nullptr ? item : p.work.from[item];
      s.to[thread] = p.work.to == nullptr ? item : p.work.to[item];
      const PowerPair power = power_pair(*reinterpret_cast<const std::int32_t*>(
                                             p.work.weights + unit.expert * p.work.expert_bytes) +
                                         7);
      s.power[thread][0] = power.first;
      s.power[thread][1] = power.second;
    }
    run16(p, s, unit.count(), first, end, reader);
    if (s.work.left == end - first) return;
    __syncthreads();
    if (thread == 0) s.work.advance(p.work, end - first);
    __syncthreads();
  }
}

}  // namespace

bool w4a16_takes_any_cuda(Device device) { return wgmma::is_hopper(device.index); }

void w4a16_cuda(const W4a16Args& args, std::int64_t items, Stream stream) {
  if (wgmma::is_hopper(args.w.device.index)) return w4a16_hopper_cuda(args, items, stream);
  const cuda::OnDevice scope(args.w.device.index);
  Params16 p{};
  p.work = params_of_work(kTiles, args.w, args.offsets, args.from, args.to, args.out, items);
  p.x = args.x.data;
  p.x_stride = args.x.stride[0];
  launch_over("w4a16_kernel", w4a16_kernel, static_cast<int>(sizeof(Shared16)), 3, p.work,
              args.w.device.index, stream, p);
}

}  // namespace lockstep::kernels
