/// For .cu files alone: how the exact product's kernels share work.
///
/// Work is counted in groups of 16 or 32 outputs of a unit, which is up to eight items of one
/// expert. Every block of threads takes a run of them that costs as much as any other's, in the
/// order of the weights, so that all of them end together whatever the experts' loads.
#pragma once

#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/exact/w4a4_cuda.h"

namespace lockstep::kernels::w4a4_device {

inline constexpr int kItems = 8;  // of a unit
inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kSegment = 2048;  // columns whose activations are unpacked at once
inline constexpr int kSegmentChunks = kSegment / kChunk;
inline constexpr int kSegmentBlocks = kSegment / 16;
// Rows of neighbouring items are 16 banks apart: one load reads two rows, 64 bytes of each.
inline constexpr int kRowBytes = kSegment + 64;

/// Blocks of threads that a multiprocessor holds at a time: the more registers a thread has, the
/// less it waits for its own results, which a third block's threads do not make up for.
inline constexpr int kResidents = 2;

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
  std::int32_t base_exponent;           // -20, or with a residual -22 and less
  std::int32_t group_cost[kItems / 2];  // of a unit's group, by its pairs of items
  std::int32_t unit_cost;               // of going from one unit to the next
  bool wide;                            // codes of `part` may be read eight bytes at a time
  bool starts_early;                    // offsets, from and to are older than the launch before

  __device__ std::int32_t offset(std::int32_t expert) const {
    return offsets != nullptr ? offsets[expert] : expert == 0 ? 0 : items;
  }
  __host__ __device__ std::int32_t cost(std::int32_t items_left) const {
    return group_cost[((items_left < kItems ? items_left : kItems) - 1) / 2];
  }
  /// Of all groups of a unit.
  __device__ std::uint32_t whole_cost(std::int32_t items_left) const {
    return static_cast<std::uint32_t>(cost(items_left) * groups + unit_cost);
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

/// What a block of threads takes: groups of outputs from `group` of a unit on.
struct Work {
  Unit unit;
  std::int32_t group;
  std::int32_t left;  // groups; 0: nothing

  /// To the next unit, `done` groups further on. There must be one.
  __device__ void advance(const Params& p, int done) {
    left -= done;
    group = 0;
    unit.advance(p);
  }
};

/// The experts as a lane sees them: those that follow each other from `first` on, so that all
/// offsets are read at once.
struct Experts {
  std::int32_t first;
  std::int32_t units;         // theirs
  std::int32_t units_before;  // of all experts before
  std::uint32_t cost;
  std::uint32_t cost_before;
};

template <typename T>
__device__ T sum_up_to(T value, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    const T other = __shfl_up_sync(0xFFFFFFFFu, value, d);
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
      seen.cost += static_cast<std::uint32_t>(full) * p.whole_cost(kItems) +
                   (rest > 0 ? p.whole_cost(rest) : 0u);
      begin = end;
    }
  }
  seen.units_before = sum_up_to(seen.units, lane) - seen.units;
  seen.cost_before = sum_up_to(seen.cost, lane) - seen.cost;
  return seen;
}

/// A group of outputs of a unit.
struct Place {
  Unit unit;
  std::int32_t index;   // of the unit
  std::int32_t group;   // up to `groups`: behind the unit's last one
  std::int32_t before;  // groups before it, of all units
};

/// The first group of which no part lies before `at`, in cost from the beginning on, which is among
/// what the lane sees.
__device__ inline Place place_of(const Params& p, const Experts& seen, std::uint32_t at) {
  const std::uint32_t whole = p.whole_cost(kItems);  // a full unit
  std::uint32_t into = at - seen.cost_before;
  Place place{};
  place.index = seen.units_before;
  std::int32_t e = seen.first;
  std::int32_t begin = p.offset(e);
  std::int32_t end = p.offset(e + 1);
  while (true) {
    const std::int32_t full = (end - begin) / kItems;
    const std::int32_t rest = (end - begin) % kItems;
    const std::uint32_t all =
        static_cast<std::uint32_t>(full) * whole + (rest > 0 ? p.whole_cost(rest) : 0u);
    if (into < all) break;
    into -= all;
    place.index += full + (rest > 0);
    begin = end;
    end = p.offset(++e + 1);
  }
  const std::uint32_t before = into / whole;
  const std::int32_t first = begin + static_cast<std::int32_t>(before) * kItems;
  const auto cost = static_cast<std::uint32_t>(p.cost(end - first));
  place.unit = {e, first, end};
  place.index += static_cast<std::int32_t>(before);
  into -= before * whole;
  into -= min(into, static_cast<std::uint32_t>(p.unit_cost));
  place.group = static_cast<std::int32_t>((into + cost - 1) / cost);
  place.before = place.index * p.groups + place.group;
  return place;
}

/// Where this block's run begins, found[0], and where it ends: two warps find one each.
__device__ inline void find_work(const Params& p, Place* found, int thread) {
  const Experts seen = look_at_experts(p, thread % 32);
  const std::uint32_t all = __shfl_sync(0xFFFFFFFFu, seen.cost_before + seen.cost, 31);
  const std::uint32_t each = all / gridDim.x;
  const std::uint32_t more = all % gridDim.x;  // so many runs are longer by one
  const std::uint32_t block = blockIdx.x + static_cast<unsigned>(thread) / 32;
  const std::uint32_t at = each * block + min(block, more);
  if (at - seen.cost_before < seen.cost) {  // or wraps
    found[thread / 32] = place_of(p, seen, at);
  } else if (at >= all && thread % 32 == 31) {
    found[thread / 32].before = (seen.units_before + seen.units) * p.groups;
  }
}

__device__ inline Work work_between(const Params& p, const Place& first, const Place& end) {
  Work work{first.unit, first.group, end.before - first.before};
  if (work.left > 0 && work.group == p.groups) {
    work.group = 0;
    work.unit.advance(p);
  }
  return work;
}

/// No more groups than these, whatever the offsets.
inline std::int64_t most_groups(const Params& p) {
  const std::int64_t units = std::int64_t{p.items + kItems - 1} / kItems + p.experts;
  return std::min<std::int64_t>(p.items, units) * p.groups;
}

/// All but what is multiplied with the weights; `tiles` of 16 outputs are a group.
inline Params params_of_work(int tiles, const W4a4Weights& w,
                             const TensorView<const std::int32_t, 1>& offsets,
                             const TensorView<const std::int32_t, 1>& from,
                             const TensorView<const std::int32_t, 1>& to,
                             const TensorView<float, 2>& out, std::int64_t items) {
  Params p{};
  p.weights = w.data;
  p.expert_bytes = W4a4Weights::expert_bytes(w.out, w.cols);
  p.tile_bytes = static_cast<std::int32_t>(W4a4Weights::tile_bytes(w.cols));
  p.experts = w.experts;
  p.out_rows = w.out;
  p.groups = (w.out + 16 * tiles - 1) / (16 * tiles);
  p.chunks = (w.cols + kChunk - 1) / kChunk;
  p.blocks = w.cols / 16;
  p.offsets = offsets.data;
  p.from = from.data;
  p.to = to.data;
  p.items = static_cast<std::int32_t>(items);
  p.out = out.data;
  p.out_stride = out.stride[0];
  std::fill_n(p.group_cost, kItems / 2, 1);
  p.unit_cost = 0;
  return p;
}

/// How a multiprocessor is to divide its memory between L1 and shared memory, in percent of all
/// that can be shared. Launches that start beside each other ask for the same: one that ran blocks
/// of another with less to share would hold fewer of the next one's until it had none at all.
constexpr int carveout_of(int residents, int shared_bytes) {
  constexpr int kMost = 228 * 1024, kReserved = 1024;  // of all, and of each block
  return std::min(100, (residents * (shared_bytes + kReserved) * 100 + kMost - 1) / kMost);
}

/// A launch of blocks of kThreads that waits itself for its predecessor.
template <typename Kernel, typename... Arguments>
void launch_carved(const char* name, Kernel kernel, dim3 grid, int shared_bytes, int carveout,
                   Stream stream, const Arguments&... arguments) {
  cuda::require(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout),
      "cudaFuncSetAttribute");
  cuda::launch_beside(name, kernel, grid, dim3(kThreads), static_cast<std::size_t>(shared_bytes),
                      stream, arguments...);
}

/// The same over all of the work.
template <typename... Arguments>
void launch_over(const char* name, void (*kernel)(Arguments...), int shared_bytes, int residents,
                 const Params& work, std::int8_t device, Stream stream,
                 const Arguments&... arguments) {
  cuda::allow_shared(kernel, shared_bytes);
  const std::int64_t blocks =
      std::min(most_groups(work), std::int64_t{cuda::multiprocessors(device)} * residents);
  launch_carved(name, kernel, dim3(static_cast<unsigned>(blocks)), shared_bytes,
                carveout_of(residents, shared_bytes), stream, arguments...);
}

}  // namespace lockstep::kernels::w4a4_device
