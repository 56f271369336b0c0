/// BF16 activations times packed NVFP4 weights by wgmma, whatever the number of rows.
///
/// Weights are the rows of the product and items its columns: a warpgroup makes of 64 outputs'
/// codes and scales, both as they lie in memory, the BF16 numbers of the operand that comes from
/// registers, so that no weight goes back to shared memory. Two warpgroups, 128 outputs, share up
/// to 256 items; a group's items are divided into tiles alike, so that what unpacking costs is paid
/// as seldom as can be. Codes are fetched by bulk copies; items, where they lie side by side, as
/// boxes by TMA, and else row by row, by four warps that write them in TMA's swizzled order.
///
/// Every output is one accumulator to which K is added in ascending steps of 16: the bits are those
/// of kernels/dense/grouped_product.h over BF16 copies of the weights, of any tile and any number
/// of rows.
#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/dense/w4a16_cuda.h"
#include "kernels/dense/wgmma_cuda.h"
#include "kernels/dense/wgmma_registers_cuda.h"
#include "kernels/exact/w4a4_tile.h"

namespace lockstep::kernels {
namespace {

using wgmma::kDepth;
using wgmma::kMostGroups;

constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kOutputs = 64 * kConsumers;    // of a tile
constexpr int kPackedTiles = kOutputs / 16;  // of W4a4Weights
constexpr int kBoxItems = 32;                // that come at once where they lie side by side
constexpr int kChunkBytes = 576;             // of 64 columns of 16 outputs
constexpr int kRowBytes = kDepth * 2;        // of an item, in a stage

/// How a kernel divides its work and memory.
template <int items, int deep, int stages, int residents, bool gathers>
struct Shape {
  static constexpr int kItems = items;  // of a tile, at most
  static constexpr int kDeep = deep;    // chunks of 64 columns in a stage
  static constexpr int kStages = stages;
  static constexpr int kResidents = residents;
  static constexpr bool kGathers = gathers;  // items lie anywhere; else side by side
  static constexpr int kItemBytes = kItems * kRowBytes;
};
template <bool gathers>
using Many = Shape<256, 1, gathers ? 5 : 6, 1, gathers>;
using Few = Shape<32, 2, 6, 2, true>;

struct Params16 {
  const Bf16* x;
  std::int64_t x_stride;
  const std::byte* weights;
  std::int64_t expert_bytes;
  std::int64_t tile_bytes;
  const std::int32_t* offsets;
  const std::int32_t* from;
  const std::int32_t* to;
  float* y;
  std::int64_t y_stride;
  std::int32_t items;
  std::int32_t experts;
  std::int32_t out;
  std::int32_t depth;       // K
  std::int32_t chunks;      // of K
  std::int32_t columns;     // tiles side by side
  std::uint32_t row_units;  // from a row of x to the next, 16 bytes each; 1 where not aligned
  bool aligned;             // rows of x start at multiples of 16 bytes
};

template <typename S>
struct Shared16 {
  alignas(1024) std::uint8_t x[S::kStages][S::kDeep][S::kItemBytes];
  alignas(16) std::uint8_t w[S::kStages][kPackedTiles][S::kDeep * kChunkBytes];
  alignas(16) std::int32_t to[kConsumers][S::kItems];  // rows of y
  alignas(16) std::uint32_t
      rows[S::kGathers ? 2 : 1][16][S::kGathers ? (S::kItems + 63) / 64 * 4 : 1];  // of x
  std::uint64_t full[S::kStages];
  std::uint64_t empty[S::kStages];
  std::int32_t works[kMostGroups + 1];  // before each expert
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kRaised = 7;            // weights are 2^-7 too small
constexpr int kChunkCodeBytes = 512;  // of a chunk; then its scales

__device__ inline std::int32_t offset(const Params16& p, int expert) {
  return p.offsets != nullptr ? p.offsets[expert] : expert == 0 ? 0 : p.items;
}

struct Tile16 {
  std::int32_t expert;
  std::int32_t first;  // item
  std::int32_t items;
  std::int32_t column;  // the first output
};

template <typename S>
__device__ int tiles_of(const Params16& p, int expert) {
  return (offset(p, expert + 1) - offset(p, expert) + S::kItems - 1) / S::kItems;
}

/// Tiles go down an expert's items, then to its next outputs, then to the next expert.
template <typename S>
__device__ __forceinline__ Tile16 tile_of(const Params16& p, const std::int32_t* works, int index) {
  int low = 0;
  int high = p.experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (works[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const std::int32_t begin = offset(p, low);
  const int count = offset(p, low + 1) - begin;
  const int tiles = (count + S::kItems - 1) / S::kItems;
  const int at = index - works[low];
  const int tile = at % tiles;
  // The first ones have one item more.
  const int each = count / tiles, more = count % tiles;
  return {low, begin + tile * each + min(tile, more), each + (tile < more ? 1 : 0),
          at / tiles * kOutputs};
}

/// Counts the tiles before each expert, by the first warp.
template <typename S>
__device__ void count_works(const Params16& p, std::int32_t* before_expert, int lane) {
  std::int32_t before = 0;
  for (int first = 0; first < p.experts; first += 32) {
    const int expert = first + lane;
    const std::int32_t works = expert < p.experts ? tiles_of<S>(p, expert) * p.columns : 0;
    std::int32_t sum = works;
    for (int d = 1; d < 32; d *= 2) {
      const std::int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
      if (lane >= d) sum += other;
    }
    if (expert < p.experts) before_expert[expert] = before + sum - works;
    before += __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  if (lane == 0) before_expert[p.experts] = before;
}

__device__ void copy_weights(std::uint32_t shared, const std::byte* global, std::uint32_t bytes,
                             std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(wgmma::shared_address(barrier))
      : "memory");
}

/// Sixteen bytes of an item, zeros for such as are none.
__device__ __forceinline__ void copy_numbers(std::uint32_t shared, std::uint64_t x, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(x),
               "r"(bytes));
}
/// Numbers that start anywhere.
__device__ void copy_singly(std::uint32_t shared, const Bf16* x, bool exists) {
  std::uint32_t words[4] = {};
  if (exists) {
    for (int i = 0; i < 4; ++i) {
      words[i] = bits_of(x[2 * i]) | static_cast<std::uint32_t>(bits_of(x[2 * i + 1])) << 16;
    }
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

/// Arrives once what the thread copies is there.
__device__ void arrive_behind_copies(std::uint64_t* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(wgmma::shared_address(barrier))
      : "memory");
}

/// The same where items lie side by side; by one warp.
template <typename S>
__device__ __forceinline__ void produce_boxes(const Params16& p, const CUtensorMap& x,
                                              Shared16<S>& s) {
  const int lane = static_cast<int>(threadIdx.x);
  wgmma::Place at;
  const int all = s.works[p.experts];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tile16 tile = tile_of<S>(p, s.works, index);
    const int packed = min(kPackedTiles, (p.out - tile.column + 15) / 16);
    const int boxes = (tile.items + kBoxItems - 1) / kBoxItems;
    const std::byte* const weights = p.weights + tile.expert * p.expert_bytes +
                                     W4a4Weights::kHeaderBytes +
                                     (tile.column / 16 + lane) * p.tile_bytes;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      std::uint64_t* const full = &s.full[at.stage];
      wgmma::wait(&s.empty[at.stage], at.parity ^ 1u);
      if (lane == 0) wgmma::expect(full, packed * kChunkBytes + boxes * kBoxItems * kRowBytes);
      __syncwarp();
      if (lane < packed) {
        copy_weights(wgmma::shared_address(s.w[at.stage][lane]), weights + chunk * kChunkBytes,
                     kChunkBytes, full);
      } else if (lane >= kPackedTiles && lane - kPackedTiles < boxes) {
        const int box = lane - kPackedTiles;
        wgmma::copy_tile(s.x[at.stage][0] + box * kBoxItems * kRowBytes, &x, chunk * kDepth,
                         tile.first + box * kBoxItems, full);
      }
      at.advance(S::kStages);
    }
  }
}

template <typename S>
__device__ __forceinline__ void produce(const Params16& p, Shared16<S>& s) {
  constexpr int kRows = S::kItems / 16;  // of a thread
  const int thread = static_cast<int>(threadIdx.x);
  const int part = thread % 8, row = thread / 8;
  // Rows eight apart have their parts in the same order.
  const std::uint32_t place = row * kRowBytes + ((part ^ (row & 7)) << 4);
  wgmma::Place at;
  int parity = 0;
  const int all = s.works[p.experts];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tile16 tile = tile_of<S>(p, s.works, index);
    const int packed = min(kPackedTiles, (p.out - tile.column + 15) / 16);
    const std::byte* const weights = p.weights + tile.expert * p.expert_bytes +
                                     W4a4Weights::kHeaderBytes +
                                     (tile.column / 16 + thread % 32) * p.tile_bytes;
    // In shared memory: in registers their addresses would be kept. A thread's lie together.
    parity ^= 1;
    const int rounds = (tile.items + 15) / 16;
    for (int item = thread; item < rounds * 16; item += 128) {
      const int at_item = tile.first + min(item, tile.items - 1);
      const std::int32_t of = p.from == nullptr ? at_item : p.from[at_item];
      s.rows[parity][item % 16][item / 16] = static_cast<std::uint32_t>(of) * p.row_units;
    }
    asm volatile("bar.sync %0, 128;" ::"n"(1 + kConsumers) : "memory");
    // What is left of sixteen rows is filled up with the last, but where it is most of them.
    const int mine = S::kItems < 64 ? (tile.items - row + 15) / 16 : rounds;
    for (int chunk = 0; chunk < p.chunks; chunk += S::kDeep) {
      wgmma::wait(&s.empty[at.stage], at.parity ^ 1u);
      const int chunks = min(S::kDeep, p.chunks - chunk);
      if (thread < 32) {
        const int bytes = chunks * kChunkBytes;
        if (thread == 0) wgmma::expect(&s.full[at.stage], packed * bytes);
        __syncwarp();
        if (thread < packed) {
          copy_weights(wgmma::shared_address(s.w[at.stage][thread]), weights + chunk * kChunkBytes,
                       static_cast<std::uint32_t>(bytes), &s.full[at.stage]);
        }
      }
#pragma unroll
      for (int deep = 0; deep < S::kDeep; ++deep) {
        if (deep >= chunks) break;
        const int k = (chunk + deep) * kDepth + part * 8;
        const bool exists = k < p.depth;
        const Bf16* const x = p.x + (exists ? k : 0);
        const std::uint32_t to = wgmma::shared_address(s.x[at.stage][deep]) + place;
        if (!p.aligned) {
          for (int i = 0; i < mine; ++i) {
            copy_singly(to + i * 16 * kRowBytes, x + s.rows[parity][row][i] * p.x_stride, exists);
          }
          continue;
        }
        const auto from = reinterpret_cast<std::uint64_t>(x);
        const int bytes = exists ? 16 : 0;
        const auto copy = [&](int i, std::uint32_t units) {
          std::uint64_t address;
          asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(units), "l"(from));
          copy_numbers(to + i * 16 * kRowBytes, address, bytes);
        };
        int i = 0;
        if constexpr (kRows >= 4) {
#pragma unroll 2
          for (; i + 4 <= mine; i += 4) {
            const uint4 rows = *reinterpret_cast<const uint4*>(&s.rows[parity][row][i]);
            copy(i, rows.x);
            copy(i + 1, rows.y);
            copy(i + 2, rows.z);
            copy(i + 3, rows.w);
          }
        }
        for (; i < mine; ++i) copy(i, s.rows[parity][row][i]);
      }
      if (p.aligned) {
        arrive_behind_copies(&s.full[at.stage]);
      } else {
        wgmma::arrive(&s.full[at.stage]);
      }
      at.advance(S::kStages);
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ std::uint32_t multiply_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/// What a lane reads of a chunk. Lane 4 g + t of the packed order has columns 4 t to 4 t + 3, of
/// the product's 2 t and the next, and 2 t + 8 and the next.
struct Codes16 {
  std::uint32_t left[4], right[4], scales[2];

  __device__ void read(const std::uint8_t* chunk, int lane) {
    const std::uint8_t* const from = chunk + lane / 4 * 64 + lane % 4 / 2 * 16;
    const uint4 l = *reinterpret_cast<const uint4*>(from);
    const uint4 r = *reinterpret_cast<const uint4*>(from + 32);
    const uint2 s = *reinterpret_cast<const uint2*>(chunk + kChunkCodeBytes + lane / 4 * 8);
    left[0] = l.x, left[1] = l.y, left[2] = l.z, left[3] = l.w;
    right[0] = r.x, right[1] = r.y, right[2] = r.z, right[3] = r.w;
    scales[0] = s.x, scales[1] = s.y;
  }

  /// The lane's share of the first operand, of block i of 16 columns: rows g and g + 8.
  __device__ __forceinline__ void unpack(int i, std::uint32_t mine, std::uint32_t (&a)[4]) const {
    // Byte j: two neighbouring columns of a[j], the first one in the low nibble.
    const std::uint32_t codes = __byte_perm(left[i], right[i], mine);
    const std::uint32_t low = codes << 4;
    // Scale bytes of outputs g and g + 8, where they mean s8 2^-120; then s8 2^119.
    const std::uint32_t bits = __byte_perm(scales[i / 2], 0, i % 2 == 0 ? 0x4140 : 0x4342) << 4;
    const std::uint32_t scale = multiply_pair(multiply_pair(bits, 0x7B807B80u), 0x7B007B00u);
    const std::uint32_t of_row[2] = {__byte_perm(scale, 0, 0x1010), __byte_perm(scale, 0, 0x3232)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Codes to the upper ends of the halves; then, as BF16, times 2^-126.
      const std::uint32_t raised = __byte_perm(low, codes, (4 + j) << 12 | j << 4);
      const std::uint32_t lowered = (raised & 0x80008000u) | (raised >> 6 & 0x01C001C0u);
      a[j] = multiply_pair(lowered, of_row[j % 2]);
    }
  }
};

/// d = the products of 64 outputs with up to kN items. While some steps are multiplied the operand
/// of the next ones is unpacked.
template <typename S, int kN>
__device__ __forceinline__ void multiply_tile(const Params16& p, Shared16<S>& s, wgmma::Place& at,
                                              float (&d)[S::kItems / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int packed = static_cast<int>(threadIdx.x) / 32 - 4;
  const std::uint32_t mine = lane % 2 == 0 ? 0x6420u : 0x7531u;
  int before = -1;
  std::uint32_t a[2][4];
  const auto multiply = [&](int chunk, auto odd) {
    constexpr int kAt = decltype(odd)::value % S::kDeep;  // chunk of the stage
    if constexpr (kAt == 0) {
      wgmma::wait(&s.full[at.stage], at.parity);
      // Items came as threads' copies.
      if constexpr (S::kGathers) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    Codes16 codes;
    codes.read(s.w[at.stage][packed] + kAt * kChunkBytes, lane);
    const std::uint64_t b = wgmma::descriptor(wgmma::shared_address(s.x[at.stage][kAt]));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      codes.unpack(k, mine, a[k % 2]);
      wgmma::begin();
      wgmma::multiply<kN>(d, a[k % 2], b + k * 2, chunk > 0 || k > 0);
      wgmma::commit();
      // More in flight the compiler does not believe in: it would wait for each.
      wgmma::wait_for<1>();
      if (kAt == 0 && k == 0) {  // the stage before has been multiplied
        __syncwarp();
        if (before >= 0 && lane == 0) wgmma::arrive(&s.empty[before]);
        before = at.stage;
      }
    }
    if (kAt == S::kDeep - 1 || chunk + 1 == p.chunks) at.advance(S::kStages);
  };
  int chunk = 0;
  for (; chunk + 1 < p.chunks; chunk += 2) {
    multiply(chunk, std::integral_constant<int, 0>{});
    multiply(chunk + 1, std::integral_constant<int, 1>{});
  }
  if (chunk < p.chunks) multiply(chunk, std::integral_constant<int, 0>{});
  wgmma::wait_for<0>();
  __syncwarp();
  if (lane == 0) wgmma::arrive(&s.empty[before]);
}

/// Of an output's sum.
struct Factor {
  float first, second;
  __device__ float times(float sum) const { return __fmul_rn(__fmul_rn(sum, first), second); }
};

/// Lane 4 g + t of warp v holds of outputs 16 v + g and 16 v + g + 8 items 8 j + 2 t and the next.
template <typename S, int kN>
__device__ __forceinline__ void store(const Params16& p, const std::int32_t* to, const Tile16& tile,
                                      const Factor& factor, const float (&d)[S::kItems / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int out = tile.column + (static_cast<int>(threadIdx.x) / 32 - 4) * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const int2 rows = *reinterpret_cast<const int2*>(to + j * 8 + lane % 4 * 2);
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      if (j * 8 + lane % 4 * 2 + next >= tile.items) continue;
      float* const y = p.y + (next == 0 ? rows.x : rows.y) * p.y_stride + out;
      if (out < p.out) y[0] = factor.times(d[4 * j + next]);
      if (out + 8 < p.out) y[8] = factor.times(d[4 * j + next + 2]);
    }
  }
}

template <typename S, int kN>
__device__ __forceinline__ void make_tile(const Params16& p, Shared16<S>& s, wgmma::Place& at,
                                          float (&d)[S::kItems / 2], const Tile16& tile) {
  const auto n = *reinterpret_cast<const std::int32_t*>(p.weights + tile.expert * p.expert_bytes +
                                                        kExponentAt);
  // Where outputs go is asked for now and looked at when it is there.
  constexpr int kEach = (S::kItems + 127) / 128;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  std::int32_t rows[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int item = tile.first + min(thread + i * 128, tile.items - 1);
    rows[i] = p.to == nullptr ? item : p.to[item];
  }
  // Else the compiler would keep for this what others leave in its registers.
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) d[i] = 0.0f;
  multiply_tile<S, kN>(p, s, at, d);
  std::int32_t* const to = s.to[consumer];
  const auto meet = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory"); };
  meet();  // those of the tile before have been read
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (thread + i * 128 < S::kItems) to[thread + i * 128] = rows[i];
  }
  meet();
  const PowerPair power = power_pair(n + kRaised);
  const Factor factor = {power.first, power.second};
  store<S, kN>(p, to, tile, factor, d);
}

template <typename S>
__device__ __forceinline__ void consume(const Params16& p, Shared16<S>& s) {
  wgmma::Place at;
  float d[S::kItems / 2];
  const int all = s.works[p.experts];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tile16 tile = tile_of<S>(p, s.works, index);
    const auto make = [&](auto n) { make_tile<S, decltype(n)::value>(p, s, at, d, tile); };
    if constexpr (S::kItems == 32) {
      if (tile.items <= 8) {
        make(std::integral_constant<int, 8>{});
      } else if (tile.items <= 16) {
        make(std::integral_constant<int, 16>{});
      } else {
        make(std::integral_constant<int, 32>{});
      }
    } else {
      // Above 128 items by sixteens, below by twos of them.
      const int unit = tile.items <= 128 ? 32 : 16;
      const int least = (tile.items + unit - 1) / unit * unit;
      const auto take = [&](auto n) {
        if (least == decltype(n)::value) make(n);
      };
      take(std::integral_constant<int, 32>{});
      take(std::integral_constant<int, 64>{});
      take(std::integral_constant<int, 96>{});
      take(std::integral_constant<int, 128>{});
      take(std::integral_constant<int, 144>{});
      take(std::integral_constant<int, 160>{});
      take(std::integral_constant<int, 176>{});
      take(std::integral_constant<int, 192>{});
      take(std::integral_constant<int, 208>{});
      take(std::integral_constant<int, 224>{});
      take(std::integral_constant<int, 240>{});
      take(std::integral_constant<int, 256>{});
    }
  }
}

#endif

template <typename S>
__global__ void __launch_bounds__(kThreads, S::kResidents)
    w4a16_hopper_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ Params16 p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<Shared16<S>*>(shared_bytes);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == 0) count_works<S>(p, s.works, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 32) {
    for (int i = 0; i < S::kStages; ++i) {
      wgmma::init_barrier(&s.full[i], S::kGathers ? 1 + 128 : 1);
      wgmma::init_barrier(&s.empty[i], 4 * kConsumers);
    }
    wgmma::publish_barriers();
  }
  __syncthreads();
  if (warp < 4) {
    if constexpr (S::kResidents == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if constexpr (S::kGathers) {
      produce<S>(p, s);
    } else if (warp == 0) {
      produce_boxes<S>(p, x, s);
    }
  } else {
    if constexpr (S::kResidents == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<S>(p, s);
  }
#endif
}

template <typename S>
void launch(Params16 p, std::int64_t rows, std::int64_t items, std::int8_t device, Stream stream) {
  constexpr int kBytes = sizeof(Shared16<S>);
  static_assert((kBytes + 1024) * S::kResidents <= 233'472);
  cuda::allow_shared(w4a16_hopper_kernel<S>, kBytes);
  CUtensorMap x{};
  if constexpr (!S::kGathers) x = wgmma::tensor_map(p.x, rows, p.depth, p.x_stride, kBoxItems);
  p.columns = (p.out + kOutputs - 1) / kOutputs;
  const std::int64_t experts = std::min<std::int64_t>(p.experts, items);
  const std::int64_t most = (items / S::kItems + experts) * p.columns;
  const auto grid = static_cast<unsigned>(
      std::min<std::int64_t>(most, std::int64_t{cuda::multiprocessors(device)} * S::kResidents));
  w4a16_hopper_kernel<S><<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(x, p);
  cuda::require_launch("w4a16_hopper_kernel");
}

}  // namespace

void w4a16_hopper_cuda(const W4a16Args& args, std::int64_t items, Stream stream) {
  const cuda::OnDevice scope(args.w.device.index);
  if (args.w.experts > kMostGroups) {
    throw Error(cat({"w4a16: ", args.w.experts, " experts, at most ", kMostGroups}));
  }
  Params16 p{};
  p.x = args.x.data;
  p.x_stride = args.x.stride[0];
  p.weights = args.w.data;
  p.expert_bytes = W4a4Weights::expert_bytes(args.w.out, args.w.cols);
  p.tile_bytes = W4a4Weights::tile_bytes(args.w.cols);
  p.offsets = args.offsets.data;
  p.from = args.from.data;
  p.to = args.to.data;
  p.y = args.out.data;
  p.y_stride = args.out.stride[0];
  p.items = static_cast<std::int32_t>(items);
  p.experts = args.w.experts;
  p.out = args.w.out;
  p.depth = args.w.cols;
  p.chunks = (args.w.cols + kDepth - 1) / kDepth;
  const auto starts = [](const void* data, std::int64_t stride_bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
  };
  p.aligned =
      starts(p.x, p.x_stride * 2) && args.x.shape[0] * (p.x_stride / 8) < (std::int64_t{1} << 32);
  p.row_units = p.aligned ? static_cast<std::uint32_t>(p.x_stride / 8) : 1;
  const auto go = [&](auto shape) {
    launch<decltype(shape)>(p, args.x.shape[0], items, args.w.device.index, stream);
  };
  if (items <= kW4a16FewItems * args.w.experts) {
    go(Few{});
  } else if (p.from != nullptr || !p.aligned) {
    go(Many<true>{});
  } else {
    go(Many<false>{});
  }
}

}  // namespace lockstep::kernels
