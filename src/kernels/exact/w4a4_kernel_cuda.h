/// For .cu files alone: the kernel of the exact product.
///
/// The eight warps of a block share the weights of its run alike, each a stretch of them that
/// begins and ends anywhere between steps of 256 columns, and have the next step on its way to
/// registers at all times. Whoever has a tile's first step owns the tile; what others have of it
/// comes by shared memory, behind the one barrier of a run.
#pragma once

#include "kernels/exact/w4a4_chunk_cuda.h"

namespace lockstep::kernels::w4a4_device {

/// Chunks of a step: fewer where sums and two parts need the registers.
constexpr int step_of(int parts) { return parts == 1 ? 4 : 2; }

inline constexpr int kCarried = 2;  // tiles of a long row that are worked on at once

template <int kParts>
struct Shared : Operand<kParts> {
  std::int64_t given[kWarps][kItems / 2][32];      // a warp's sums of a tile that another one owns
  std::int64_t carried[kCarried][kItems / 2][32];  // from one segment to the next
  Place found[2];
  uint2 tables[kBlocksInChunk];
  std::uint32_t mine[kBlocksInChunk][kBlocksInChunk];
  std::uint32_t mine_of_two[2][2];
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

/// Unpacks a segment of the unit's items, rows that it lacks as zeros. A thread takes the same
/// block of each of its rows, and asks for all of them before it needs one.
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
    if (row >= rows_taken(unit.count())) break;
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
      reinterpret_cast<std::int32_t*>(&s.scale[part][row / 4][block][row / 2 % 2])[row % 2] =
          p.part[part].factor * scale_units(raw.scales[j][part] << 20);
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

  /// Chunk `i` of the next step goes to `step`, with the scales that four items want or two.
  /// kWhole: where there is none some other does, which nobody uses; a predicate would cost a move
  /// of every address.
  template <bool kWhole, bool kFour, int kStep>
  __device__ void load(Step<kStep>& step, int i) const {
    if (kWhole || i < ready) {
      uint4& to = step.codes[i];
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                   : "l"(codes + i * kChunkBytes)
                   : "memory");
      if constexpr (kFour) {
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];"
                     : "=r"(step.scales[i])
                     : "l"(scales + i * kChunkBytes)
                     : "memory");
      } else {
        asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];"
                     : "=r"(step.scales[i])
                     : "l"(scales + i * kChunkBytes)
                     : "memory");
      }
    }
    __syncwarp();  // what follows does not overtake it
  }

  template <bool kWhole, int kStep>
  __device__ void advance() {
    --left;
    ready -= kStep;
    std::int32_t by = kStep * kChunkBytes;
    if (ready <= 0) {
      by += ready * kChunkBytes + skip;
      ready = chunks;
    }
    if (left <= 0) {
      ready = 0;
      if (kWhole) by = 0;  // the last step once more
    }
    codes += by;
    scales += by;
  }
};

template <int kStep>
__device__ inline Stretch stretch_of(const Params& p, const Unit& unit, const Run& run,
                                     const Share& share, int lane) {
  Stretch s{};
  s.left = share.end - share.first;
  const int first = s.left > 0 ? share.first : 0;  // of an empty one, where something can be read
  const int tile = first / share.steps;
  const int at = first % share.steps * kStep;
  s.chunks = min(kSegmentChunks, p.chunks - run.segment * kSegmentChunks);
  s.skip = p.tile_bytes - s.chunks * kChunkBytes;
  s.ready = s.left > 0 ? s.chunks - at : 0;
  const std::byte* chunk = p.weights + unit.expert * p.expert_bytes + W4a4Weights::kHeaderBytes +
                           std::int64_t{run.first + tile} * p.tile_bytes +
                           (run.segment * kSegmentChunks + at) * kChunkBytes;
  s.codes = chunk + lane * 16;
  s.scales = chunk + kChunkCodeBytes + (unit.count() > 2 ? lane / 2 * 4 : lane * 2);
  return s;
}

/// A sum of a tile, over all its columns of the run, goes to the next segment or becomes an output.
/// Lane 4 g + t has item `row` of output g + 8 (t / 2), value `index` of its.
template <int kParts>
__device__ inline void finish_sum(const Params& p, Shared<kParts>& s, const Run& run, int tile,
                                  int index, int row, int lane, int count, std::int64_t sum) {
  if (run.segments > 1) {
    if (run.segment > 0) sum += s.carried[tile][index][lane];
    if (run.segment < run.segments - 1) {
      s.carried[tile][index][lane] = sum;
      return;
    }
  }
  const int column = (run.first + tile) * 16 + lane / 4 + lane % 4 / 2 * 8;
  if (row < count && column < p.out_rows) {
    p.out[s.to[row] * p.out_stride + column] = scaled_sum(sum, s.exponent[row]);
  }
}

/// The sums of a piece of a tile go where they are wanted; `acc` begins anew.
template <int kParts, int kFours>
__device__ inline void finish_piece(const Params& p, Shared<kParts>& s, const Run& run,
                                    std::int64_t (&acc)[sums_of(kFours)][4], int tile, bool owns,
                                    int count) {
  const int thread = thread_here();
  const int lane = thread % 32;
#pragma unroll
  for (int i = 0; i < values_of(kFours); ++i) {
    const std::int64_t sum = value_of<kFours>(acc, i, lane % 4);
    if (owns) {
      finish_sum(p, s, run, tile, i, row_of<kFours>(i, lane), lane, count, sum);
    } else {
      s.given[thread / 32][i][lane] = sum;
    }
  }
#pragma unroll
  for (auto& sums : acc) {
    for (std::int64_t& sum : sums) sum = 0;
  }
}

/// The run's first step is in `step`, or on its way there.
template <int kParts, bool kWhole, int kFours>
__device__ inline void multiply_run(const Params& p, Shared<kParts>& s, const Run& run,
                                    const Share& share, Stretch& stretch,
                                    Step<step_of(kParts)>& step, int count) {
  constexpr int kStep = step_of(kParts);
  const Constants constants = constants_of<kFours>(s, thread_here() % 32);
  std::int64_t acc[sums_of(kFours)][4] = {};
  int tile = share.first / share.steps;
  int at = share.first % share.steps;
  bool owns = at == 0;
#pragma unroll 1
  for (int left = share.end - share.first; left > 0; --left) {
    const Operand<kParts>& operand = s.from(at * kStep);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      if (kWhole || at * kStep + i < stretch.chunks) {
        multiply_chunk<kParts, kFours>(acc, operand, step.codes[i], step.scales[i], i, constants,
                                       [&] { stretch.load<kWhole, (kFours > 0)>(step, i); });
      } else {
        stretch.load<kWhole, (kFours > 0)>(step, i);
      }
    }
    stretch.advance<kWhole, kStep>();
    if (++at < share.steps) continue;
    finish_piece<kParts, kFours>(p, s, run, acc, tile, owns, count);
    ++tile;
    at = 0;
    owns = true;
  }
  const bool is_part = at > 0 && share.end > share.first;
  if (is_part && !owns) finish_piece<kParts, kFours>(p, s, run, acc, tile, false, count);
  __syncthreads();
  if (!is_part || !owns) return;
  // Others have the steps from `at` on.
  const int thread = thread_here();
  int end = thread / 32 + 1;
#pragma unroll 1
  while (share_of_warp<kStep>(p, run, end++).end < (tile + 1) * share.steps) {
  }
  const int lane = thread % 32;
#pragma unroll
  for (int i = 0; i < values_of(kFours); ++i) {
    std::int64_t sum = value_of<kFours>(acc, i, lane % 4);
#pragma unroll 1
    for (int warp = thread / 32 + 1; warp < end; ++warp) {
      const Share other = share_of_warp<kStep>(p, run, warp);
      if (other.first < other.end) sum += s.given[warp][i][lane];
    }
    finish_sum(p, s, run, tile, i, row_of<kFours>(i, lane), lane, count, sum);
  }
}

/// What is left of the work in its unit: of a long row, two tiles and one segment at a time.
template <int kParts, bool kWhole>
__device__ void run_unit(const Params& p, Shared<kParts>& s, const Work& work, bool beginning) {
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
      const int count = unit.count();
      for (int i = 0; i < kStep; ++i) {
        if (count > 2) {
          stretch.load<kWhole, true>(step, i);
        } else {
          stretch.load<kWhole, false>(step, i);
        }
      }
      stretch.advance<kWhole, kStep>();
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
      if (count <= 2) {
        multiply_run<kParts, kWhole, 0>(p, s, run, share, stretch, step, count);
      } else if (count <= 4) {
        multiply_run<kParts, kWhole, 1>(p, s, run, share, stretch, step, count);
      } else {
        multiply_run<kParts, kWhole, 2>(p, s, run, share, stretch, step, count);
      }
    }
  }
}

template <int kParts, bool kWhole>
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
          i / kBlocksInChunk == i % kBlocksInChunk ? ~0u : 0u;
    }
    if (i < 4) s.mine_of_two[i / 2][i % 2] = i / 2 == i % 2 ? ~0u : 0u;
  }
  __syncthreads();
  Work work = work_between(p, s.found[0], s.found[1]);
  if (work.left == 0) return;
  bool beginning = true;
  while (true) {
    run_unit<kParts, kWhole>(p, s, work, beginning);
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
  // As instructions are.
  constexpr std::int32_t kGroupCost[kItems / 2] = {8, 10, 15, 15};
  std::copy_n(kGroupCost, kItems / 2, p.group_cost);
  // Seen: as long as 72 chunks of a pair; more where a block has so little that it best has one.
  constexpr std::int64_t kFewItems = 16;
  p.unit_cost = 8 * (items > kFewItems ? 72 : 160) / p.chunks + 2;
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

/// kWhole: all segments of a row are whole steps.
template <int kParts>
void launch_of(const Params& params, std::int8_t device, Stream stream) {
  static_assert(kSegmentChunks % step_of(kParts) == 0);  // so that only a row's last may be none
  const bool whole = params.chunks % step_of(kParts) == 0;
  launch_over<Params>("w4a4_kernel", whole ? w4a4_kernel<kParts, true> : w4a4_kernel<kParts, false>,
                      static_cast<int>(sizeof(Shared<kParts>)), kResidents, params, device, stream,
                      params);
}

inline void launch(const Params& params, std::int8_t device, Stream stream) {
  if (params.part[1].codes != nullptr) return launch_of<2>(params, device, stream);
  launch_of<1>(params, device, stream);
}

}  // namespace lockstep::kernels::w4a4_device
