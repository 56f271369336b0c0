#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/shared.h"
#include "kernels/dense/dispatch_rows.h"

namespace lockstep::kernels {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kMostWarps = 32;
constexpr int kMostBytes = 200 << 10;  // of shared memory: a counter a warp and expert

struct Params {
  const std::int32_t* experts;
  std::int64_t stride;
  std::int32_t* offsets;
  std::int32_t* row_of;
  std::int32_t* slot_of;
  std::int32_t items;
  std::int32_t slots;
  std::int32_t count;  // of experts
  std::int32_t* room;  // [experts, blocks] of many blocks
};

__device__ std::int32_t expert_of(const Params& p, int i) {
  return p.experts[i / p.slots * p.stride + i % p.slots];
}

/// A warp's items, to where its next of each expert goes, counted from `base` if there is one.
__device__ void place(const Params& p, std::int32_t* own, int first, int end,
                      const std::int32_t* base) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = first + lane; i - lane < end; i += 32) {
    const bool is_item = i < end;
    const std::int32_t expert = is_item ? expert_of(p, i) : -1;
    const unsigned same = __match_any_sync(kAll, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (is_item) {
      const std::int32_t at = (base == nullptr ? 0 : base[expert]) + own[expert] + rank;
      p.row_of[at] = i / p.slots;
      p.slot_of[at] = i;
    }
    __syncwarp();
    if (is_item && rank == 0) own[expert] += __popc(same);
    __syncwarp();
  }
}

/// Each warp has consecutive items. They are counted, each warp is told where its items of each
/// expert begin, and then puts them there in their order.
__global__ void __launch_bounds__(32 * kMostWarps)
    dispatch_kernel(const __grid_constant__ Params p) {
  cuda::take_turn();
  extern __shared__ std::int32_t counters[];  // [warps, experts]
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int warps = threads / 32;
  const int lane = thread % 32;
  const int each = ((p.items + warps - 1) / warps + 31) / 32 * 32;
  const int first = thread / 32 * each;
  const int end = min(first + each, p.items);
  std::int32_t* const own = counters + thread / 32 * p.count;
  for (int i = thread; i < warps * p.count; i += threads) counters[i] = 0;
  __syncthreads();
  for (int i = first + lane; i < end; i += 32) atomicAdd(own + expert_of(p, i), 1);
  __syncthreads();

  // An expert's counters become what the warps before have of it; its total goes to offsets.
  for (int e = thread; e < p.count; e += threads) {
    std::int32_t sum = 0;
    for (int w = 0; w < warps; ++w) {
      std::int32_t* const counter = counters + w * p.count + e;
      const std::int32_t here = *counter;
      *counter = sum;
      sum += here;
    }
    p.offsets[e + 1] = sum;
  }
  __syncthreads();
  if (thread < 32) {
    std::int32_t before = 0;
    for (int e = lane; e - lane < p.count; e += 32) {
      std::int32_t sum = e < p.count ? p.offsets[e + 1] : 0;
      for (int d = 1; d < 32; d *= 2) {
        const std::int32_t other = __shfl_up_sync(kAll, sum, static_cast<unsigned>(d));
        if (lane >= d) sum += other;
      }
      if (e < p.count) p.offsets[e + 1] = before + sum;
      before += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) p.offsets[0] = 0;
  }
  __syncthreads();

  place(p, own, first, end, p.offsets);
}

constexpr int kPlaceWarps = 8;
constexpr int kBlockItems = static_cast<int>(kDispatchItems);
constexpr int kWarpItems = kBlockItems / kPlaceWarps;

/// A block's items of each expert.
__global__ void __launch_bounds__(32 * kPlaceWarps)
    count_items_kernel(const __grid_constant__ Params p) {
  extern __shared__ std::int32_t counters[];  // [experts]
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int e = thread; e < p.count; e += threads) counters[e] = 0;
  __syncthreads();
  const int first = static_cast<int>(blockIdx.x) * kBlockItems;
  const int end = min(first + kBlockItems, p.items);
  for (int i = first + thread; i < end; i += threads) atomicAdd(counters + expert_of(p, i), 1);
  __syncthreads();
  for (int e = thread; e < p.count; e += threads) p.room[e * gridDim.x + blockIdx.x] = counters[e];
}

/// Counts, expert by expert and block by block in each, become where those items begin.
__global__ void __launch_bounds__(32 * kMostWarps)
    begin_items_kernel(const __grid_constant__ Params p, int blocks) {
  __shared__ std::int32_t sums[kMostWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int all = p.count * blocks;
  const int each = (all + 32 * kMostWarps - 1) / (32 * kMostWarps);
  const int first = min(thread * each, all), end = min(first + each, all);
  std::int32_t own = 0;
  for (int i = first; i < end; ++i) own += p.room[i];
  const auto up_to = [lane](std::int32_t sum) {
    for (int d = 1; d < 32; d *= 2) {
      const std::int32_t other = __shfl_up_sync(kAll, sum, static_cast<unsigned>(d));
      if (lane >= d) sum += other;
    }
    return sum;
  };
  const std::int32_t here = up_to(own);
  if (lane == 31) sums[thread / 32] = here;
  __syncthreads();
  if (thread < 32) sums[lane] = up_to(sums[lane]);
  __syncthreads();
  std::int32_t before = here - own + (thread < 32 ? 0 : sums[thread / 32 - 1]);
  for (int i = first; i < end; ++i) {
    const std::int32_t count = p.room[i];
    p.room[i] = before;
    if (i % blocks == 0) p.offsets[i / blocks] = before;
    before += count;
  }
  if (thread == 0) p.offsets[p.count] = p.items;
}

__global__ void __launch_bounds__(32 * kPlaceWarps)
    place_items_kernel(const __grid_constant__ Params p) {
  extern __shared__ std::int32_t counters[];  // [warps, experts]
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int first = static_cast<int>(blockIdx.x) * kBlockItems + thread / 32 * kWarpItems;
  const int end = min(first + kWarpItems, p.items);
  std::int32_t* const own = counters + thread / 32 * p.count;
  for (int i = thread; i < kPlaceWarps * p.count; i += threads) counters[i] = 0;
  __syncthreads();
  for (int i = first + thread % 32; i < end; i += 32) atomicAdd(own + expert_of(p, i), 1);
  __syncthreads();
  for (int e = thread; e < p.count; e += threads) {
    std::int32_t before = p.room[e * gridDim.x + blockIdx.x];
    for (int w = 0; w < kPlaceWarps; ++w) {
      const std::int32_t here = counters[w * p.count + e];
      counters[w * p.count + e] = before;
      before += here;
    }
  }
  __syncthreads();
  place(p, own, first, end, nullptr);
}

void dispatch_by_blocks(const Params& p, Stream stream) {
  const auto blocks = static_cast<unsigned>((p.items + kBlockItems - 1) / kBlockItems);
  const auto bytes = static_cast<std::size_t>(p.count) * sizeof(std::int32_t);
  const cudaStream_t order = cuda::stream_of(stream);
  count_items_kernel<<<blocks, 32 * kPlaceWarps, bytes, order>>>(p);
  cuda::require_launch("count_items_kernel");
  begin_items_kernel<<<1, 32 * kMostWarps, 0, order>>>(p, static_cast<int>(blocks));
  cuda::require_launch("begin_items_kernel");
  place_items_kernel<<<blocks, 32 * kPlaceWarps, kPlaceWarps * bytes, order>>>(p);
  cuda::require_launch("place_items_kernel");
}

}  // namespace

void dispatch_cuda(const DispatchArgs& args, Stream stream) {
  const cuda::OnDevice scope(args.experts.device.index);
  Params p{};
  p.experts = args.experts.data;
  p.stride = args.experts.stride[0];
  p.offsets = args.offsets.data();
  p.row_of = args.row_of.data();
  p.slot_of = args.slot_of.data();
  p.items = static_cast<std::int32_t>(args.row_of.size());
  p.slots = static_cast<std::int32_t>(args.experts.shape[1]);
  p.count = args.num_experts;
  p.room = args.room.data();
  if (!args.room.empty() && p.items > 2 * kBlockItems &&
      static_cast<std::size_t>(p.count) * kPlaceWarps * sizeof(std::int32_t) <= cuda::kFreeShared) {
    return dispatch_by_blocks(p, stream);
  }
  const auto bytes_a_warp = p.count * static_cast<int>(sizeof(std::int32_t));
  if (bytes_a_warp > kMostBytes) {
    throw Error(cat({"dispatch: ", p.count, " experts; a CUDA device takes at most ",
                     kMostBytes / static_cast<int>(sizeof(std::int32_t))}));
  }
  const int warps =
      std::clamp((p.items + 31) / 32, 1, std::min(kMostWarps, kMostBytes / bytes_a_warp));
  const auto bytes = static_cast<std::size_t>(warps * bytes_a_warp);
  cuda::allow_shared(dispatch_kernel, bytes);
  cuda::launch_beside("dispatch_kernel", dispatch_kernel, dim3(1),
                      dim3(static_cast<unsigned>(32 * warps)), bytes, stream, p);
}

}  // namespace lockstep::kernels
