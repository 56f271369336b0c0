#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/shared.h"
#include "kernels/dense/rms_norm_rows.h"
#include "kernels/dense/row_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostCols = 1 << 15;  // a row is kept in shared memory

struct Params {
  const Bf16* x;
  const Bf16* weight;
  Bf16* y;
  std::int64_t x_stride;
  std::int64_t y_stride;
  std::int32_t cols;
  float eps;
};

/// A block a row. kWide: 8 elements at once, all rows aligned to them.
template <bool kWide>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const __grid_constant__ Params p) {
  cuda::take_turn();
  extern __shared__ __align__(16) unsigned char shared[];
  Bf16* const row = reinterpret_cast<Bf16*>(shared);
  __shared__ float inverse_of_row;
  const Bf16* const x = p.x + blockIdx.x * p.x_stride;
  Bf16* const y = p.y + blockIdx.x * p.y_stride;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kWidth = kWide ? 8 : 1;
  for (int i = thread * kWidth; i < p.cols; i += kThreads * kWidth) {
    if constexpr (kWide) {
      *reinterpret_cast<uint4*>(row + i) = *reinterpret_cast<const uint4*>(x + i);
    } else {
      row[i] = x[i];
    }
  }
  __syncthreads();
  if (thread < 32) {
    const float squares = warp_sum_of_squares(row, p.cols);
    if (thread == 0) {
      inverse_of_row = inverse_rms(squares, static_cast<float>(p.cols), p.eps);
    }
  }
  __syncthreads();
  const float inverse = inverse_of_row;
  for (int i = thread * kWidth; i < p.cols; i += kThreads * kWidth) {
    if constexpr (kWide) {
      const uint4 from = *reinterpret_cast<const uint4*>(row + i);
      const uint4 weight = *reinterpret_cast<const uint4*>(p.weight + i);
      const auto pair = [inverse](std::uint32_t v, std::uint32_t w) {
        const std::uint32_t normal =
            to_bf16_pair(__fmul_rn(low_of(v), inverse), __fmul_rn(high_of(v), inverse));
        return to_bf16_pair(__fmul_rn(low_of(normal), low_of(w)),
                            __fmul_rn(high_of(normal), high_of(w)));
      };
      *reinterpret_cast<uint4*>(y + i) = make_uint4(pair(from.x, weight.x), pair(from.y, weight.y),
                                                    pair(from.z, weight.z), pair(from.w, weight.w));
    } else {
      const Bf16 normal = to_bf16(__fmul_rn(to_float(row[i]), inverse));
      y[i] = to_bf16(__fmul_rn(to_float(normal), to_float(p.weight[i])));
    }
  }
}

bool aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

}  // namespace

void rms_norm_cuda(const RmsNormArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  if (rows == 0) return;
  if (cols > kMostCols) {
    throw Error(
        cat({"rms_norm: rows of ", cols, " elements on a CUDA device; at most ", kMostCols}));
  }
  const cuda::OnDevice scope(args.x.device.index);
  const Params params{args.x.data,      args.weight.data(), args.y.data,
                      args.x.stride[0], args.y.stride[0],   static_cast<std::int32_t>(cols),
                      args.eps};
  const bool wide = cols % 8 == 0 && args.x.stride[0] % 8 == 0 && args.y.stride[0] % 8 == 0 &&
                    aligned(args.x.data) && aligned(args.y.data) && aligned(args.weight.data());
  const auto kernel = wide ? rms_norm_kernel<true> : rms_norm_kernel<false>;
  const auto bytes = static_cast<std::size_t>(cols) * sizeof(Bf16);
  cuda::allow_shared(kernel, bytes);
  cuda::lay_out_for_shared(kernel);
  cuda::launch_beside("rms_norm_kernel", kernel, dim3(static_cast<unsigned>(rows)), dim3(kThreads),
                      bytes, stream, params);
}

}  // namespace lockstep::kernels
