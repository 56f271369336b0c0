/// A router's product, its choice and the order of the items in one launch of one cluster. The
/// product is linear_hopper_cuda.cu's: inputs in four segments, each an accumulator over its inputs
/// in rising order, added one after another. A block multiplies all rows, for half of the experts,
/// over a segment; then it has every eighth row, of which it adds the segments and chooses, a warp
/// a row; the first block, which is sent all choices, puts the items in order.
#include <cuda.h>

#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/once.h"
#include "device/cuda/shared.h"
#include "kernels/dense/lanes.h"
#include "kernels/dense/route_rows.h"
#include "kernels/dense/row_cuda.h"
#include "kernels/dense/segments_cuda.h"
#include "kernels/dense/wgmma_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kHalves = 2;  // of the experts
constexpr int kBlocks = kSegments * kHalves;
constexpr int kRouteRows = 64;
constexpr int kMostRouted = 128;  // experts
constexpr int kMostSlots = 16;
constexpr int kHalf = kMostRouted / kHalves;
constexpr int kRouteWarps = 8;
constexpr int kRouteStages = 8;
constexpr int kRowsOfBlock = kRouteRows / kBlocks;
constexpr int kLine = 2 * wgmma::kDepth;      // bytes of a row in a stage
constexpr int kOfWeight = kHalf * kLine;      // bytes of a stage
constexpr int kPartStride = kMostRouted + 4;  // of sums
static_assert(kRowsOfBlock <= kRouteWarps);

struct RouteParams {
  std::int32_t* experts;
  float* gates;
  std::int32_t* offsets;
  std::int32_t* row_of;
  std::int32_t* slot_of;
  std::int64_t experts_stride;
  std::int64_t gates_stride;
  std::int32_t rows;
  std::int32_t count;  // of experts
  std::int32_t slots;
  std::int32_t steps;    // of kDepth inputs, in a segment
  std::int32_t x_bytes;  // of a stage
  bool normalize;
  bool split_k;
  bool settled;
};

/// Behind the stages.
struct Desk {
  float parts[kSegments][kRowsOfBlock][kPartStride];
  float exps[kRowsOfBlock][kMostRouted];
  std::int32_t choices[kRouteRows * kMostSlots];  // of all rows: the first block's
  std::uint32_t rows_of[kMostRouted][2];          // a bit a row
  std::int32_t begins[kMostRouted];
  std::uint64_t full[kRouteStages];
  std::uint64_t empty[kRouteStages];
  std::uint64_t received;
  std::uint64_t chosen;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ int row_count(const RouteParams& p, int block) {
  return (p.rows - block + kBlocks - 1) / kBlocks;
}

__device__ void send_word(std::uint32_t to, std::int32_t word, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(word), "r"(barrier)
      : "memory");
}

/// By one thread.
__device__ void make_barriers(const RouteParams& p, Desk& desk, int block) {
  for (int i = 0; i < kRouteStages; ++i) {
    wgmma::init_barrier(&desk.full[i], 1);
    wgmma::init_barrier(&desk.empty[i], 4);
  }
  wgmma::init_barrier(&desk.received, 1);
  wgmma::init_barrier(&desk.chosen, 1);
  wgmma::publish_barriers();
  wgmma::expect(&desk.received,
                row_count(p, block) * kSegments * kMostRouted * static_cast<int>(sizeof(float)));
  if (block == 0) wgmma::expect(&desk.chosen, p.rows * p.slots * 4);
}

/// By one thread.
__device__ void fetch(const RouteParams& p, Desk& desk, std::uint32_t stages, const CUtensorMap& x,
                      const CUtensorMap& weight, int block) {
  const int first = block % kSegments * p.steps;
  const int stage_bytes = p.x_bytes + kOfWeight;
  const auto fetch_weight = [&](int step) {
    std::uint64_t* const full = &desk.full[step % kRouteStages];
    wgmma::expect(full, stage_bytes);
    wgmma::copy_tile(stages + step % kRouteStages * stage_bytes + p.x_bytes, &weight,
                     (first + step) * wgmma::kDepth, block / kSegments * kHalf, full);
  };
  int ahead = 0;
  if (p.settled) {
    for (; ahead < min(p.steps, kRouteStages); ++ahead) fetch_weight(ahead);
  }
  cuda::take_turn();
  for (int step = 0; step < p.steps; ++step) {
    if (step >= ahead) {
      const std::uint32_t round = static_cast<std::uint32_t>(step / kRouteStages) & 1u;
      wgmma::wait(&desk.empty[step % kRouteStages], round ^ 1u);
      fetch_weight(step);
    }
    wgmma::copy_tile(stages + step % kRouteStages * stage_bytes, &x, (first + step) * wgmma::kDepth,
                     0, &desk.full[step % kRouteStages]);
  }
}

/// A block's share of the product, by four warps: its sums go to the blocks that have the rows.
__device__ void multiply_rows(const RouteParams& p, Desk& desk, std::uint32_t stages, int block) {
  const int thread = static_cast<int>(threadIdx.x);
  float d[2][kHalf / 4];  // 32 experts each
  wgmma::Place at;
  for (int step = 0; step < p.steps; ++step) {
    wgmma::wait(&desk.full[at.stage], at.parity);
    const std::uint32_t stage = stages + at.stage * (p.x_bytes + kOfWeight);
    const std::uint64_t from = wgmma::descriptor(stage);
    const std::uint64_t by = wgmma::descriptor(stage + p.x_bytes);
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        wgmma::multiply(d[n], from + 2 * k, by + 2 * k + n * (32 * kLine / 16), step > 0 || k > 0);
      }
    }
    wgmma::commit();
    wgmma::wait_for<0>();
    if (thread % 32 == 0) wgmma::arrive(&desk.empty[at.stage]);
    at.advance(kRouteStages);
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // their barriers are made
  const int owner = thread % 32 / 4;
  const int segment = block % kSegments;
  const int out = block / kSegments * kHalf + thread % 4 * 2;
  const std::uint32_t barrier = wgmma::place_in(owner, wgmma::shared_address(&desk.received));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int eighth = thread / 32 * 2 + half;  // of the rows
    if (eighth * kBlocks + owner >= p.rows) continue;
    const std::uint32_t to =
        wgmma::place_in(owner, wgmma::shared_address(&desk.parts[segment][eighth][out]));
#pragma unroll
    for (int j = 0; j < kHalf / 4; j += 4) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        send_pair(to + (n * 32 + 2 * j) * 4, d[n][j + 2 * half], d[n][j + 2 * half + 1], barrier);
      }
    }
  }
}

constexpr int kOfLane = kMostRouted / 32;

/// A lane's experts: lane, lane + 32 and so on. All NaN are equal; probabilities are not negative,
/// so that their bits are in their order.
struct Likely {
  std::uint32_t rank[kOfLane];  // bits + 1; 0: none
  std::uint32_t most;
  std::int32_t expert;

  __device__ void find(int lane) {
    most = 0;
    expert = 0x7FFFFFFF;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      if (rank[k] > most) {
        most = rank[k];
        expert = lane + 32 * k;
      }
    }
  }
};

/// softmax() of a row's logits, as router_portable() has it.
__device__ Likely likely_of(const RouteParams& p, Desk& desk, int eighth, int lane) {
  float logit[kOfLane];
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const int e = lane + 32 * k;
    const float part[kSegments] = {desk.parts[0][eighth][e], desk.parts[1][eighth][e],
                                   desk.parts[2][eighth][e], desk.parts[3][eighth][e]};
    logit[k] = sum_of_segments(part, p.split_k);
  }
  float top = __shfl_sync(kAllLanes, logit[0], 0);
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    if (lane + 32 * k < p.count) top = logit[k] > top ? logit[k] : top;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, top, step);
    top = other > top ? other : top;
  }
  float* const exps = desk.exps[eighth];
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const int e = lane + 32 * k;
    logit[k] = e < p.count ? exp_fp32(logit[k] - top) : 0.0f;
    exps[e] = logit[k];
  }
  __syncwarp();
  const float sum = sum_in_order<kMostRouted / 4>(exps, kMostRouted);
  Likely likely;
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const float share = __fdiv_rn(logit[k], sum);
    const std::uint32_t bits = share == share ? float_bits(share) : 0x7FC00000u;
    likely.rank[k] = lane + 32 * k < p.count ? bits + 1 : 0;
  }
  likely.find(lane);
  return likely;
}

/// A row's choice, by a warp, to memory and to the first block.
__device__ void choose_row(const RouteParams& p, Desk& desk, int row, int lane) {
  Likely own = likely_of(p, desk, row / kBlocks, lane);
  float sum = 0.0f;
  float gate = 0.0f;
  std::int32_t chosen = 0;  // the lane's slot
  for (int slot = 0; slot < p.slots; ++slot) {
    const std::uint32_t most = __reduce_max_sync(kAllLanes, own.most);
    const std::int32_t expert =
        __reduce_min_sync(kAllLanes, own.most == most ? own.expert : 0x7FFFFFFF);
    const float likelihood = float_of(most - 1);
    sum += likelihood;
    if (lane == slot) {
      gate = likelihood;
      chosen = expert;
    }
    if (own.expert == expert) {
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) {
        if (expert == lane + 32 * k) own.rank[k] = 0;
      }
      own.find(lane);
    }
  }
  if (lane >= p.slots) return;
  const std::uint32_t to = wgmma::shared_address(&desk.choices[row * p.slots + lane]);
  send_word(wgmma::place_in(0, to), chosen,
            wgmma::place_in(0, wgmma::shared_address(&desk.chosen)));
  p.experts[row * p.experts_stride + lane] = chosen;
  p.gates[row * p.gates_stride + lane] = p.normalize ? __fdiv_rn(gate, sum) : gate;
}

/// By all threads of the first block. An expert has an item of a row at most once.
__device__ void order_items(const RouteParams& p, Desk& desk) {
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kThreads = 32 * kRouteWarps;
  wgmma::wait_for_cluster(&desk.chosen, 0);
  const int items = p.rows * p.slots;
  for (int i = thread; i < items; i += kThreads) {
    const int row = i / p.slots;
    atomicOr(&desk.rows_of[desk.choices[i]][row / 32], 1u << row % 32);
  }
  __syncthreads();
  if (thread < 32) {  // four experts a lane, side by side
    std::int32_t of[kOfLane], sum = 0;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const std::uint32_t* const rows = desk.rows_of[kOfLane * thread + k];
      of[k] = __popc(rows[0]) + __popc(rows[1]);
      sum += of[k];
    }
    std::int32_t end = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(kAllLanes, end, static_cast<unsigned>(step));
      if (thread >= step) end += other;
    }
    std::int32_t begin = end - sum;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const int e = kOfLane * thread + k;
      desk.begins[e] = begin;
      if (e <= p.count) p.offsets[e] = begin;
      begin += of[k];
    }
    if (thread == 31 && p.count == kMostRouted) p.offsets[kMostRouted] = begin;
  }
  __syncthreads();
  for (int i = thread; i < items; i += kThreads) {
    const int row = i / p.slots;
    const std::int32_t expert = desk.choices[i];
    const std::uint32_t* const rows = desk.rows_of[expert];
    const std::uint32_t below = (1u << row % 32) - 1;
    const std::int32_t at =
        desk.begins[expert] +
        (row < 32 ? __popc(rows[0] & below) : __popc(rows[0]) + __popc(rows[1] & below));
    p.row_of[at] = row;
    p.slot_of[at] = i;
  }
}

#endif

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(32 * kRouteWarps)
    route_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
                 const __grid_constant__ RouteParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const auto block = static_cast<int>(blockIdx.x);
  const std::uint32_t stages = wgmma::shared_address(shared);
  auto& desk = *reinterpret_cast<Desk*>(shared + kRouteStages * (p.x_bytes + kOfWeight));
  if (thread == 128) {
    wgmma::prefetch(&weight);
    wgmma::prefetch(&x);
    make_barriers(p, desk, block);
  }
  if (thread < kMostRouted) desk.rows_of[thread][0] = desk.rows_of[thread][1] = 0;
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (thread < 128) {
    multiply_rows(p, desk, stages, block);
  } else {
    if (thread == 128) fetch(p, desk, stages, x, weight, block);
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  cuda::wait_for_predecessor();
  const int row = thread / 32 * kBlocks + block;
  if (row < p.rows) {
    wgmma::wait_for_cluster(&desk.received, 0);
    choose_row(p, desk, row, thread % 32);
  }
  if (block == 0) order_items(p, desk);
#endif
}

// What follows the rows that a copy brought is read too: it lies in the stages.
static_assert(kRouteRows * kLine <= kOfWeight);

constexpr int kMostBytes = kRouteStages * (kRouteRows * kLine + kOfWeight) + int{sizeof(Desk)};

/// Of a share of a GPU, whose multiprocessors may lie apart, perhaps not. The device is current.
bool has_room_for_cluster(std::int8_t device) {
  return cuda::once_a_device(device, [] {
           return wgmma::most_clusters(route_kernel, kBlocks, 32 * kRouteWarps, kMostBytes);
         }) > 0;
}

}  // namespace

bool route_cuda(const RouteArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int8_t device = args.x.device.index;
  const PackedMatrix& w = args.weight;
  const auto at =
      reinterpret_cast<std::uintptr_t>(args.x.data) | reinterpret_cast<std::uintptr_t>(w.data);
  if (rows < 1 || rows > kRouteRows || w.out > kMostRouted || args.experts.shape[1] > kMostSlots ||
      w.in % (kSegments * wgmma::kDepth) != 0 || w.in == 0 || at % 16 != 0 ||
      args.x.stride[0] % 8 != 0 || !wgmma::is_hopper(device)) {
    return false;
  }
  const cuda::OnDevice scope(device);
  if (!has_room_for_cluster(device)) return false;
  const int box_rows = static_cast<int>((rows + 7) / 8) * 8;
  const RouteParams params{.experts = args.experts.data,
                           .gates = args.gates.data,
                           .offsets = args.offsets.data(),
                           .row_of = args.row_of.data(),
                           .slot_of = args.slot_of.data(),
                           .experts_stride = args.experts.stride[0],
                           .gates_stride = args.gates.stride[0],
                           .rows = static_cast<std::int32_t>(rows),
                           .count = static_cast<std::int32_t>(w.out),
                           .slots = static_cast<std::int32_t>(args.experts.shape[1]),
                           .steps = static_cast<std::int32_t>(w.in) / (kSegments * wgmma::kDepth),
                           .x_bytes = box_rows * kLine,
                           .normalize = args.normalize,
                           .split_k = args.split_k,
                           .settled = args.settled};
  const CUtensorMap x = wgmma::tensor_map(args.x.data, rows, w.in, args.x.stride[0], box_rows);
  const CUtensorMap weight =
      wgmma::tensor_map(w.data, packed_elements(w.out, w.in) / w.in, w.in, w.in, kHalf);
  const int bytes = kRouteStages * (params.x_bytes + kOfWeight) + int{sizeof(Desk)};
  cuda::allow_shared(route_kernel, bytes);
  cuda::lay_out_for_shared(route_kernel);
  cuda::launch_beside("route_kernel", route_kernel, dim3(kBlocks), dim3(32 * kRouteWarps),
                      static_cast<std::size_t>(bytes), stream, x, weight, params);
  return true;
}

}  // namespace lockstep::kernels
