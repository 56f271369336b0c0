/// For .cu files alone: attention of rows that follow each other, for one format.
///
/// What a warp does with a block of keys, and the order of halves and splits, are those of
/// attention_kernel, so that a row's bits are too. But here the warps of a block of threads have
/// one KV head and different queries: they share what each of them made operands of.
#pragma once

#include <cstdint>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/shared.h"
#include "kernels/dense/attention_queries_cuda.h"

namespace lockstep::kernels {

inline constexpr int kPrefillWarps = kTileQueries / 16;
inline constexpr int kPrefillKeys = kTurnKeys;  // that become operands together

/// Goes over blocks of a turn's keys: of each split its first half, then the other.
struct TurnWalk {
  int end;  // of the keys
  int split = 0;
  int half = 0;
  int first = 0;  // position of the block's first key

  __device__ explicit TurnWalk(int keys) : end(keys) {}
  __device__ int split_end() const { return min((split + 1) * kSplitKeys, end); }
  __device__ bool has_other_half() const {
    return half == 0 && split * kSplitKeys + kTurnKeys < split_end();
  }
  __device__ bool begins_half() const { return first == split * kSplitKeys + half * kTurnKeys; }
  __device__ bool ends_half() const { return first + 2 * kTurnKeys >= split_end(); }
  __device__ void next() {
    if (!ends_half()) {
      first += 2 * kTurnKeys;
    } else if (has_other_half()) {
      half = 1;
      first = split * kSplitKeys + kTurnKeys;
    } else {
      half = 0;
      first = ++split * kSplitKeys;
    }
  }
  __device__ bool is_over() const { return first >= end; }
};

/// Where operands lie, as threads take them: 16 bytes of each, side by side.
template <KvFormat kFormat, int kDim>
struct Operands {
  using Parts = ValueParts<kFormat, kDim>;
  static constexpr int kKeyTiles = kPrefillKeys / 8;
  static constexpr int kKeyParts = kDim / 32;
  static constexpr int kValueGroups = kPrefillKeys / 16;
  static constexpr int kProducts = kDim / 16;
  static constexpr int kKeyBytes = kKeyTiles * kKeyParts * 512;
  static constexpr int kBytes = kKeyBytes + kValueGroups * kProducts * 512;

  static __device__ uint4* key(unsigned char* at, int tile, int part) {
    return reinterpret_cast<uint4*>(at) + (tile * kKeyParts + part) * 32;
  }
  static __device__ uint4* value(unsigned char* at, int group, int product) {
    return reinterpret_cast<uint4*>(at + kKeyBytes) + (group * kProducts + product) * 32;
  }
};

/// Operands of some keys, as Queries takes them.
template <KvFormat kFormat, int kDim>
class OperandBlock {
 public:
  using Where = Operands<kFormat, kDim>;

  /// From tile `tile` on.
  __device__ OperandBlock(unsigned char* at, int tile, int lane)
      : at_(at), tile_(tile), lane_(lane) {}

  struct StagedKey {
    const uint4* at;
    __device__ void part(int j, std::uint32_t (&b)[2][2]) const {
      const uint4 x = at[32 * j];
      b[0][0] = x.x;
      b[0][1] = x.y;
      b[1][0] = x.z;
      b[1][1] = x.w;
    }
  };
  struct StagedValues {
    static constexpr int kProducts = ValueParts<kFormat, kDim>::kProducts;
    const uint4* at;
    __device__ void part(int j, std::uint32_t (&a)[kProducts][4]) const {
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        const uint4 x = at[32 * (j * kProducts + i)];
        a[i][0] = x.x;
        a[i][1] = x.y;
        a[i][2] = x.z;
        a[i][3] = x.w;
      }
    }
  };
  __device__ StagedKey key(int tile) const { return {Where::key(at_, tile_ + tile, 0) + lane_}; }
  __device__ StagedValues values(int u) const {
    return {Where::value(at_, tile_ / 2 + u, 0) + lane_};
  }

 private:
  unsigned char* at_;
  int tile_;
  int lane_;
};

/// Rows of keys and values in the cache, of some positions.
struct RowPlaces {
  const unsigned char* rows[2][kPrefillKeys];
};

/// Makes operands of one head's keys and values, warps side by side.
template <KvFormat kFormat, int kDim>
class Stager {
 public:
  using Where = Operands<kFormat, kDim>;
  using Bytes = HeadBytes<kFormat, kDim>;
  using Parts = ValueParts<kFormat, kDim>;
  static constexpr int kValueUnits = Where::kValueGroups * Parts::kParts;

  __device__ Stager(const AttentionParams& p, int head, int warp, int lane)
      : warp_(warp),
        lane_(lane),
        codes_(head * Bytes::kCodes),
        scales_(p.scales_at + head * Bytes::kScales),
        anywhere_(p.copy == KvCopy::kWords || p.copy == KvCopy::kBytes) {}

  /// Starts to read.
  __device__ void read(const RowPlaces& places) {
    if (anywhere_) {
      read_rows<true>(places);
    } else {
      read_rows<false>(places);
    }
  }

  /// What was read becomes operands.
  __device__ void store(unsigned char* at) const {
#pragma unroll
    for (int i = 0; i < Where::kKeyParts; ++i) {
      std::uint32_t b[2][2];
      key_.part(i, b);
      Where::key(at, warp_, i)[lane_] = make_uint4(b[0][0], b[0][1], b[1][0], b[1][1]);
    }
    if (warp_ >= kValueUnits) return;
    std::uint32_t a[Parts::kProducts][4];
    values_.part(0, a);
#pragma unroll
    for (int i = 0; i < Parts::kProducts; ++i) {
      Where::value(at, group(), part() * Parts::kProducts + i)[lane_] =
          make_uint4(a[i][0], a[i][1], a[i][2], a[i][3]);
    }
  }

 private:
  static_assert(Where::kKeyTiles == kPrefillWarps && kValueUnits <= kPrefillWarps);
  __device__ int group() const { return warp_ / Parts::kParts; }
  __device__ int part() const { return warp_ % Parts::kParts; }

  template <bool kAnywhere>
  __device__ void read_rows(const RowPlaces& places) {
    const unsigned char* const key = places.rows[0][8 * warp_ + key_of_column<kFormat>(lane_ >> 2)];
    key_.template read<kAnywhere>(key + codes_ + key_.codes_of(lane_ & 3),
                                  key + scales_ + key_.scales_of(lane_ & 3));
    if (warp_ >= kValueUnits) return;
    const unsigned char *codes[4], *scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * (lane_ & 3) + i % 2;
      const unsigned char* const row =
          places.rows[1][16 * group() + i / 2 * 8 + key_of_column<kFormat>(column)];
      codes[i] = row + codes_ + values_.codes_of(lane_ >> 2, part());
      scales[i] = row + scales_ + values_.scales_of(lane_ >> 2);
    }
    values_.template read<kAnywhere>(codes, scales);
  }

  int warp_;
  int lane_;
  int codes_;
  int scales_;
  bool anywhere_;
  Key<kFormat, kDim> key_;
  Values<kFormat, kDim, 1> values_;
};

/// By a thread for each row of `places`: where those from position `first` on lie; the last key's
/// again for those past it, which nobody sees.
class PlaceFinder {
 public:
  __device__ PlaceFinder(const AttentionParams& p, const RowTile& tile, int end)
      : p_(p), table_(p.table + p.sequence[tile.first] * p.table_stride), end_(end) {}

  __device__ void look_up(int first) {
    if (threadIdx.x >= 2 * kPrefillKeys) return;
    const int key = static_cast<int>(threadIdx.x) % kPrefillKeys;
    const int position = min(first + key, end_ - 1);
    const int page = position / p_.page_tokens;
    slot_ = position - page * p_.page_tokens;
    id_ = table_[page];
  }
  __device__ void store(RowPlaces& places) const {
    if (threadIdx.x >= 2 * kPrefillKeys) return;
    const bool is_value = threadIdx.x >= kPrefillKeys;
    const KvSide& side = is_value ? p_.v : p_.k;
    places.rows[is_value ? 1 : 0][threadIdx.x % kPrefillKeys] =
        reinterpret_cast<const unsigned char*>(side.pool) + id_ * side.page_bytes +
        slot_ * p_.row_bytes;
  }

 private:
  const AttentionParams& p_;
  const std::int32_t* table_;
  int end_;
  int slot_ = 0;
  std::int64_t id_ = 0;
};

template <KvFormat kFormat, int kDim>
struct PrefillShape {
  using WarpQueries = Queries<kFormat, kDim, 2>;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kOperands = Operands<kFormat, kDim>::kBytes;
  static constexpr int kKept = WarpQueries::template kKeptBytes<kSteps>;
  static constexpr int kPlacesAt = 2 * kOperands;
  static constexpr int kKeptAt = kPlacesAt + 2 * static_cast<int>(sizeof(RowPlaces));
  static constexpr int kBytes = kKeptAt + kPrefillWarps * 2 * kKept;
};

/// How many of the keys from position `first` on the rows of a tile see.
template <typename WarpQueries>
struct SeenByRows {
  const WarpQueries& queries;
  int first;
  int least;  // position of a row: they rise

  __device__ bool all(int keys) const { return first + keys - 1 <= least; }
  __device__ int by(int query) const { return queries.seen_from(first, query); }
};

/// All warps go together.
struct NoTurns {
  __device__ void leave_keys() const {}
  __device__ void wait_for_values() const {}
  __device__ void leave_values() const {}
};

/// After the last key of a half: the second of a split joins the first, and splits are folded.
template <int kSteps, typename WarpQueries>
__device__ inline void end_half(WarpQueries& queries, const TurnWalk& walk, const KeptSums& kept,
                                const KeptSums& totals) {
  queries.finish_totals();
  typename WarpQueries::template Sums<kSteps> split;
  if (walk.half == 1) {
    queries.template join<1, kSteps>(kept, split);
  } else {
    if (walk.has_other_half()) return queries.template keep<kSteps>(kept, 0);
    queries.own_half(split);
  }
  queries.template fold_split<kSteps>(walk.split == 0, totals, split);
}

template <KvFormat kFormat, int kDim>
__global__ void __launch_bounds__(32 * kPrefillWarps, 2)
    prefill_kernel(const __grid_constant__ AttentionParams p) {
  using Shape = PrefillShape<kFormat, kDim>;
  using WarpQueries = typename Shape::WarpQueries;
  constexpr int kKeys = keys_at_once(kFormat);
  extern __shared__ __align__(128) unsigned char shared[];
  cuda::take_turn();
  const int kv_heads = p.heads / p.group;
  const int index = static_cast<int>(blockIdx.x) / kv_heads;
  const int head = static_cast<int>(blockIdx.x) % kv_heads;
  const RowTile tile = p.tiles[p.tile_count - 1 - index];  // of a chunk's, long ones first
  const int least = p.positions[tile.first];
  const int end = p.positions[tile.first + tile.rows - 1] + 1;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  WarpQueries queries(p, tile, head, 16 * warp);
  Stager<kFormat, kDim> stager(p, head, warp, queries.lane());
  PlaceFinder finder(p, tile, end);
  RowPlaces* const places = reinterpret_cast<RowPlaces*>(shared + Shape::kPlacesAt);
  unsigned char* const mine = shared + Shape::kKeptAt + warp * 2 * Shape::kKept;
  const KeptSums kept = WarpQueries::template kept_at<Shape::kSteps>(mine);
  const KeptSums totals = WarpQueries::template kept_at<Shape::kSteps>(mine + Shape::kKept);

  TurnWalk ahead(end);  // of the blocks whose places are looked up
  finder.look_up(ahead.first);
  finder.store(places[0]);
  ahead.next();
  finder.look_up(ahead.first);
  finder.store(places[1]);
  __syncthreads();
  stager.read(places[0]);
  int block = 0;
  for (TurnWalk walk(end); !walk.is_over(); walk.next(), ++block) {
    unsigned char* const operands = shared + block % 2 * Shape::kOperands;
    stager.store(operands);
    __syncthreads();
    stager.read(places[(block + 1) % 2]);
    ahead.next();
    finder.look_up(ahead.first);
    if (walk.begins_half()) queries.clear();
    if (queries.any()) {
#pragma unroll
      for (int first = 0; first < kPrefillKeys; first += kKeys) {
        queries.take(OperandBlock<kFormat, kDim>(operands, first / 8, queries.lane()),
                     SeenByRows<WarpQueries>{queries, walk.first + first, least}, NoTurns{});
      }
    }
    finder.store(places[block % 2]);
    if (walk.ends_half()) end_half<Shape::kSteps>(queries, walk, kept, totals);
  }
  queries.template store_folded<Shape::kSteps>(totals, 0);
}

template <KvFormat kFormat, int kDim>
void launch_prefill(const AttentionParams& p, void* stream) {
  const auto kernel = prefill_kernel<kFormat, kDim>;
  constexpr int kBytes = PrefillShape<kFormat, kDim>::kBytes;
  cuda::allow_shared(kernel, kBytes);
  cuda::launch_beside("prefill_kernel", kernel, dim3(static_cast<unsigned>(p.items)),
                      dim3(32 * kPrefillWarps), kBytes, Stream{stream}, p);
}

}  // namespace lockstep::kernels
