#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "kernels/dense/rope_rows.h"
#include "kernels/dense/row_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kMostDim = 1024;

struct Params {
  Bf16* x;
  const std::int32_t* positions;
  const float* cos;
  const float* sin;
  const Bf16* norm;  // or null
  std::int64_t stride;
  std::int64_t heads;  // of all rows
  std::int32_t heads_a_row;
  std::int32_t dim;
  float eps;
};

/// A warp a head, which it keeps in shared memory between norm and rotation.
__global__ void __launch_bounds__(32 * kWarps) rope_kernel(const __grid_constant__ Params p) {
  cuda::take_turn();
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + warp;
  if (index >= p.heads) return;
  Bf16* const head = reinterpret_cast<Bf16*>(shared) + warp * p.dim;
  const std::int64_t row = index / p.heads_a_row;
  Bf16* const x = p.x + row * p.stride + index % p.heads_a_row * p.dim;
  for (int i = lane; i < p.dim; i += 32) head[i] = x[i];
  __syncwarp();
  float inverse = 1.0f;
  if (p.norm != nullptr) {
    inverse = inverse_rms(warp_sum_of_squares(head, p.dim), static_cast<float>(p.dim), p.eps);
  }
  const auto value = [&](int i) {
    if (p.norm == nullptr) return to_float(head[i]);
    const Bf16 normal = to_bf16(__fmul_rn(to_float(head[i]), inverse));
    return to_float(to_bf16(__fmul_rn(to_float(normal), to_float(p.norm[i]))));
  };
  const int half = p.dim / 2;
  const std::int64_t angle = std::int64_t{p.positions[row]} * half;
  for (int i = lane; i < half; i += 32) {
    const float a = value(i);
    const float b = value(i + half);
    const float c = p.cos[angle + i];
    const float s = p.sin[angle + i];
    x[i] = to_bf16(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
    x[i + half] = to_bf16(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
  }
}

constexpr int kHeadLanes = 16;   // of a head: those of lanes.h, and both of a pair are one lane's
constexpr int kBlockHeads = 16;  // of a block

/// Heads in registers.
template <int kDim>
__global__ void __launch_bounds__(kHeadLanes* kBlockHeads)
    rope_lanes_kernel(const __grid_constant__ Params p) {
  cuda::take_turn();
  constexpr int kOfLane = kDim / kHeadLanes;
  const int lane = static_cast<int>(threadIdx.x) % kHeadLanes;
  const std::int64_t index = std::int64_t{blockIdx.x} * kBlockHeads + threadIdx.x / kHeadLanes;
  const bool is_head = index < p.heads;  // all lanes of a warp go on together
  const std::int64_t row = is_head ? index / p.heads_a_row : 0;
  Bf16* const x = p.x + row * p.stride + (index - row * p.heads_a_row) * kDim;
  float v[kOfLane];
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) v[k] = is_head ? to_float(x[lane + kHeadLanes * k]) : 0.0f;
  if (p.norm != nullptr) {
    const float inverse = inverse_rms_of_head(v, p.eps);
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) v[k] = normed(v[k], inverse, p.norm[lane + kHeadLanes * k]);
  }
  if (!is_head) return;
  const std::int64_t angle = std::int64_t{p.positions[row]} * (kDim / 2) + lane;
#pragma unroll
  for (int k = 0; k < kOfLane / 2; ++k) {
    const float a = v[k], b = v[k + kOfLane / 2];
    const float c = p.cos[angle + kHeadLanes * k], s = p.sin[angle + kHeadLanes * k];
    x[lane + kHeadLanes * k] = to_bf16(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
    x[lane + kHeadLanes * k + kDim / 2] = to_bf16(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
  }
}

auto lanes_kernel_of(std::int32_t dim) -> void (*)(Params) {
  switch (dim) {
    case 32: return rope_lanes_kernel<32>;
    case 64: return rope_lanes_kernel<64>;
    case 128: return rope_lanes_kernel<128>;
    case 256: return rope_lanes_kernel<256>;
    default: return nullptr;
  }
}

}  // namespace

void rope_cuda(const RopeArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t heads = args.x.shape[1] / args.head_dim;
  if (rows * heads == 0) return;
  if (args.head_dim > kMostDim) {
    throw Error(
        cat({"rope: head_dim is ", args.head_dim, "; a CUDA device takes at most ", kMostDim}));
  }
  const cuda::OnDevice scope(args.x.device.index);
  const Params params{args.x.data,
                      args.positions.data(),
                      args.table->cos(0),
                      args.table->sin(0),
                      args.norm.empty() ? nullptr : args.norm.data(),
                      args.x.stride[0],
                      rows * heads,
                      static_cast<std::int32_t>(heads),
                      args.head_dim,
                      args.eps};
  if (const auto kernel = lanes_kernel_of(args.head_dim)) {
    const auto blocks = static_cast<unsigned>((rows * heads + kBlockHeads - 1) / kBlockHeads);
    cuda::launch_beside("rope_lanes_kernel", kernel, dim3(blocks), dim3(kHeadLanes * kBlockHeads),
                        0, stream, params);
    return;
  }
  const auto bytes = static_cast<std::size_t>(kWarps * args.head_dim) * sizeof(Bf16);
  const dim3 grid(static_cast<unsigned>((rows * heads + kWarps - 1) / kWarps));
  cuda::launch_beside("rope_kernel", rope_kernel, grid, dim3(32 * kWarps), bytes, stream, params);
}

}  // namespace lockstep::kernels
