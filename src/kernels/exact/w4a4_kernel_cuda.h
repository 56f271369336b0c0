/// For .cu files alone: the kernel of the exact product.
///
/// The eight warps of a block share the weights of its run alike, each a stretch of them that
/// begins and ends anywhere between steps of 256 columns, and have the next step on its way to
/// registers at all times. Whoever has a tile's first step owns the tile; what others have of it
/// comes by shared memory, behind the one barrier of a run.
///
/// In a chunk of 64 columns a lane ends up with the dots of one block alone: the activations of
/// block i stand in columns 2 i and 2 i + 1 of the tensor core's operand and zeros elsewhere, so
/// that two products into one accumulator give each lane its own block, and it needs the scales of
/// that block only.
#pragma once

#include "kernels/exact/w4a4_work_cuda.h"

namespace lockstep::kernels::w4a4_device {

/// Chunks of a step: fewer where sums and two parts need the registers.
constexpr int step_of(int parts) { return parts == 1 ? 4 : 2; }

/// What the loop keeps in registers. They come from shared memory, from places that differ between
/// lanes: constants that the compiler knows, and what is one for a warp, it would move anew to a
/// register before every use.
struct Constants {
  std::uint32_t raised;
  std::uint32_t lowered;
  std::uint32_t mine[kBlocksInChunk];  // 1 for the block whose activations the lane brings
  std::uint32_t a_at;                  // where these begin in Shared::a[part][pair of items]
};

inline constexpr int kCarried = 2;  // tiles of a long row that are worked on at once

template <int kParts>
struct Shared {
  alignas(16) std::uint8_t a[kParts][kItems][kRowBytes];  // signed bytes of each item
  // Of a block of 16 columns and two items: what the product starts with, -64 times the sum of
  // each item's codes, and the scales.
  alignas(16) int4 start[kParts][kItems / 2][kSegmentBlocks];
  alignas(8) int2 scale[kParts][kItems / 2][kSegmentBlocks];
  std::int64_t given[kWarps][kItems / 2][32];      // a warp's sums of a tile that another one owns
  std::int64_t carried[kCarried][kItems / 2][32];  // from one segment to the next
  Place found[2];
  uint2 tables[kBlocksInChunk];
  std::uint32_t mine[kBlocksInChunk][kBlocksInChunk];
  std::int32_t exponent[kItems];
  std::int32_t to[kItems];
};

inline constexpr int kRowsEach = kItems / 2;  // that a thread unpacks: every other one
static_assert(kThreads == 2 * kSegmentBlocks);

/// Where the thread's rows lie in the operand.
struct Rows {
  std::int32_t at[kRowsEach];
};
__device__ inline Rows rows_of(const Params& p, const Unit& unit) {
  Rows rows{};
#pragma unroll
  for (int j = 0; j < kRowsEach; ++j) {
    const int row = static_cast<int>(threadIdx.x) / kSegmentBlocks + 2 * j;
    const std::int32_t item = unit.first + row;
    if (row < unit.count()) rows.at[j] = p.from == nullptr ? item : p.from[item];
  }
  return rows;
}

/// A thread's block of each of its rows as the operand has it.
template <int kParts>
struct RawBlocks {
  uint2 codes[kRowsEach][kParts];
  std::uint32_t scales[kRowsEach][kParts];
};

/// kWide: rows start at multiples of eight bytes; else a byte is read at a time.
template <bool kWide, int kParts>
__device__ inline RawBlocks<kParts> read_blocks(const Params& p, const Rows& rows, int first_row,
                                                int count, int block) {
  RawBlocks<kParts> raw{};
#pragma unroll
  for (int j = 0; j < kRowsEach; ++j) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (first_row + 2 * j >= count) continue;
      const Part& from = p.part[part];
      const std::int64_t r = rows.at[j];
      const std::uint8_t* const codes = from.codes + r * from.code_stride + block * 8;
      uint2& to = raw.codes[j][part];
      if constexpr (kWide) {
        to = *reinterpret_cast<const uint2*>(codes);
      } else {
        for (int i = 0; i < 4; ++i) {
          to.x |= static_cast<std::uint32_t>(codes[i]) << 8 * i;
          to.y |= static_cast<std::uint32_t>(codes[4 + i]) << 8 * i;
        }
      }
      raw.scales[j][part] = from.scales[r * from.scale_stride + block];
    }
  }
  return raw;
}

/// Unpacks a segment of the unit's items, rows that it lacks as zeros up to an even count. A thread
/// takes the same block of each of its rows, and asks for all of them before it needs one.
template <int kParts>
__device__ void unpack(const Params& p, Shared<kParts>& s, const Unit& unit, const Rows& rows,
                       int segment) {
  const int first_block = segment * kSegmentBlocks;
  const int chunks = min(kSegmentChunks, p.chunks - segment * kSegmentChunks);
  const int block = static_cast<int>(threadIdx.x) % kSegmentBlocks;
  const int first_row = static_cast<int>(threadIdx.x) / kSegmentBlocks;
  if (block >= chunks * kBlocksInChunk) return;
  const int count = first_block + block < p.blocks ? unit.count() : 0;
  const RawBlocks<kParts> raw =
      p.wide ? read_blocks<true, kParts>(p, rows, first_row, count, first_block + block)
             : read_blocks<false, kParts>(p, rows, first_row, count, first_block + block);
#pragma unroll
  for (int j = 0; j < kRowsEach; ++j) {
    const int row = first_row + 2 * j;
    if (row >= (unit.count() + 1) / 2 * 2) break;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint2 code = raw.codes[j][part];
      const uint4 bytes = {signed_codes(code.x), signed_codes(code.x >> 16), signed_codes(code.y),
                           signed_codes(code.y >> 16)};
      std::int32_t sum = __dp4a(static_cast<int>(bytes.x), 0x01010101, 0);
      sum = __dp4a(static_cast<int>(bytes.y), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(bytes.z), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(bytes.w), 0x01010101, sum);
      *reinterpret_cast<uint4*>(&s.a[part][row][block * 16]) = bytes;
      auto* start = reinterpret_cast<std::int32_t*>(&s.start[part][row / 2][block]);
      start[row % 2] = -64 * sum;
      start[2 + row % 2] = -64 * sum;
      reinterpret_cast<std::int32_t*>(&s.scale[part][row / 2][block])[row % 2] =
          p.part[part].factor * scale_units(raw.scales[j][part] << 20);
    }
  }
}

/// One chunk of a tile times the items. unpacked() is called as soon as codes and scales have been
/// read.
template <int kParts, int kPairs, typename Then>
__device__ inline void multiply_chunk(std::int64_t (&acc)[kPairs][4], const Shared<kParts>& s,
                                      const uint4& codes, std::uint32_t scales, int at,
                                      const Constants& c, const Then& unpacked) {
  const unsigned t = threadIdx.x % 4;
  const std::int32_t low_scale = scale_units(scales << 20);
  const std::int32_t high_scale = scale_units(scales << 12);
  std::uint32_t w[kBlocksInChunk][2];
  const std::uint32_t words[kBlocksInChunk] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < kBlocksInChunk; ++i) {
    const std::uint32_t flipped = words[i] ^ 0x88888888u;
    w[i][0] = raised_codes(c.raised, c.lowered, words[i], flipped);
    w[i][1] = raised_codes(c.raised, c.lowered, words[i] >> 16, flipped >> 16);
  }
  // All products before any of their sums is wanted: each takes a while.
  unpacked();
  constexpr int kTogether = kPairs > 3 ? kPairs / 2 : kPairs;  // what registers there are for
#pragma unroll
  for (int first = 0; first < kPairs; first += kTogether) {
    std::int32_t d[kParts][kPairs][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int pair = first; pair < first + kTogether; ++pair) {
          const std::uint32_t a =
              *reinterpret_cast<const std::uint32_t*>(s.a[part][2 * pair] + c.a_at + at * kChunk);
          auto& sum = d[part][pair];
          if (half == 0) {
            multiply_blocks(sum, w[0], w[1], a * c.mine[0], a * c.mine[1],
                            s.start[part][pair][at * kBlocksInChunk + t]);
          } else {
            multiply_blocks(sum, w[2], w[3], a * c.mine[2], a * c.mine[3],
                            int4{sum[0], sum[1], sum[2], sum[3]});
          }
        }
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int pair = first; pair < first + kTogether; ++pair) {
        const auto& sum = d[part][pair];
        const int2 scale = s.scale[part][pair][at * kBlocksInChunk + t];
        acc[pair][0] += std::int64_t{sum[0] * low_scale} * scale.x;
        acc[pair][1] += std::int64_t{sum[1] * low_scale} * scale.y;
        acc[pair][2] += std::int64_t{sum[2] * high_scale} * scale.x;
        acc[pair][3] += std::int64_t{sum[3] * high_scale} * scale.y;
      }
    }
  }
}

/// Tiles first .. end - 1 of a unit's outputs, one segment of their columns.
struct Run {
  std::int32_t first;
  std::int32_t end;
  std::int32_t segment;
  std::int32_t segments;
};

/// A warp's part of a run: steps first .. end - 1, counted through its tiles.
struct Share {
  std::int32_t steps;  // of a tile
  std::int32_t first;
  std::int32_t end;
};

template <int kStep>
__device__ inline Share share_of_warp(const Params& p, const Run& run, int warp) {
  const int chunks = min(kSegmentChunks, p.chunks - run.segment * kSegmentChunks);
  const int steps = (chunks + kStep - 1) / kStep;
  const int all = (run.end - run.first) * steps;
  return {steps, all * warp / kWarps, all * (warp + 1) / kWarps};
}

/// A lane's part of a step of weights.
template <int kStep>
struct Step {
  uint4 codes[kStep];
  std::uint32_t scales[kStep];
};

/// The weights of a share on their way, step by step.
struct Stretch {
  const std::byte* codes;   // the lane's of the next step
  const std::byte* scales;  // the same
  std::int32_t ready;       // chunks that the tile has from the next step on; 0 behind the last one
  std::int32_t chunks;      // of the segment
  std::int32_t skip;        // bytes between a tile's segment and the next tile's
  std::int32_t left;        // steps, from the next one on

  /// Chunk `i` of the next step goes to `step`, if there is one. One predicate for both loads, and
  /// no branch.
  template <int kStep>
  __device__ void load(Step<kStep>& step, int i) const {
    asm volatile(
        "{ .reg .pred p; setp.gt.s32 p, %7, %8;\n\t"
        "@p ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%5];\n\t"
        "@p ld.global.L1::no_allocate.u16 %4, [%6]; }"
        : "+r"(step.codes[i].x), "+r"(step.codes[i].y), "+r"(step.codes[i].z),
          "+r"(step.codes[i].w), "+r"(step.scales[i])
        : "l"(codes + i * kChunkBytes), "l"(scales + i * kChunkBytes), "r"(ready), "r"(i)
        : "memory");
    __syncwarp();  // what follows does not overtake it
  }

  template <int kStep>
  __device__ void advance() {
    --left;
    ready -= kStep;
    std::int32_t by = kStep * kChunkBytes;
    if (ready <= 0) {
      by += ready * kChunkBytes + skip;
      ready = chunks;
    }
    if (left <= 0) ready = 0;
    codes += by;
    scales += by;
  }
};

template <int kStep>
__device__ inline Stretch stretch_of(const Params& p, const Unit& unit, const Run& run,
                                     const Share& share, int lane) {
  const int tile = share.first / share.steps;
  const int at = share.first % share.steps * kStep;
  Stretch s{};
  s.chunks = min(kSegmentChunks, p.chunks - run.segment * kSegmentChunks);
  s.skip = p.tile_bytes - s.chunks * kChunkBytes;
  s.left = share.end - share.first;
  s.ready = s.left > 0 ? s.chunks - at : 0;
  const std::byte* chunk = p.weights + unit.expert * p.expert_bytes + W4a4Weights::kHeaderBytes +
                           std::int64_t{run.first + tile} * p.tile_bytes +
                           (run.segment * kSegmentChunks + at) * kChunkBytes;
  s.codes = chunk + lane * 16;
  s.scales = chunk + kChunkCodeBytes + lane * 2;
  return s;
}

/// A sum of a tile, over all its columns of the run, goes to the next segment or becomes an output.
/// Lane 4 g + t has item 2 pair + t % 2 of output g + 8 (t / 2).
template <int kParts>
__device__ inline void finish_sum(const Params& p, Shared<kParts>& s, const Run& run, int tile,
                                  int pair, int lane, int count, std::int64_t sum) {
  if (run.segments > 1) {
    if (run.segment > 0) sum += s.carried[tile][pair][lane];
    if (run.segment < run.segments - 1) {
      s.carried[tile][pair][lane] = sum;
      return;
    }
  }
  const int row = 2 * pair + lane % 2;
  const int column = (run.first + tile) * 16 + lane / 4 + lane % 4 / 2 * 8;
  if (row < count && column < p.out_rows) {
    p.out[s.to[row] * p.out_stride + column] = scaled_sum(sum, s.exponent[row]);
  }
}

/// The sums of a piece of a tile go where they are wanted; `acc` begins anew.
template <int kParts, int kPairs>
__device__ inline void finish_piece(const Params& p, Shared<kParts>& s, const Run& run,
                                    std::int64_t (&acc)[kPairs][4], int tile, bool owns,
                                    int count) {
  const int thread = thread_here();
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const std::int64_t sum = sum_over_quad(acc[pair], thread % 4);
    for (int j = 0; j < 4; ++j) acc[pair][j] = 0;
    if (owns) {
      finish_sum(p, s, run, tile, pair, thread % 32, count, sum);
    } else {
      s.given[thread / 32][pair][thread % 32] = sum;
    }
  }
}

/// The run's first step is in `step`, or on its way there.
template <int kParts, int kPairs>
__device__ inline void multiply_run(const Params& p, Shared<kParts>& s, const Run& run,
                                    const Share& share, Stretch& stretch,
                                    Step<step_of(kParts)>& step, int count,
                                    const Constants& constants) {
  constexpr int kStep = step_of(kParts);
  std::int64_t acc[kPairs][4] = {};
  int tile = share.first / share.steps;
  int at = share.first % share.steps;
  bool owns = at == 0;
#pragma unroll 1
  for (int left = share.end - share.first; left > 0; --left) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      // A branch also keeps the chunks, and what they hold in registers, apart.
      if (at * kStep + i < stretch.chunks) {
        multiply_chunk<kParts, kPairs>(acc, s, step.codes[i], step.scales[i], at * kStep + i,
                                       constants, [&] { stretch.load(step, i); });
      } else {
        stretch.load(step, i);
      }
    }
    stretch.advance<kStep>();
    if (++at < share.steps) continue;
    finish_piece<kParts, kPairs>(p, s, run, acc, tile, owns, count);
    ++tile;
    at = 0;
    owns = true;
  }
  const bool is_part = at > 0 && share.end > share.first;
  if (is_part && !owns) finish_piece<kParts, kPairs>(p, s, run, acc, tile, false, count);
  __syncthreads();
  if (!is_part || !owns) return;
  // Others have the steps from `at` on.
  const int thread = thread_here();
  int end = thread / 32 + 1;
#pragma unroll 1
  while (share_of_warp<kStep>(p, run, end++).end < (tile + 1) * share.steps) {
  }
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    std::int64_t sum = sum_over_quad(acc[pair], thread % 4);
#pragma unroll 1
    for (int i = thread / 32 + 1; i < end; ++i) {
      const Share other = share_of_warp<kStep>(p, run, i);
      if (other.first < other.end) sum += s.given[i][pair][thread % 32];
    }
    finish_sum(p, s, run, tile, pair, thread % 32, count, sum);
  }
}

/// What is left of the work in its unit: of a long row, two tiles and one segment at a time.
template <int kParts>
__device__ void run_unit(const Params& p, Shared<kParts>& s, const Work& work, bool beginning,
                         const Constants& constants) {
  constexpr int kStep = step_of(kParts);
  const int thread = static_cast<int>(threadIdx.x);
  const Unit& unit = work.unit;
  const int first = work.group;
  const int end = min(first + work.left, p.groups);
  const int segments = (p.chunks + kSegmentChunks - 1) / kSegmentChunks;
  const int each = segments > 1 ? kCarried : end - first;
  for (int group = first; group < end; group += each) {
    for (int segment = 0; segment < segments; ++segment) {
      const Run run{group, min(group + each, end), segment, segments};
      const Share share = share_of_warp<kStep>(p, run, thread / 32);
      const Rows rows = rows_of(p, unit);
      Stretch stretch = stretch_of<kStep>(p, unit, run, share, thread % 32);
      Step<kStep> step{};
      for (int i = 0; i < kStep; ++i) stretch.load(step, i);
      stretch.advance<kStep>();
      if (p.starts_early) cuda::wait_for_predecessor();
      if (!beginning) __syncthreads();
      beginning = false;
      // Of the last threads, which often have nothing to unpack.
      const int i = kThreads - 1 - thread;
      if (segment == 0 && group == first && i < unit.count()) {
        const std::int32_t item = unit.first + i;
        const std::int64_t from = p.from == nullptr ? item : p.from[item];
        const std::int32_t n_w =
            *reinterpret_cast<const std::int32_t*>(p.weights + unit.expert * p.expert_bytes);
        const std::int32_t n_a = exponent_of_power(p.global[from * p.global_stride]);
        s.exponent[i] = max(n_a + p.base_exponent + n_w, -254);  // below, nothing is left
        s.to[i] = p.to == nullptr ? item : p.to[item];
      }
      unpack(p, s, unit, rows, segment);
      __syncthreads();
      const int count = unit.count();
      switch ((count + 1) / 2) {
        case 1: multiply_run<kParts, 1>(p, s, run, share, stretch, step, count, constants); break;
        case 2: multiply_run<kParts, 2>(p, s, run, share, stretch, step, count, constants); break;
        case 3: multiply_run<kParts, 3>(p, s, run, share, stretch, step, count, constants); break;
        default: multiply_run<kParts, 4>(p, s, run, share, stretch, step, count, constants); break;
      }
    }
  }
}

template <int kParts>
__global__ void __launch_bounds__(kThreads, kResidents)
    w4a4_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kParts>*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x);
  if (!p.starts_early) cuda::wait_for_predecessor();
  cuda::release_successor();
  if (thread < 64) {
    find_work(p, s.found, thread);
  } else if (thread < 96) {
    const int i = thread - 64;
    if (i < kBlocksInChunk) s.tables[i] = {kRaisedLow, kLoweredLow};
    if (i < kBlocksInChunk * kBlocksInChunk) {
      s.mine[i / kBlocksInChunk][i % kBlocksInChunk] =
          i / kBlocksInChunk == i % kBlocksInChunk ? 1u : 0u;
    }
  }
  __syncthreads();
  Work work = work_between(p, s.found[0], s.found[1]);
  if (work.left == 0) return;
  Constants constants{};
  constants.a_at =
      threadIdx.x / 4 % 2 * kRowBytes + threadIdx.x % 32 / 8 * 16 + threadIdx.x % 4 * 4;
  constants.raised = *const_cast<volatile unsigned*>(&s.tables[thread % 32 / 8].x);
  constants.lowered = *const_cast<volatile unsigned*>(&s.tables[thread % 32 / 8].y);
#pragma unroll
  for (int i = 0; i < kBlocksInChunk; ++i) {
    constants.mine[i] = *const_cast<volatile std::uint32_t*>(&s.mine[thread % 32 / 8][i]);
  }
  bool beginning = true;
  while (true) {
    run_unit<kParts>(p, s, work, beginning, constants);
    const int done = p.groups - work.group;
    if (work.left <= done) return;
    work.advance(p, done);
    beginning = false;
  }
}

inline Part part_of(const PackedView<const std::uint8_t>& packed, std::int32_t factor) {
  return {packed.codes.data, packed.scales.data, packed.codes.stride[0], packed.scales.stride[0],
          factor};
}

inline Params params_of(const W4a4Args& args, std::int64_t items) {
  const bool has_residual = !args.residual.codes.empty();
  Params p = params_of_work(1, args.w, args.offsets, args.from, args.to, args.out, items);
  // As seen; of 128 registers four pairs leave too few.
  constexpr std::int32_t kGroupCost[kItems / 2] = {8, 10, 12, 16};
  std::copy_n(kGroupCost, kItems / 2, p.group_cost);
  // Seen: as long as 72 chunks of a pair; more where a block has so little that it best has one.
  constexpr std::int64_t kFewItems = 16;
  p.unit_cost = 8 * (items > kFewItems ? 72 : 120) / p.chunks + 2;
  if (most_groups(p) > (std::int64_t{1} << 31) / (p.cost(kItems) + p.unit_cost)) {
    std::fill_n(p.group_cost, kItems / 2, 1);  // costs are counted in 32 bits
    p.unit_cost = 0;
  }
  p.part[0] = part_of(args.a, has_residual ? 4 << args.residual_halvings : 1);
  if (has_residual) p.part[1] = part_of(args.residual, -1);
  p.wide = true;
  for (const Part& part : p.part) {
    const auto at = reinterpret_cast<std::uintptr_t>(part.codes);
    p.wide = p.wide && (at | static_cast<std::uintptr_t>(part.code_stride)) % 8 == 0;
  }
  p.global = args.a.global.data;
  p.global_stride = args.a.global.stride[0];
  p.base_exponent = has_residual ? -22 - args.residual_halvings : -20;
  return p;
}

template <int kParts>
void launch(const Params& params, std::int8_t device, Stream stream) {
  launch_over<Params>("w4a4_kernel", w4a4_kernel<kParts>, static_cast<int>(sizeof(Shared<kParts>)),
                      kResidents, params, device, stream, params);
}

}  // namespace lockstep::kernels::w4a4_device
