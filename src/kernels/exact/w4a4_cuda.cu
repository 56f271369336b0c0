/// The exact product on a CUDA device.
///
/// A block of threads takes up to eight items of one expert times some groups of 32 outputs; four
/// of its warps share the columns of a tile of 16 outputs. Weights stream through a ring in shared
/// memory, a chunk of 64 columns a step. In one step a lane ends up with the dots of one block of
/// the chunk alone: the activations of block i stand in columns 2 i and 2 i + 1 of the tensor
/// core's operand and zeros elsewhere, so that four products into one accumulator give each lane
/// its own block, and it needs the scales of that block only.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/w4a4_cuda.h"

namespace lockstep::kernels {
namespace {

using namespace w4a4_device;

constexpr int kItems = 8;   // of a block of threads
constexpr int kSplits = 4;  // warps that share a tile's columns
constexpr int kTiles = 2;   // of 16 outputs at a time
constexpr int kWarps = kSplits * kTiles;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroup = 16 * kTiles;  // outputs at a time
constexpr int kStages = 4;
constexpr int kSegment = 2048;  // columns whose activations are unpacked at once
constexpr int kSegmentChunks = kSegment / kChunk;
constexpr int kSegmentBlocks = kSegment / 16;
// Rows of neighbouring items are 16 banks apart: one load reads two rows, 64 bytes of each.
constexpr int kRowBytes = kSegment + 64;

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
  std::int64_t tile_bytes;
  std::int32_t experts;
  std::int32_t out_rows;
  std::int32_t chunks;
  std::int32_t blocks;
  const std::int32_t* offsets;
  const std::int32_t* from;
  const std::int32_t* to;
  std::int64_t items;
  float* out;
  std::int64_t out_stride;
  std::int32_t base_exponent;  // -20, or with a residual -22 and less
  std::int32_t groups;         // of outputs, taken by one block of threads
  std::int32_t shares;         // blocks of threads that a unit's outputs take
};

struct Unit {
  std::int32_t expert;
  std::int64_t first;
  std::int32_t count;  // 0: there is no such unit
};

/// The items of unit `index`: the experts' items in order, eight to a unit. All lanes call it.
__device__ Unit find_unit(const Params& p, std::int32_t index, int lane) {
  if (p.offsets == nullptr) {
    const std::int64_t first = std::int64_t{index} * kItems;
    const std::int64_t left = p.items - first;
    return {0, first, static_cast<std::int32_t>(left < 0 ? 0 : left < kItems ? left : kItems)};
  }
  std::int32_t before = 0;
  for (std::int32_t e = 0; e < p.experts; e += 32) {
    const std::int32_t mine = e + lane;
    std::int32_t begin = 0;
    std::int32_t end = 0;
    if (mine < p.experts) {
      begin = p.offsets[mine];
      end = p.offsets[mine + 1];
    }
    const std::int32_t units = (end - begin + kItems - 1) / kItems;
    std::int32_t sum = units;
    for (int d = 1; d < 32; d *= 2) {
      const std::int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
      if (lane >= d) sum += other;
    }
    const std::int32_t start = before + sum - units;
    const unsigned here = __ballot_sync(0xFFFFFFFFu, start <= index && index < start + units);
    if (here != 0) {
      const int owner = __ffs(static_cast<int>(here)) - 1;
      begin = __shfl_sync(0xFFFFFFFFu, begin + (index - start) * kItems, owner);
      end = __shfl_sync(0xFFFFFFFFu, end, owner);
      return {e + owner, begin, end - begin < kItems ? end - begin : kItems};
    }
    before = __shfl_sync(0xFFFFFFFFu, before + sum, 31);
  }
  return {0, 0, 0};
}

template <int kParts>
struct Shared {
  alignas(16) std::uint8_t ring[kWarps][kStages][kChunkBytes];
  // Signed bytes of each item; scales and -64 times the sum of the block's codes of two items.
  alignas(16) std::uint8_t a[kParts][kItems][kRowBytes];
  alignas(16) int4 meta[kParts][kItems / 2][kSegmentBlocks];
  std::int64_t sums[kSplits][kTiles][kItems][16];
  std::int32_t exponent[kItems];
  std::int32_t to[kItems];
};

/// A byte at a time where rows do not start at multiples of eight.
__device__ uint2 load_block(const std::uint8_t* codes) {
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

/// Unpacks a segment of the unit's items, rows that it lacks as zeros up to an even count.
template <int kParts>
__device__ void unpack(const Params& p, Shared<kParts>& s, const Unit& unit, int segment) {
  const int first_block = segment * kSegmentBlocks;
  const int chunks = min(kSegmentChunks, p.chunks - segment * kSegmentChunks);
  const int blocks = chunks * kBlocksInChunk;
  const int rows = (unit.count + 1) / 2 * 2;
  for (int i = static_cast<int>(threadIdx.x); i < kParts * rows * blocks; i += kThreads) {
    const int block = i % blocks;
    const int row = i / blocks % rows;
    const int part = i / blocks / rows;
    uint4 bytes{0, 0, 0, 0};
    std::int32_t scale = 0;
    std::int32_t sum = 0;
    if (row < unit.count && first_block + block < p.blocks) {
      const Part& from = p.part[part];
      const std::int64_t item = unit.first + row;
      const std::int64_t r = p.from == nullptr ? item : p.from[item];
      const uint2 codes = load_block(from.codes + r * from.code_stride + (first_block + block) * 8);
      bytes = {signed_codes(codes.x), signed_codes(codes.x >> 16), signed_codes(codes.y),
               signed_codes(codes.y >> 16)};
      sum = __dp4a(static_cast<int>(bytes.x), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(bytes.y), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(bytes.z), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(bytes.w), 0x01010101, sum);
      scale = from.factor * scale_units(from.scales[r * from.scale_stride + first_block + block]);
    }
    *reinterpret_cast<uint4*>(&s.a[part][row][block * 16]) = bytes;
    auto* meta = reinterpret_cast<std::int32_t*>(&s.meta[part][row / 2][block]);
    meta[row % 2] = scale;
    meta[2 + row % 2] = -64 * sum;
  }
}

/// One chunk of a tile times the items.
template <int kParts, int kPairs>
__device__ void multiply_chunk(std::int64_t (&acc)[kPairs][4], const Shared<kParts>& s,
                               const std::uint8_t* chunk, int at, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const uint4 codes = *reinterpret_cast<const uint4*>(chunk + lane * 16);
  const std::uint32_t scales =
      *reinterpret_cast<const std::uint16_t*>(chunk + kChunkCodeBytes + lane * 2);
  const std::int32_t low_scale = scale_units(scales & 0xFFu);
  const std::int32_t high_scale = scale_units(scales >> 8);
  std::uint32_t w[kBlocksInChunk][2];
  const std::uint32_t words[kBlocksInChunk] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < kBlocksInChunk; ++i) {
    const std::uint32_t flipped = words[i] ^ 0x88888888u;
    w[i][0] = raised_codes(words[i], flipped);
    w[i][1] = raised_codes(words[i] >> 16, flipped >> 16);
  }
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::uint32_t a = *reinterpret_cast<const std::uint32_t*>(
          &s.a[part][2 * pair + g % 2][at * kChunk + g / 2 * 16 + t * 4]);
      const int4 meta = s.meta[part][pair][at * kBlocksInChunk + t];
      std::int32_t d[4] = {meta.z, meta.w, meta.z, meta.w};
#pragma unroll
      for (int i = 0; i < kBlocksInChunk; ++i) {
        multiply_block(d, w[i][0], w[i][1], g / 2 == i ? a : 0u);
      }
      acc[pair][0] += std::int64_t{d[0] * low_scale} * meta.x;
      acc[pair][1] += std::int64_t{d[1] * low_scale} * meta.y;
      acc[pair][2] += std::int64_t{d[2] * high_scale} * meta.x;
      acc[pair][3] += std::int64_t{d[3] * high_scale} * meta.y;
    }
  }
}

/// What a warp reads: every fourth chunk of its tile, of one group of outputs after another.
struct Stream32 {
  const std::byte* tile;  // of the group that is being fetched
  std::int64_t step;      // to the next group's
  int chunk;
  int split;
  int left;  // groups, this one included
};

__device__ void fetch(const Params& p, Stream32& from, std::uint8_t* slot, int lane) {
  if (from.left > 0 && from.chunk < p.chunks) {
    const std::byte* chunk = from.tile + std::int64_t{from.chunk} * kChunkBytes;
    copy_async_16(slot + lane * 16, chunk + lane * 16);
    if (lane < 4) copy_async_16(slot + 512 + lane * 16, chunk + 512 + lane * 16);
    from.chunk += kSplits;
    if (from.chunk >= p.chunks) {
      from.chunk = from.split;
      from.tile += from.step;
      --from.left;
    }
  }
  commit_async();
}

template <int kParts, int kPairs>
__device__ void run(const Params& p, Shared<kParts>& s, const Unit& unit, int first_group,
                    int end_group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int split = warp % kSplits;
  const int tile = warp / kSplits;
  const int tiles = (p.out_rows + 15) / 16;
  const std::byte* expert = p.weights + unit.expert * p.expert_bytes;
  const std::int32_t n_w = *reinterpret_cast<const std::int32_t*>(expert);
  const int segments = (p.chunks + kSegmentChunks - 1) / kSegmentChunks;

  const int first_tile = first_group * kTiles + tile;
  const int my_tiles = (min(tiles, end_group * kTiles) - first_tile + kTiles - 1) / kTiles;
  Stream32 from{expert + W4a4Weights::kHeaderBytes + first_tile * p.tile_bytes,
                kTiles * p.tile_bytes, split, split, split < p.chunks ? my_tiles : 0};
  int slot = 0;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(p, from, s.ring[warp][i], lane);

  for (int group = first_group; group < end_group; ++group) {
    std::int64_t acc[kPairs][4] = {};
    const bool has_tile = group * kTiles + tile < tiles;
    for (int segment = 0; segment < segments; ++segment) {
      if (segments > 1 || group == first_group) {
        __syncthreads();
        unpack(p, s, unit, segment);
        __syncthreads();
      }
      const int chunks = min(kSegmentChunks, p.chunks - segment * kSegmentChunks);
      for (int at = split; has_tile && at < chunks; at += kSplits) {
        wait_async<kStages - 2>();
        __syncwarp();
        fetch(p, from, s.ring[warp][(slot + kStages - 1) % kStages], lane);
        multiply_chunk<kParts, kPairs>(acc, s, s.ring[warp][slot], at, lane);
        slot = (slot + 1) % kStages;
      }
    }
    // Lane t has item 2 pair + t % 2 of output g + 8 (t / 2).
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const std::int64_t sum = sum_over_quad(acc[pair], lane % 4);
      s.sums[split][tile][2 * pair + lane % 2][lane / 4 + lane % 4 / 2 * 8] = sum;
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) / kGroup;
    const int column = static_cast<int>(threadIdx.x) % kGroup;
    if (row < unit.count && group * kGroup + column < p.out_rows) {
      std::int64_t sum = 0;
      for (int i = 0; i < kSplits; ++i) sum += s.sums[i][column / 16][row][column % 16];
      p.out[s.to[row] * p.out_stride + group * kGroup + column] =
          scaled_sum(sum, s.exponent[row] + n_w);
    }
    __syncthreads();
  }
  wait_async<0>();
}

template <int kParts>
__global__ void __launch_bounds__(kThreads) w4a4_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kParts>*>(shared_bytes);
  const auto index = static_cast<std::int32_t>(blockIdx.x);
  const Unit unit = find_unit(p, index / p.shares, static_cast<int>(threadIdx.x) % 32);
  if (unit.count == 0) return;
  const int first_group = index % p.shares * p.groups;
  const int end_group = min(first_group + p.groups, (p.out_rows + kGroup - 1) / kGroup);
  const int row = static_cast<int>(threadIdx.x);
  if (row < unit.count) {  // read after the barrier behind unpack()
    const std::int64_t item = unit.first + row;
    const std::int64_t from = p.from == nullptr ? item : p.from[item];
    s.exponent[row] = exponent_of(p.global[from * p.global_stride]) + p.base_exponent;
    s.to[row] = p.to == nullptr ? static_cast<std::int32_t>(item) : p.to[item];
  }
  switch ((unit.count + 1) / 2) {
    case 1: return run<kParts, 1>(p, s, unit, first_group, end_group);
    case 2: return run<kParts, 2>(p, s, unit, first_group, end_group);
    case 3: return run<kParts, 3>(p, s, unit, first_group, end_group);
    default: return run<kParts, 4>(p, s, unit, first_group, end_group);
  }
}

Part part_of(const PackedView<const std::uint8_t>& packed, std::int32_t factor) {
  return {packed.codes.data, packed.scales.data, packed.codes.stride[0], packed.scales.stride[0],
          factor};
}

template <int kParts>
void launch(const Params& params, unsigned grid, Stream stream) {
  constexpr int kBytes = sizeof(Shared<kParts>);
  static const cudaError_t raised = cudaFuncSetAttribute(
      w4a4_kernel<kParts>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  cuda::require(raised, "cudaFuncSetAttribute");
  w4a4_kernel<kParts><<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(params);
  cuda::require_launch("w4a4_kernel");
}

// ---- Weights ----

struct FillParams {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t code_stride;
  std::int64_t scale_stride;
  const float* global;
  std::byte* expert;
  std::int64_t tile_bytes;
  std::int32_t first_row;
  std::int32_t blocks;
  std::int64_t count;  // rows * blocks
};

/// A thread puts a block of one row where it is read: lane 4 g + t of the product reads 16 bytes
/// of a chunk, of each of its four blocks columns 4 t .. 4 t + 3 of outputs g and g + 8.
__global__ void w4a4_fill_kernel(const __grid_constant__ FillParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const std::int64_t r = i / p.blocks;
  const std::int64_t block = i % p.blocks;
  const std::int64_t row = p.first_row + r;
  const auto g = static_cast<int>(row % 8);
  const auto high = static_cast<int>(row / 8 % 2);
  std::byte* chunk = p.expert + W4a4Weights::kHeaderBytes + row / 16 * p.tile_bytes +
                     block / kBlocksInChunk * kChunkBytes;
  const auto at = static_cast<int>(block % kBlocksInChunk);
  const std::uint8_t* codes = p.codes + r * p.code_stride + block * 8;
  for (int t = 0; t < 4; ++t) {
    const auto pair = static_cast<std::uint16_t>(codes[2 * t] | codes[2 * t + 1] << 8);
    *reinterpret_cast<std::uint16_t*>(chunk + (4 * g + t) * 16 + at * 4 + high * 2) = pair;
  }
  chunk[kChunkCodeBytes + (4 * g + at) * 2 + high] =
      static_cast<std::byte>(p.scales[r * p.scale_stride + block]);
  if (i == 0) *reinterpret_cast<std::int32_t*>(p.expert) = exponent_of(p.global[0]);
}

}  // namespace

void w4a4_cuda(const W4a4Args& args, std::int64_t items, Stream stream) {
  const cuda::OnDevice scope(args.w.device.index);
  const bool has_residual = !args.residual.codes.empty();
  Params p{};
  p.part[0] = part_of(args.a, has_residual ? 4 << args.residual_halvings : 1);
  if (has_residual) p.part[1] = part_of(args.residual, -1);
  p.global = args.a.global.data;
  p.global_stride = args.a.global.stride[0];
  p.weights = args.w.data;
  p.expert_bytes = W4a4Weights::expert_bytes(args.w.out, args.w.cols);
  p.tile_bytes = W4a4Weights::tile_bytes(args.w.cols);
  p.experts = args.w.experts;
  p.out_rows = args.w.out;
  p.chunks = (args.w.cols + kChunk - 1) / kChunk;
  p.blocks = args.w.cols / 16;
  p.offsets = args.offsets.data;
  p.from = args.from.data;
  p.to = args.to.data;
  p.items = items;
  p.out = args.out.data;
  p.out_stride = args.out.stride[0];
  p.base_exponent = has_residual ? -22 - args.residual_halvings : -20;

  // Every expert may end with a unit that is not full.
  const std::int64_t full = (items + kItems - 1) / kItems;
  const std::int64_t units =
      args.offsets.empty() ? full : std::min<std::int64_t>(items, full + args.w.experts - 1);
  const std::int64_t likely =
      std::min<std::int64_t>(units, std::max<std::int64_t>(full, args.w.experts));
  const std::int64_t groups = (args.w.out + kGroup - 1) / kGroup;
  const std::int64_t enough = 12 * std::int64_t{cuda::multiprocessors(args.w.device.index)};
  p.groups = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(likely * groups / enough, 1, std::min<std::int64_t>(groups, 8)));
  p.shares = static_cast<std::int32_t>((groups + p.groups - 1) / p.groups);
  const auto grid = static_cast<unsigned>(units * p.shares);
  return has_residual ? launch<2>(p, grid, stream) : launch<1>(p, grid, stream);
}

void w4a4_fill_cuda(const W4a4Weights& weights, std::int32_t expert, std::int32_t first_row,
                    const PackedView<const std::uint8_t>& rows, Stream stream) {
  const cuda::OnDevice scope(weights.device.index);
  FillParams p{};
  p.codes = rows.codes.data;
  p.scales = rows.scales.data;
  p.code_stride = rows.codes.stride[0];
  p.scale_stride = rows.scales.stride[0];
  p.global = rows.global.data;
  p.expert = weights.expert(expert);
  p.tile_bytes = W4a4Weights::tile_bytes(weights.cols);
  p.first_row = first_row;
  p.blocks = weights.cols / 16;
  p.count = rows.codes.shape[0] * p.blocks;
  const auto grid = static_cast<unsigned>((p.count + 255) / 256);
  w4a4_fill_kernel<<<grid, 256, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("w4a4_fill_kernel");
}

}  // namespace lockstep::kernels
