/// For .cu files alone: the attention kernel of one format.
#pragma once

#include <cstdint>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/dense/attention_loader_cuda.h"
#include "kernels/dense/attention_prefill_cuda.h"
#include "kernels/dense/attention_queries_cuda.h"

namespace lockstep::kernels {

inline constexpr int kMostHeads = 4;  // KV heads of a block of threads
/// Of a block: a warp for each half of a split and head, and four that load a track each.
inline constexpr int kBlockThreads = 32 * 3 * kMostHeads;

/// Blocks of threads that a multiprocessor holds at a time.
constexpr int residents_of(KvFormat format, int groups, int dim) {
  if (groups > 1) return 1;
  return dim == 32 ? 4 : dim == 64 ? 3 : format == KvFormat::kNvfp4 ? 2 : 1;
}
/// Blocks of keys or values in shared memory.
constexpr int stages_of(KvFormat format, int groups) {
  const bool few = format == KvFormat::kBf16 || (format == KvFormat::kNvfp4 && groups == 1);
  return kTracks * (few ? 2 : 3);
}

/// A piece of work: a row against a block's heads, one split of it where splits go apart.
struct AttentionItem {
  int row;
  int head_block;
  int split;  // or 0

  /// The index-th. Splits run slowest, so that those which are empty come last.
  __device__ AttentionItem(const AttentionParams& p, int index) {
    const int rest = index / p.rows;
    row = index - rest * p.rows;
    split = rest / p.head_blocks;
    head_block = rest - split * p.head_blocks;
  }
};

/// Where a warp is among the splits of its block's items.
struct WalkState {
  int index;  // of the item
  int later;  // splits of it that are behind
  int end;    // keys that the row sees
};

/// In shared memory: the warps that take keys have no registers for what they seldom need. Each
/// thread has its own, for threads of a warp need not go side by side.
using SharedWalkState = volatile WalkState;
struct ThreadState {
  SharedWalkState* walk;
  volatile unsigned* place;  // in the ring
};

/// Goes over the splits that have keys.
template <typename State>
class Walk {
 public:
  __device__ Walk(const AttentionParams& p, State* at) : p_(p), at_(at) {
    at_->index = static_cast<int>(blockIdx.x);
    at_->later = 0;
  }

  /// Goes on to a split with keys; false: there is none.
  __device__ bool find() {
    for (int index = at_->index; index < p_.items; index += static_cast<int>(gridDim.x)) {
      const AttentionItem item(p_, index);
      const int end = p_.positions[item.row] + 1;
      if ((item.split + at_->later) * kSplitKeys >= end) continue;
      at_->index = index;
      at_->end = end;
      return true;
    }
    return false;
  }
  __device__ void next() {
    if (p_.sums == nullptr && (at_->later + 1) * kSplitKeys < at_->end) {
      at_->later = at_->later + 1;
    } else {
      at_->later = 0;
      at_->index = at_->index + static_cast<int>(gridDim.x);
    }
  }

  __device__ AttentionItem item() const { return AttentionItem(p_, at_->index); }
  __device__ int split() const { return item().split + at_->later; }
  __device__ bool is_last() const { return (split() + 1) * kSplitKeys >= at_->end; }
  __device__ int end() const { return at_->end; }

 private:
  const AttentionParams& p_;
  State* at_;
};

/// Keys of a split and of its halves.
struct SplitBlocks {
  int begin;  // of the split
  int end;    // of its keys

  __device__ SplitBlocks(int split, int last)
      : begin(split * kSplitKeys), end(min(begin + kSplitKeys, last)) {}
  __device__ int begin_of(int half) const { return begin + half * kTurnKeys; }
  __device__ int keys(int half) const {
    const int turns = (end - begin) / (2 * kTurnKeys);
    const int rest = (end - begin) % (2 * kTurnKeys) - half * kTurnKeys;
    return turns * kTurnKeys + max(0, min(rest, kTurnKeys));
  }
};

template <KvFormat kFormat, int kDim, int kGroups, int kHeads>
struct AttentionShape {
  static constexpr int kKeys = keys_at_once(kFormat);
  static constexpr int kStages = stages_of(kFormat, kGroups);
  static constexpr int kStride = kHeads > 0 ? HeadBytes<kFormat, kDim>::stride_of(kHeads) : 0;
  using WarpQueries = Queries<kFormat, kDim, kGroups>;
  using Rows = RowsOfBlock<kFormat, kDim, kHeads>;
  static constexpr int kOwn = WarpQueries::kOwn;
  static constexpr int kQueries = WarpQueries::kKeepsShared ? 16 * kDim : 0;
  static constexpr int kKept = WarpQueries::template kKeptBytes<kOwn>;
  using BlockRing = Ring<kStages>;
  using BlockLoader = Loader<kKeys, kStages, kStride>;

  static __host__ __device__ int stride(const AttentionParams& p) {
    return kHeads > 0 ? kStride : p.stride;
  }
  static __host__ __device__ SharedLayout layout(const AttentionParams& p) {
    const int heads = kHeads > 0 ? kHeads : p.block_heads;
    return SharedLayout(p, heads, kQueries, 2 * kKept, kKeys * stride(p), kStages);
  }
};

/// By the warp that loads a track.
template <typename Shape>
__device__ inline void load_items(const AttentionParams& p, const typename Shape::BlockRing& ring,
                                  unsigned char* shared, const SharedLayout& layout, int track) {
  typename Shape::BlockLoader loader(p, ring, shared, layout, track);
  WalkState state;
  RingPlace to(track);
  for (Walk<WalkState> walk(p, &state); walk.find(); walk.next()) {
    const AttentionItem item = walk.item();
    const SplitBlocks blocks(walk.split(), walk.end());
    const int begin = blocks.begin_of(track % 2);
    const int keys = blocks.keys(track % 2);
    if (keys == 0) continue;
    const std::int32_t* const table = p.table + p.sequence[item.row] * p.table_stride;
    PagePlace from = loader.find(table, begin, blocks.end, item.head_block);
    for (int taken = 0; taken < keys;) {
      loader.start(to, from, min(Shape::kKeys, keys - taken));
      to.next(Shape::kStages);
      taken += Shape::kKeys;
      from.advance(taken % kTurnKeys == 0 ? Shape::kKeys + kTurnKeys : Shape::kKeys, p.page_tokens);
    }
  }
}

/// Which half of each split and which head of the block a warp has.
struct WarpRole {
  int half;
  int head;

  __device__ WarpRole() {
    unsigned thread = 0;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    half = static_cast<int>(thread / 32) / kMostHeads;
    head = static_cast<int>(thread / 32) % kMostHeads;
  }
};

/// The first of the keys that a row sees: all of its queries do.
struct SeenKeys {
  int keys;

  __device__ bool all(int wanted) const { return wanted <= keys; }
  __device__ int by(int) const { return keys; }
};

/// The sums of a split's first half and of its second become one. Their two warps meet at `first`
/// and `second`, which have what the other warp gives away; each gets its channels of the sums, and
/// the tops and totals in place of its own. Both wait at one place of the code, as barriers want
/// it: so no branch by half goes around one, and what half it is is read again behind it.
template <typename Shape>
__device__ inline void meet(typename Shape::WarpQueries& queries, int head, const KeptSums& first,
                            const KeptSums& second,
                            typename Shape::WarpQueries::template Sums<Shape::kOwn>& own) {
  constexpr int kOwn = Shape::kOwn;
  const auto wait = [&] { asm volatile("bar.sync %0, 64;" ::"r"(1 + head) : "memory"); };
  wait();  // the other has read what lay there
  if (WarpRole().half == 0) {
    queries.template keep<kOwn>(second, kOwn);
  } else {
    queries.template keep<kOwn>(first, 0);
  }
  wait();
  if (WarpRole().half == 0) {
    queries.template join<0, kOwn>(first, own);
  } else {
    queries.template join<1, kOwn>(second, own);
  }
}

/// After the last key of a split.
template <typename Shape>
__device__ inline void end_split(const AttentionParams& p, const Walk<SharedWalkState>& walk,
                                 typename Shape::WarpQueries& queries, int heads,
                                 unsigned char* shared) {
  using WarpQueries = typename Shape::WarpQueries;
  constexpr int kOwn = Shape::kOwn;
  const SharedLayout layout = Shape::layout(p);
  const WarpRole role;
  const AttentionItem item = walk.item();
  queries.place(RowTile{item.row, 1}, item.head_block * heads + role.head, 0);
  const auto kept = [&](int area, int half) {
    return WarpQueries::template kept_at<kOwn>(shared + area +
                                               (2 * role.head + half) * Shape::kKept);
  };
  queries.finish_totals();
  typename WarpQueries::template Sums<kOwn> own;
  meet<Shape>(queries, role.head, kept(layout.meetings, 0), kept(layout.meetings, 1), own);
  if (p.sums != nullptr) return queries.store_split(walk.split(), role.half, own);
  const KeptSums totals = kept(layout.totals, role.half);
  queries.template fold_split<kOwn>(walk.split() == 0, totals, own);
  if (walk.is_last()) queries.template store_folded<kOwn>(totals, role.half * kOwn);
}

/// When a block's places are waited for and left. No register keeps the place.
template <typename Shape>
struct RingTurns {
  const typename Shape::BlockRing& ring;
  int lane;
  volatile unsigned* place;

  __device__ void leave_keys() const { ring.release(RingPlace::of(*place), lane); }
  __device__ void wait_for_values() const { ring.wait_full(RingPlace::of(*place).values()); }
  __device__ void leave_values() const {
    RingPlace here = RingPlace::of(*place);
    ring.release(here.values(), lane);
    here.next(Shape::kStages);
    *place = here.code();
  }
};

/// By a warp with one half of each split for one head.
template <typename Shape>
__device__ inline void take_items(const AttentionParams& p, const typename Shape::BlockRing& ring,
                                  int heads, unsigned char* shared, const ThreadState& state) {
  const SharedLayout layout = Shape::layout(p);
  auto* const lane_offsets = reinterpret_cast<const LaneOffsets*>(shared + layout.offsets);
  *state.place = RingPlace(WarpRole().half).code();
  for (Walk<SharedWalkState> walk(p, state.walk); walk.find(); walk.next()) {
    const WarpRole role;
    const AttentionItem item = walk.item();
    typename Shape::WarpQueries queries(
        p, RowTile{item.row, 1}, item.head_block * heads + role.head, 0,
        shared + layout.queries + (role.half * heads + role.head) * Shape::kQueries);
    queries.clear();
    const SplitBlocks blocks(walk.split(), walk.end());
    for (int keys = blocks.keys(role.half); keys > 0; keys -= Shape::kKeys) {
      const RingPlace place = RingPlace::of(*state.place);
      ring.wait_full(place);
      const ReadOffsets offsets = lane_offsets->of(queries.lane());
      const int head = static_cast<int>(threadIdx.x) / 32 % kMostHeads;
      queries.take(typename Shape::Rows(p, ring.stage(place), head, offsets), SeenKeys{keys},
                   RingTurns<Shape>{ring, queries.lane(), state.place});
    }
    end_split<Shape>(p, walk, queries, heads, shared);
  }
}

/// Registers of the warps that take keys; the four others make room for them. More than a block
/// starts with would never be given.
constexpr int registers_of(int residents) {
  return residents == 4 ? 48 : residents == 3 ? 64 : residents == 2 ? 104 : 232;
}
constexpr int loading_registers_of(int residents) {
  return residents == 4 ? 24 : residents == 3 ? 40 : 32;
}
static_assert(kTracks == kMostHeads && kValuesBehind == track_of(true, 0));
constexpr bool has_registers(int residents) {
  const int at_start = 65536 / (kBlockThreads * residents) / 8 * 8;
  return 2 * registers_of(residents) + loading_registers_of(residents) <= 3 * at_start;
}
static_assert(has_registers(1) && has_registers(2) && has_registers(3) && has_registers(4));

template <KvFormat kFormat, int kDim, int kGroups, int kHeads>
__global__ void __launch_bounds__(kBlockThreads, residents_of(kFormat, kGroups, kDim))
    attention_kernel(const __grid_constant__ AttentionParams p) {
  using Shape = AttentionShape<kFormat, kDim, kGroups, kHeads>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int heads = kHeads > 0 ? kHeads : p.block_heads;
  const SharedLayout layout = Shape::layout(p);
  const typename Shape::BlockRing ring(shared, layout);
  ring.start(Shape::BlockLoader::writers(p), heads);
  if (threadIdx.x < 32) {
    reinterpret_cast<LaneOffsets*>(shared + layout.offsets)
        ->fill<kFormat, kDim>(static_cast<int>(threadIdx.x), Shape::stride(p));
  }
  cuda::take_turn();
  __syncthreads();
  const int head = static_cast<int>(threadIdx.x) / 32 % kMostHeads;  // or a track
  const ThreadState state = {
      reinterpret_cast<SharedWalkState*>(shared + layout.walks) + threadIdx.x,
      reinterpret_cast<volatile unsigned*>(shared + layout.places) + threadIdx.x};
  if (threadIdx.x >= 2 * 32 * kMostHeads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(
        loading_registers_of(residents_of(kFormat, kGroups, kDim))));
    load_items<Shape>(p, ring, shared, layout, head);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(
        registers_of(residents_of(kFormat, kGroups, kDim))));
    if (head < heads) take_items<Shape>(p, ring, heads, shared, state);
  }
}

template <KvFormat kFormat, int kDim, int kGroups, int kHeads>
void launch_one(const AttentionParams& p, int device, void* stream) {
  const auto kernel = attention_kernel<kFormat, kDim, kGroups, kHeads>;
  const int bytes = AttentionShape<kFormat, kDim, kGroups, kHeads>::layout(p).bytes;
  cuda::allow_shared(kernel, bytes);
  const int at_once = cuda::multiprocessors(static_cast<std::int8_t>(device)) *
                      residents_of(kFormat, kGroups, kDim);
  const int blocks = p.sums == nullptr ? p.items : std::min(p.items, at_once);
  cuda::launch_beside("attention_kernel", kernel, dim3(static_cast<unsigned>(blocks)),
                      dim3(kBlockThreads), static_cast<std::size_t>(bytes), Stream{stream}, p);
}

template <KvFormat kFormat>
void launch_format(const AttentionParams& p, int dim, int groups, int device, void* stream) {
  const auto of_groups = [&]<int kDim, int kHeads>() {
    if (p.tiles != nullptr) return launch_prefill<kFormat, kDim>(p, stream);
    if constexpr (kFormat == KvFormat::kNvfp4 || kFormat == KvFormat::kBf16) {
      if (groups == 1) return launch_one<kFormat, kDim, 1, kHeads>(p, device, stream);
    }
    launch_one<kFormat, kDim, 2, kHeads>(p, device, stream);
  };
  switch (dim) {
    case 32: return of_groups.template operator()<32, 0>();
    case 64: return of_groups.template operator()<64, 0>();
    default:
      if (p.block_heads == kMostHeads) return of_groups.template operator()<128, kMostHeads>();
      return of_groups.template operator()<128, 0>();
  }
}

}  // namespace lockstep::kernels
