/// The routed experts of a layer: W13, SwiGLU with quantization, W2 and the sum over a token's
/// slots. Each launch starts beside the one before it; W2's has its weights on their way when
/// SwiGLU's ends, and waits for it before it reads anything that W13 or SwiGLU wrote.
#include "kernels/dense/row_cuda.h"
#include "kernels/exact/moe_w4a4_cuda.h"
#include "kernels/exact/w4a4_kernel_cuda.h"
#include "numerics/exp.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

using namespace w4a4_device;

constexpr int kMostWords = 4;  // of four elements, of a thread
static_assert(kMoeMostWidth == 4 * kMostWords * kThreads);

struct SwigluParams {
  const float* up;
  std::int64_t up_stride;
  std::int32_t* bad;
  std::uint8_t* codes;
  std::uint8_t* scales;
  float* global;
  std::int64_t code_stride;
  std::int64_t scale_stride;
  std::int64_t global_stride;
  std::int32_t width;
  std::int32_t slots;
};

__device__ float4 load_four(const float* from) {
  if ((reinterpret_cast<std::uintptr_t>(from) & 15u) == 0) {
    return *reinterpret_cast<const float4*>(from);
  }
  return {from[0], from[1], from[2], from[3]};
}

/// W2's operand, a block of threads a slot: quantization is under one power of two.
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ SwigluParams p) {
  __shared__ int most_of_warp[kWarps];
  const std::int64_t slot = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int words = p.width / 4;
  cuda::release_successor();  // W2 finds its work, and fetches weights, while W13 ends
  cuda::wait_for_predecessor();
  float value[kMostWords][4] = {};
  int most = 0;  // bits of a magnitude
#pragma unroll
  for (int i = 0; i < kMostWords; ++i) {
    const int word = thread + i * kThreads;
    if (word >= words) break;
    const float* const from = p.up + slot * p.up_stride + word * 4;
    const float4 gate = load_four(from);
    const float4 up = load_four(from + p.width);
    const float g[4] = {gate.x, gate.y, gate.z, gate.w};
    const float u[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Bf16 x = swiglu_exact(g[j], u[j]);
      value[i][j] = to_float(x);
      most = max(most, static_cast<int>(x) & 0x7FFF);
    }
  }
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (thread % 32 == 0) most_of_warp[thread / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = max(most, most_of_warp[i]);
  const bool finite = most < 0x7F80;
  const std::int32_t n =
      finite ? global_exponent(float_of(static_cast<std::uint32_t>(most) << 16)) : 0;
  if (thread == 0) {
    p.global[slot * p.global_stride] = power_of_two(n);
    if (!finite && p.bad != nullptr) {
      atomicMin(p.bad, static_cast<std::int32_t>(slot / p.slots));
    }
  }
#pragma unroll
  for (int i = 0; i < kMostWords; ++i) {
    const int word = thread + i * kThreads;
    if (word - thread >= words) break;
    // The four lanes of a block agree on its scale.
    float block_most = fmaxf(fmaxf(magnitude(value[i][0]), magnitude(value[i][1])),
                             fmaxf(magnitude(value[i][2]), magnitude(value[i][3])));
    block_most = fmaxf(block_most, __shfl_xor_sync(0xFFFFFFFFu, block_most, 1));
    block_most = fmaxf(block_most, __shfl_xor_sync(0xFFFFFFFFu, block_most, 2));
    if (word >= words) break;
    std::uint32_t packed = 0;
    std::uint8_t s8 = 0;
    if (finite) {
      const E4m3 scale = block_scale(block_most, n);
      s8 = bits_of(scale);
      const float unit = scale_value(scale, n);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packed |= static_cast<std::uint32_t>(bits_of(to_e2m1_scaled(value[i][j], unit))) << 4 * j;
      }
    }
    *reinterpret_cast<std::uint16_t*>(p.codes + slot * p.code_stride + word * 2) =
        static_cast<std::uint16_t>(packed);
    if (word % 4 == 0) p.scales[slot * p.scale_stride + word / 4] = s8;
  }
}

struct CombineParams {
  const float* y;
  std::int64_t y_stride;
  const float* gates;
  std::int64_t gate_stride;
  Bf16* out;
  std::int64_t out_stride;
  std::int32_t slots;
  std::int32_t columns;
};

/// The sum over a token's slots, in their order; a thread a column.
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p) {
  const std::int64_t token = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  cuda::wait_for_predecessor();
  cuda::release_successor();
  if (column >= p.columns) return;
  const float* const y = p.y + token * p.slots * p.y_stride + column;
  float sum[1];
  sum_slots(y, p.y_stride, p.gates + token * p.gate_stride, p.slots, sum);
  p.out[token * p.out_stride + column] = to_bf16(sum[0]);
}

}  // namespace

void moe_w4a4_cuda(const MoeW4a4Args& args, Stream stream) {
  const std::int8_t device = args.a.codes.device.index;
  const cuda::OnDevice scope(device);
  const auto slots = static_cast<std::int32_t>(args.gates.shape[1]);
  const std::int64_t rows = args.gates.shape[0];
  const std::int64_t items = rows * slots;
  Params first = params_of({.a = args.a,
                            .w = args.gate_up,
                            .offsets = args.offsets,
                            .from = args.rows_of,
                            .to = args.slots_of,
                            .out = args.up},
                           items);
  first.starts_early = args.settled;
  launch(first, device, stream);

  SwigluParams swiglu{};
  swiglu.up = args.up.data;
  swiglu.up_stride = args.up.stride[0];
  swiglu.bad = args.bad;
  swiglu.codes = args.w2_in.codes.data;
  swiglu.scales = args.w2_in.scales.data;
  swiglu.global = args.w2_in.global.data;
  swiglu.code_stride = args.w2_in.codes.stride[0];
  swiglu.scale_stride = args.w2_in.scales.stride[0];
  swiglu.global_stride = args.w2_in.global.stride[0];
  swiglu.width = args.down.cols;
  swiglu.slots = slots;
  constexpr int kCarveout = carveout_of(kResidents, static_cast<int>(sizeof(Shared<1>)));
  launch_carved("swiglu_kernel", swiglu_kernel, dim3(static_cast<unsigned>(items)), 0, kCarveout,
                stream, swiglu);

  Params second = params_of({.a = args.w2_in,
                             .w = args.down,
                             .offsets = args.offsets,
                             .from = args.slots_of,
                             .to = args.slots_of,
                             .out = args.y},
                            items);
  second.starts_early = true;  // W13 has read offsets and slots_of
  launch(second, device, stream);

  if (args.out.empty()) return;
  CombineParams combine{};
  combine.y = args.y.data;
  combine.y_stride = args.y.stride[0];
  combine.gates = args.gates.data;
  combine.gate_stride = args.gates.stride[0];
  combine.out = args.out.data;
  combine.out_stride = args.out.stride[0];
  combine.slots = slots;
  combine.columns = args.down.out;
  const auto columns = static_cast<unsigned>((args.down.out + kThreads - 1) / kThreads);
  launch_carved("combine_kernel", combine_kernel, dim3(static_cast<unsigned>(rows), columns), 0,
                kCarveout, stream, combine);
}

}  // namespace lockstep::kernels
