/// For .cu files alone: weights on their way through a ring in shared memory, one a warp, without
/// regard to where units end. Four of a block's warps share the columns of a tile of 16 outputs.
#pragma once

#include "kernels/exact/w4a4_work_cuda.h"

namespace lockstep::kernels::w4a4_device {

inline constexpr int kSplits = 4;                // warps that share a tile's columns
inline constexpr int kTiles = kWarps / kSplits;  // of 16 outputs, in a group
inline constexpr int kGroup = 16 * kTiles;
inline constexpr int kStages = 2;
inline constexpr int kStageChunks = 4;

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

}  // namespace lockstep::kernels::w4a4_device
