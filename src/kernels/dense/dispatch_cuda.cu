#include <algorithm>

#include "device/cuda/check.h"
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
};

/// Each warp has consecutive items. They are counted, each warp is told where its items of each
/// expert begin, and then puts them there in their order.
__global__ void __launch_bounds__(32 * kMostWarps)
    dispatch_kernel(const __grid_constant__ Params p) {
  extern __shared__ std::int32_t counters[];  // [warps, experts]
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int warps = threads / 32;
  const int lane = thread % 32;
  const int each = ((p.items + warps - 1) / warps + 31) / 32 * 32;
  const int first = thread / 32 * each;
  const int end = min(first + each, p.items);
  std::int32_t* const own = counters + thread / 32 * p.count;
  const auto expert_of = [&](int i) { return p.experts[i / p.slots * p.stride + i % p.slots]; };

  for (int i = thread; i < warps * p.count; i += threads) counters[i] = 0;
  __syncthreads();
  for (int i = first + lane; i < end; i += 32) atomicAdd(own + expert_of(i), 1);
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

  for (int i = first + lane; i - lane < end; i += 32) {
    const bool is_item = i < end;
    const std::int32_t expert = is_item ? expert_of(i) : -1;
    const unsigned same = __match_any_sync(kAll, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (is_item) {
      const std::int32_t at = p.offsets[expert] + own[expert] + rank;
      p.row_of[at] = i / p.slots;
      p.slot_of[at] = i;
    }
    __syncwarp();
    if (is_item && rank == 0) own[expert] += __popc(same);
    __syncwarp();
  }
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
  const auto bytes_a_warp = p.count * static_cast<int>(sizeof(std::int32_t));
  if (bytes_a_warp > kMostBytes) {
    throw Error(cat({"dispatch: ", p.count, " experts; a CUDA device takes at most ",
                     kMostBytes / static_cast<int>(sizeof(std::int32_t))}));
  }
  const int warps =
      std::clamp((p.items + 31) / 32, 1, std::min(kMostWarps, kMostBytes / bytes_a_warp));
  const int bytes = warps * bytes_a_warp;
  if (bytes > 48 << 10) {
    cuda::require(cudaFuncSetAttribute(dispatch_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       kMostBytes),
                  "cudaFuncSetAttribute");
  }
  dispatch_kernel<<<1, static_cast<unsigned>(32 * warps), static_cast<std::size_t>(bytes),
                    cuda::stream_of(stream)>>>(p);
  cuda::require_launch("dispatch_kernel");
}

}  // namespace lockstep::kernels
