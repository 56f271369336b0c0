/// For .cu files alone: the kernel of the exact product, and what may follow it in the same launch.
///
/// Work is counted in groups of 32 outputs of a unit, which is up to eight items of one expert.
/// Every block of threads takes an equal run of them, in the order of the weights, so that all of
/// them end together whatever the experts' loads; four of its warps share the columns of a tile of
/// 16 outputs. Weights stream through a ring in shared memory without regard to where units end. In
/// one step, a chunk of 64 columns, a lane ends up with the dots of one block of the chunk alone:
/// the activations of block i stand in columns 2 i and 2 i + 1 of the tensor core's operand and
/// zeros elsewhere, so that four products into one accumulator give each lane its own block, and it
/// needs the scales of that block only.
#pragma once

#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/w4a4_cuda.h"

namespace lockstep::kernels::w4a4_device {

inline constexpr int kItems = 8;   // of a unit
inline constexpr int kSplits = 4;  // warps that share a tile's columns
inline constexpr int kTiles = 2;   // of 16 outputs at a time
inline constexpr int kWarps = kSplits * kTiles;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kGroup = 16 * kTiles;  // outputs at a time
inline constexpr int kStages = 2;
inline constexpr int kStageChunks = 4;
inline constexpr int kSegment = 2048;  // columns whose activations are unpacked at once
inline constexpr int kSegmentChunks = kSegment / kChunk;
inline constexpr int kSegmentBlocks = kSegment / 16;
// Rows of neighbouring items are 16 banks apart: one load reads two rows, 64 bytes of each.
inline constexpr int kRowBytes = kSegment + 64;

/// Blocks of threads that a multiprocessor holds at a time.
constexpr int residents(int parts) { return parts == 1 ? 3 : 2; }

struct Part {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t code_stride;
  std::int64_t scale_stride;
  std::int32_t factor;  // of its scales
};

struct Params {
  Part part[2];
  const float* global;
  std::int64_t global_stride;
  const std::byte* weights;
  std::int64_t expert_bytes;
  std::int32_t tile_bytes;
  std::int32_t experts;
  std::int32_t out_rows;
  std::int32_t groups;  // of outputs
  std::int32_t chunks;
  std::int32_t blocks;
  const std::int32_t* offsets;
  const std::int32_t* from;
  const std::int32_t* to;
  std::int32_t items;
  float* out;
  std::int64_t out_stride;
  std::int32_t base_exponent;  // -20, or with a residual -22 and less
  std::int32_t base_cost;      // of a unit's group, in what a pair of items adds to it

  __device__ std::int32_t offset(std::int32_t expert) const {
    return offsets != nullptr ? offsets[expert] : expert == 0 ? 0 : items;
  }
  __device__ std::int32_t cost(std::int32_t items_left) const {
    return base_cost + (min(items_left, kItems) + 1) / 2;
  }
};

/// Items first .. end - 1 are left of an expert; a unit is the first eight of them.
struct Unit {
  std::int32_t expert;
  std::int32_t first;
  std::int32_t end;

  __device__ std::int32_t count() const { return min(end - first, kItems); }
  /// There must be a next one.
  __device__ void advance(const Params& p) {
    first += kItems;
    while (first >= end) {
      first = end;
      end = p.offset(++expert + 1);
    }
  }
};

/// What a block of threads takes: groups of outputs from `group` of unit number `index` on.
struct Work {
  Unit unit;
  std::int32_t index;
  std::int32_t group;
  std::int32_t left;  // groups; 0: nothing

  /// To the next unit, `done` groups further on. There must be one.
  __device__ void advance(const Params& p, int done) {
    left -= done;
    group = 0;
    ++index;
    unit.advance(p);
  }
};

/// The experts as a lane sees them: those that follow each other from `first` on, so that all
/// offsets are read at once.
struct Experts {
  std::int32_t first;
  std::int32_t units;         // theirs
  std::int32_t cost;          // of a group of each of them
  std::int32_t units_before;  // of all experts before
  std::int32_t cost_before;
};

__device__ inline std::int32_t sum_up_to(std::int32_t value, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    const std::int32_t other = __shfl_up_sync(0xFFFFFFFFu, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

__device__ inline Experts look_at_experts(const Params& p, int lane) {
  const std::int32_t experts = p.offsets != nullptr ? p.experts : 1;
  const std::int32_t each = (experts + 31) / 32;
  Experts seen{lane * each, 0, 0, 0, 0};
  const std::int32_t end_expert = min(seen.first + each, experts);
  if (seen.first < end_expert) {
    std::int32_t begin = p.offset(seen.first);
#pragma unroll 4
    for (std::int32_t e = seen.first; e < end_expert; ++e) {
      const std::int32_t end = p.offset(e + 1);
      const std::int32_t full = (end - begin) / kItems;
      const std::int32_t rest = (end - begin) % kItems;
      seen.units += full + (rest > 0);
      seen.cost += full * p.cost(kItems) + (rest > 0 ? p.cost(rest) : 0);
      begin = end;
    }
  }
  seen.units_before = sum_up_to(seen.units, lane) - seen.units;
  seen.cost_before = sum_up_to(seen.cost, lane) - seen.cost;
  return seen;
}

/// The first group of which no part lies before `at`, in cost from the beginning on; `left` counts
/// the groups before it. All lanes of a warp call it, `at` below the cost of all.
__device__ inline Work place_of(const Params& p, const Experts& seen, std::int64_t at) {
  std::int64_t into = at - std::int64_t{seen.cost_before} * p.groups;
  const bool mine = into >= 0 && into < std::int64_t{seen.cost} * p.groups;
  const int owner = __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, mine))) - 1;
  into = __shfl_sync(0xFFFFFFFFu, into, owner);
  Work work{};
  work.index = __shfl_sync(0xFFFFFFFFu, seen.units_before, owner);
  std::int32_t e = __shfl_sync(0xFFFFFFFFu, seen.first, owner);
  const std::int64_t whole = std::int64_t{p.cost(kItems)} * p.groups;  // of a full unit
  std::int32_t begin = p.offset(e);
  std::int32_t end = p.offset(e + 1);
  while (true) {
    const std::int32_t full = (end - begin) / kItems;
    const std::int32_t rest = (end - begin) % kItems;
    const std::int64_t all = full * whole + (rest > 0 ? std::int64_t{p.cost(rest)} * p.groups : 0);
    if (into < all) break;
    into -= all;
    work.index += full + (rest > 0);
    begin = end;
    end = p.offset(++e + 1);
  }
  const auto before = static_cast<std::int32_t>(into / whole);
  const std::int32_t first = begin + before * kItems;
  const auto rest = static_cast<std::int32_t>(into - before * whole);
  const std::int32_t cost = p.cost(end - first);
  work.unit = {e, first, end};
  work.index += before;
  work.group = (rest + cost - 1) / cost;
  work.left = work.index * p.groups + work.group;
  return work;
}

/// This block's run. All lanes of a warp call it.
__device__ inline Work find_work(const Params& p, int lane) {
  const Experts seen = look_at_experts(p, lane);
  const std::int64_t all =
      std::int64_t{__shfl_sync(0xFFFFFFFFu, seen.cost_before + seen.cost, 31)} * p.groups;
  const std::int32_t units = __shfl_sync(0xFFFFFFFFu, seen.units_before + seen.units, 31);
  const std::int64_t first = all * blockIdx.x / gridDim.x;
  const std::int64_t last = all * (blockIdx.x + 1) / gridDim.x;
  if (first == last) return {};
  Work work = place_of(p, seen, first);
  const std::int32_t end = last == all ? units * p.groups : place_of(p, seen, last).left;
  work.left = end - work.left;
  if (work.left > 0 && work.group == p.groups) {
    work.group = 0;
    ++work.index;
    work.unit.advance(p);
  }
  return work;
}

/// A warp's share of a segment's chunks.
struct Range {
  int first;
  int count;
};

__device__ inline Range range_of(const Params& p, int segment, int split) {
  const int chunks = min(kSegmentChunks, p.chunks - segment * kSegmentChunks);
  const int first = chunks * split / kSplits;
  return {first, chunks * (split + 1) / kSplits - first};
}

/// What a warp reads: its range of every segment of a tile, of one group of outputs after another.
/// In shared memory, for one lane.
struct WeightStream {
  Work work;
  std::int32_t tile;
  std::int32_t split;
  std::int32_t segment;
  std::int32_t count;  // chunks of a range
  std::int32_t quick;  // groups that follow `work` and only lie further on
};

/// Where a warp stands: in its ring, and in the range that it reads.
struct Reader {
  int slot = 0;
  std::uint32_t parity = 0;
  const std::byte* next = nullptr;
  std::int32_t left = 0;   // chunks of the range
  std::int32_t quick = 0;  // of the stream's, those that are left

  /// At the beginning of the work; the ring is on its way. One lane calls it, or all lanes its
  /// like.
  template <typename Ring, typename Arrived>
  __device__ void start(const Params& p, const Work& work, WeightStream& from, Ring& ring,
                        Arrived& arrived, int warp) {
    from = {work, warp / kSplits, warp % kSplits, 0, 0, 0};
    enter(p, from);
    for (int i = 0; i < kStages; ++i) init_barrier(&arrived[i]);
    show_barriers();
    for (int i = 0; i < kStages; ++i) fetch(p, from, ring[i], &arrived[i]);
  }

  __device__ void step() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1u;
    }
  }

  __device__ void enter(const Params& p, WeightStream& from) {
    const std::int32_t at = from.work.group * kTiles + from.tile;
    const Range range = range_of(p, from.segment, from.split);
    from.count = range.count;
    left = at * 16 < p.out_rows ? range.count : 0;
    next = p.weights + from.work.unit.expert * p.expert_bytes + W4a4Weights::kHeaderBytes +
           std::int64_t{at} * p.tile_bytes +
           (from.segment * kSegmentChunks + range.first) * kChunkBytes;
    quick = 0;
    if (left > 0 && p.chunks <= kSegmentChunks) {
      // Of the unit's last group there may be one tile alone.
      const int whole = (p.out_rows / 16 - from.tile + kTiles - 1) / kTiles;
      quick = max(0, min(from.work.left, whole - from.work.group) - 1);
    }
    from.quick = quick;
  }

  /// To the next range that is not empty; left stays 0 if there is none.
  __device__ void advance(const Params& p, WeightStream& from) {
    if (quick > 0) {
      --quick;
      left = from.count;
      next += kTiles * p.tile_bytes - left * kChunkBytes;
      return;
    }
    from.work.group += from.quick;
    from.work.left -= from.quick;
    from.quick = 0;
    while (left == 0 && from.work.left > 0) {
      if (++from.segment * kSegmentChunks >= p.chunks) {
        from.segment = 0;
        if (--from.work.left == 0) return;
        if (++from.work.group == p.groups) {
          from.work.group = 0;
          from.work.unit.advance(p);
        }
      }
      enter(p, from);
    }
  }

  __device__ void fetch(const Params& p, WeightStream& from, std::uint8_t* to,
                        std::uint64_t* arrived) {
    if (left == 0) advance(p, from);
    if (left == 0) return;
    const int chunks = min(left, kStageChunks);
    copy_async(to, next, static_cast<std::uint32_t>(chunks * kChunkBytes), arrived);
    next += chunks * kChunkBytes;
    left -= chunks;
  }
};

/// What the loop keeps in registers. They come from shared memory, from places that differ between
/// lanes: constants that the compiler knows, and what is one for a warp, it would move anew to a
/// register before every use.
struct Constants {
  std::uint32_t raised;
  std::uint32_t lowered;
  std::uint32_t mine[kBlocksInChunk];  // all ones for the block whose activations the lane brings
  std::uint32_t a_at;                  // where these begin in Shared::a[part][pair of items]
};

template <int kParts>
struct Shared {
  alignas(16) std::uint8_t ring[kWarps][kStages][kStageChunks * kChunkBytes];
  // Signed bytes of each item; of two items -64 times the sum of the block's codes, as the product
  // starts with it, and the scales.
  alignas(16) std::uint8_t a[kParts][kItems][kRowBytes];
  alignas(16) int4 start[kParts][kItems / 2][kSegmentBlocks];
  alignas(8) int2 scale[kParts][kItems / 2][kSegmentBlocks];
  std::int64_t sums[kSplits][kTiles][kItems][16];
  std::uint64_t arrived[kWarps][kStages];
  WeightStream stream[kWarps];
  Work work;
  uint2 tables[kBlocksInChunk];
  std::uint32_t mine[kBlocksInChunk][kBlocksInChunk];
  std::int32_t exponent[kItems];
  std::int32_t to[kItems];
  std::int32_t tail[kItems];  // for what follows
  std::int32_t last;
};

/// A byte at a time where rows do not start at multiples of eight.
__device__ inline uint2 load_block(const std::uint8_t* codes) {
  if ((reinterpret_cast<std::uintptr_t>(codes) & 7u) == 0) {
    return *reinterpret_cast<const uint2*>(codes);
  }
  uint2 block{0, 0};
  for (int i = 0; i < 4; ++i) {
    block.x |= static_cast<std::uint32_t>(codes[i]) << 8 * i;
    block.y |= static_cast<std::uint32_t>(codes[4 + i]) << 8 * i;
  }
  return block;
}

/// Unpacks a segment of the unit's items, rows that it lacks as zeros up to an even count. A thread
/// takes the same block of every other row.
template <int kParts>
__device__ void unpack(const Params& p, Shared<kParts>& s, const Unit& unit, int segment) {
  static_assert(kThreads == 2 * kSegmentBlocks);
  const int first_block = segment * kSegmentBlocks;
  const int chunks = min(kSegmentChunks, p.chunks - segment * kSegmentChunks);
  const int block = static_cast<int>(threadIdx.x) % kSegmentBlocks;
  if (block >= chunks * kBlocksInChunk) return;
  const int count = unit.count();
  for (int row = static_cast<int>(threadIdx.x) / kSegmentBlocks; row < (count + 1) / 2 * 2;
       row += 2) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint4 bytes{0, 0, 0, 0};
      std::int32_t scale = 0;
      std::int32_t sum = 0;
      if (row < count && first_block + block < p.blocks) {
        const Part& from = p.part[part];
        const std::int32_t item = unit.first + row;
        const std::int64_t r = p.from == nullptr ? item : p.from[item];
        const uint2 codes =
            load_block(from.codes + r * from.code_stride + (first_block + block) * 8);
        const std::uint32_t byte = from.scales[r * from.scale_stride + first_block + block];
        bytes = {signed_codes(codes.x), signed_codes(codes.x >> 16), signed_codes(codes.y),
                 signed_codes(codes.y >> 16)};
        sum = __dp4a(static_cast<int>(bytes.x), 0x01010101, sum);
        sum = __dp4a(static_cast<int>(bytes.y), 0x01010101, sum);
        sum = __dp4a(static_cast<int>(bytes.z), 0x01010101, sum);
        sum = __dp4a(static_cast<int>(bytes.w), 0x01010101, sum);
        scale = from.factor * scale_units(byte);
      }
      *reinterpret_cast<uint4*>(&s.a[part][row][block * 16]) = bytes;
      auto* start = reinterpret_cast<std::int32_t*>(&s.start[part][row / 2][block]);
      start[row % 2] = -64 * sum;
      start[2 + row % 2] = -64 * sum;
      reinterpret_cast<std::int32_t*>(&s.scale[part][row / 2][block])[row % 2] = scale;
    }
  }
}

/// One chunk of a tile times the items.
template <int kParts, int kPairs>
__device__ inline void multiply_chunk(std::int64_t (&acc)[kPairs][4], const Shared<kParts>& s,
                                      const std::uint8_t* chunk, int at, int lane,
                                      const Constants& c) {
  const unsigned t = threadIdx.x % 4;
  const uint4 codes = *reinterpret_cast<const uint4*>(chunk + lane * 16);
  const std::uint32_t scales =
      *reinterpret_cast<const std::uint16_t*>(chunk + kChunkCodeBytes + lane * 2);
  const auto low_scale = static_cast<std::int32_t>((scales & 15u) << (scales >> 4 & 15u));
  const auto high_scale = static_cast<std::int32_t>((scales >> 8 & 15u) << (scales >> 12));
  std::uint32_t w[kBlocksInChunk][2];
  const std::uint32_t words[kBlocksInChunk] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < kBlocksInChunk; ++i) {
    const std::uint32_t flipped = words[i] ^ 0x88888888u;
    w[i][0] = raised_codes(c.raised, c.lowered, words[i], flipped);
    w[i][1] = raised_codes(c.raised, c.lowered, words[i] >> 16, flipped >> 16);
  }
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::uint32_t a =
          *reinterpret_cast<const std::uint32_t*>(s.a[part][2 * pair] + c.a_at + at * kChunk);
      const int2 scale = s.scale[part][pair][at * kBlocksInChunk + t];
      std::int32_t d[4];
      multiply_block(d, w[0][0], w[0][1], a & c.mine[0],
                     s.start[part][pair][at * kBlocksInChunk + t]);
#pragma unroll
      for (int i = 1; i < kBlocksInChunk; ++i) {
        multiply_block(d, w[i][0], w[i][1], a & c.mine[i], int4{d[0], d[1], d[2], d[3]});
      }
      acc[pair][0] += std::int64_t{d[0] * low_scale} * scale.x;
      acc[pair][1] += std::int64_t{d[1] * low_scale} * scale.y;
      acc[pair][2] += std::int64_t{d[2] * high_scale} * scale.x;
      acc[pair][3] += std::int64_t{d[3] * high_scale} * scale.y;
    }
  }
}

/// Waits for what the launches before this one wrote, where it was allowed to start beside them.
__device__ inline void wait_for_predecessors() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// Lets the next launch start, if it was allowed to. It waits itself before it reads.
__device__ inline void release_successors() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// What follows the product in its launch, nothing here. A tail that knows its weights and units to
/// be older than the launch before sets kStartsEarly: weights are then on their way before it ends.
struct NoTail {
  static constexpr bool kStartsEarly = false;
  static constexpr bool kRuns = false;
};

/// Groups first .. end - 1 of a unit's outputs.
template <int kParts, int kPairs>
__device__ void run(const Params& p, Shared<kParts>& s, const Unit& unit, int first, int end,
                    Reader& reader, const Constants& constants) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int split = warp % kSplits;
  const int tile = warp / kSplits;
  const int segments = (p.chunks + kSegmentChunks - 1) / kSegmentChunks;
  for (int group = first; group < end; ++group) {
    std::int64_t acc[kPairs][4] = {};
    const bool has_tile = (group * kTiles + tile) * 16 < p.out_rows;
    for (int segment = 0; segment < segments; ++segment) {
      if (segments > 1 || group == first) {
        if (segment > 0 || group > first) __syncthreads();
        unpack(p, s, unit, segment);
        __syncthreads();
      }
      const Range range = range_of(p, segment, split);
      const int range_end = has_tile ? range.first + range.count : 0;
      for (int at = range.first; at < range_end; at += kStageChunks) {
        std::uint8_t* stage = s.ring[warp][reader.slot];
        std::uint64_t* arrived = &s.arrived[warp][reader.slot];
        wait_for_copy(arrived, reader.parity);
#pragma unroll
        for (int i = 0; i < kStageChunks; ++i) {
          if (at + i < range_end) {
            multiply_chunk<kParts, kPairs>(acc, s, stage + i * kChunkBytes, at + i, lane,
                                           constants);
          }
        }
        __syncwarp();
        if (lane == 0) reader.fetch(p, s.stream[warp], stage, arrived);
        reader.step();
      }
    }
    // Lane t has item 2 pair + t % 2 of output g + 8 (t / 2).
    if (group > first) __syncthreads();  // the sums of the last group have been read
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      s.sums[split][tile][2 * pair + lane % 2][lane / 4 + lane % 4 / 2 * 8] =
          sum_over_quad(acc[pair], lane % 4);
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) / kGroup;
    const int column = static_cast<int>(threadIdx.x) % kGroup;
    if (row < unit.count() && group * kGroup + column < p.out_rows) {
      std::int64_t sum = 0;
      for (int i = 0; i < kSplits; ++i) sum += s.sums[i][column / 16][row][column % 16];
      p.out[s.to[row] * p.out_stride + group * kGroup + column] = scaled_sum(sum, s.exponent[row]);
    }
  }
}

template <int kParts, typename Tail>
__global__ void __launch_bounds__(kThreads, residents(kParts))
    w4a4_kernel(const __grid_constant__ Params p, const __grid_constant__ Tail tail) {
  extern __shared__ __align__(16) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kParts>*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  if (!Tail::kStartsEarly) wait_for_predecessors();
  release_successors();
  Reader reader;
  {
    const Work work = find_work(p, thread % 32);
    if (work.left == 0) return;
    if (thread == 0) {
      s.work = work;
    }
    if (thread < kBlocksInChunk) s.tables[thread] = {kRaisedLow, kLoweredLow};
    if (thread < kBlocksInChunk * kBlocksInChunk) {
      s.mine[thread / kBlocksInChunk][thread % kBlocksInChunk] =
          thread / kBlocksInChunk == thread % kBlocksInChunk ? 0xFFFFFFFFu : 0u;
    }
    if (thread % 32 == 0) {
      reader.start(p, work, s.stream[warp], s.ring[warp], s.arrived[warp], warp);
    }
  }
  if (Tail::kStartsEarly) wait_for_predecessors();
  __syncthreads();
  Constants constants{};
  constants.a_at =
      threadIdx.x / 4 % 2 * kRowBytes + threadIdx.x % 32 / 8 * 16 + threadIdx.x % 4 * 4;
  constants.raised = *const_cast<volatile unsigned*>(&s.tables[thread % 32 / 8].x);
  constants.lowered = *const_cast<volatile unsigned*>(&s.tables[thread % 32 / 8].y);
#pragma unroll
  for (int i = 0; i < kBlocksInChunk; ++i) {
    constants.mine[i] = *const_cast<volatile std::uint32_t*>(&s.mine[thread % 32 / 8][i]);
  }
  while (true) {
    const Unit unit = s.work.unit;
    const int first = s.work.group;
    const int end = min(first + s.work.left, p.groups);
    if (thread < unit.count()) {  // read behind the barriers of run()
      const std::int32_t item = unit.first + thread;
      const std::int64_t from = p.from == nullptr ? item : p.from[item];
      const std::int32_t n_w =
          *reinterpret_cast<const std::int32_t*>(p.weights + unit.expert * p.expert_bytes);
      s.exponent[thread] = exponent_of(p.global[from * p.global_stride]) + p.base_exponent + n_w;
      s.to[thread] = p.to == nullptr ? item : p.to[item];
    }
    switch ((unit.count() + 1) / 2) {
      case 1: run<kParts, 1>(p, s, unit, first, end, reader, constants); break;
      case 2: run<kParts, 2>(p, s, unit, first, end, reader, constants); break;
      case 3: run<kParts, 3>(p, s, unit, first, end, reader, constants); break;
      default: run<kParts, 4>(p, s, unit, first, end, reader, constants); break;
    }
    if constexpr (Tail::kRuns) tail(p, s, unit, s.work.index, first, end);
    if (s.work.left == end - first) return;
    __syncthreads();
    if (thread == 0) s.work.advance(p, end - first);
    __syncthreads();
  }
}

inline Part part_of(const PackedView<const std::uint8_t>& packed, std::int32_t factor) {
  return {packed.codes.data, packed.scales.data, packed.codes.stride[0], packed.scales.stride[0],
          factor};
}

/// All but what is multiplied with the weights.
inline Params params_of_work(const W4a4Weights& w, const TensorView<const std::int32_t, 1>& offsets,
                             const TensorView<const std::int32_t, 1>& from,
                             const TensorView<const std::int32_t, 1>& to,
                             const TensorView<float, 2>& out, std::int64_t items) {
  Params p{};
  p.weights = w.data;
  p.expert_bytes = W4a4Weights::expert_bytes(w.out, w.cols);
  p.tile_bytes = static_cast<std::int32_t>(W4a4Weights::tile_bytes(w.cols));
  p.experts = w.experts;
  p.out_rows = w.out;
  p.groups = (w.out + kGroup - 1) / kGroup;
  p.chunks = (w.cols + kChunk - 1) / kChunk;
  p.blocks = w.cols / 16;
  p.offsets = offsets.data;
  p.from = from.data;
  p.to = to.data;
  p.items = static_cast<std::int32_t>(items);
  p.out = out.data;
  p.out_stride = out.stride[0];
  p.base_cost = 4;  // seen: a unit of one pair takes five sixths of what one of two does
  return p;
}

inline Params params_of(const W4a4Args& args, std::int64_t items) {
  const bool has_residual = !args.residual.codes.empty();
  Params p = params_of_work(args.w, args.offsets, args.from, args.to, args.out, items);
  p.part[0] = part_of(args.a, has_residual ? 4 << args.residual_halvings : 1);
  if (has_residual) p.part[1] = part_of(args.residual, -1);
  p.global = args.a.global.data;
  p.global_stride = args.a.global.stride[0];
  p.base_exponent = has_residual ? -22 - args.residual_halvings : -20;
  return p;
}

/// A launch over all of the work that may start beside its predecessor: it waits itself.
template <typename... Arguments>
void launch_over(void (*kernel)(Arguments...), int shared_bytes, int residents, const Params& work,
                 std::int8_t device, Stream stream, const Arguments&... arguments) {
  cuda::require(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "cudaFuncSetAttribute");
  const std::int64_t most =
      (std::int64_t{work.items + kItems - 1} / kItems + work.experts) * work.groups;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(
      std::min<std::int64_t>(most, std::int64_t{cuda::multiprocessors(device)} * residents)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = cuda::stream_of(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  cuda::require(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
}

template <int kParts, typename Tail>
void launch(const Params& params, const Tail& tail, std::int8_t device, Stream stream) {
  launch_over<Params, Tail>(w4a4_kernel<kParts, Tail>, static_cast<int>(sizeof(Shared<kParts>)),
                            residents(kParts), params, device, stream, params, tail);
}

}  // namespace lockstep::kernels::w4a4_device
