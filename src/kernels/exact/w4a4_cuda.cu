/// The exact product on a CUDA device, and its weights.
#include "kernels/exact/factor.h"
#include "kernels/exact/w4a4_kernel_cuda.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

using namespace w4a4_device;

struct FillParams {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t code_stride;
  std::int64_t scale_stride;
  const float* global;
  Quantizer rule;
  std::byte* expert;
  std::int64_t tile_bytes;
  std::int32_t first_row;
  std::int32_t blocks;
  std::int64_t count;  // rows * blocks
};

/// A thread puts a block of one row where it is read: lane 4 g + t of the product reads 16 bytes
/// of a chunk, of each of its four blocks columns 4 t .. 4 t + 3 of outputs g and g + 8.
__global__ void w4a4_fill_kernel(const __grid_constant__ FillParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const std::int64_t r = i / p.blocks;
  const std::int64_t block = i % p.blocks;
  const std::int64_t row = p.first_row + r;
  const auto g = static_cast<int>(row % 8);
  const auto high = static_cast<int>(row / 8 % 2);
  std::byte* chunk = p.expert + W4a4Weights::kHeaderBytes + row / 16 * p.tile_bytes +
                     block / kBlocksInChunk * kChunkBytes;
  const auto at = static_cast<int>(block % kBlocksInChunk);
  const std::uint8_t* codes = p.codes + r * p.code_stride + block * 8;
  for (int t = 0; t < 4; ++t) {
    const auto pair = static_cast<std::uint16_t>(codes[2 * t] | codes[2 * t + 1] << 8);
    *reinterpret_cast<std::uint16_t*>(chunk + (4 * g + t) * 16 + at * 4 + high * 2) = pair;
  }
  chunk[kChunkCodeBytes + (4 * g + at) * 2 + high] =
      static_cast<std::byte>(p.scales[r * p.scale_stride + block]);
  if (i > 0) return;
  const Factor factor = as_factor(global_factor(p.rule, p.global[0]));
  *reinterpret_cast<std::int32_t*>(p.expert + kExponentAt) = factor.exponent;
  *reinterpret_cast<float*>(p.expert + kMantissaAt) = factor.mantissa - 1.0f;
}

}  // namespace

void w4a4_cuda(const W4a4Args& args, std::int64_t items, Stream stream) {
  const cuda::OnDevice scope(args.w.device.index);
  launch(params_of(args, items), args.w.device.index, stream);
}

void w4a4_fill_cuda(const W4a4Weights& weights, std::int32_t expert, std::int32_t first_row,
                    const PackedView<const std::uint8_t>& rows, const Quantizer& rule,
                    Stream stream) {
  const cuda::OnDevice scope(weights.device.index);
  FillParams p{};
  p.codes = rows.codes.data;
  p.scales = rows.scales.data;
  p.code_stride = rows.codes.stride[0];
  p.scale_stride = rows.scales.stride[0];
  p.global = rows.global.data;
  p.rule = rule;
  p.expert = weights.expert(expert);
  p.tile_bytes = W4a4Weights::tile_bytes(weights.cols);
  p.first_row = first_row;
  p.blocks = weights.cols / 16;
  p.count = rows.codes.shape[0] * p.blocks;
  const auto grid = static_cast<unsigned>((p.count + 255) / 256);
  w4a4_fill_kernel<<<grid, 256, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("w4a4_fill_kernel");
}

}  // namespace lockstep::kernels
