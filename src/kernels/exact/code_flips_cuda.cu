#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/code_flips_cuda.h"
#include "kernels/exact/w4a4_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;

struct Counts {
  unsigned int code = 0, adjacent = 0, scale = 0, value = 0;
};

__device__ inline void compare_codes(std::uint32_t now, std::uint32_t before, int codes,
                                     Counts& counts) {
  if (now == before) return;
  for (int i = 0; i < codes; ++i, now >>= 4, before >>= 4) {
    const int steps = abs(grid_place(now & 15u) - grid_place(before & 15u));
    counts.code += steps != 0;
    counts.adjacent += steps == 1;
  }
}

__device__ inline void add(unsigned int mine, std::int64_t* to) {
  const unsigned int all = __reduce_add_sync(0xFFFFFFFFu, mine);
  if (threadIdx.x % 32 == 0 && all != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(all));
  }
}

/// Of all threads of the grid.
__device__ inline void add(const Counts& counts, std::int64_t* to) {
  add(counts.code, to + kCodeFlips);
  add(counts.adjacent, to + kAdjacentFlips);
  add(counts.scale, to + kScaleFlips);
  add(counts.value, to + kValueFlips);
}

struct TileParams {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t code_stride;
  std::int64_t scale_stride;
  const std::byte* expert;
  std::int64_t tile_bytes;
  std::int32_t blocks;
  std::int64_t count;  // rows * blocks
};

/// A block of one row a thread, where w4a4_fill puts it.
__global__ void __launch_bounds__(kThreads)
    flips_of_tiles_kernel(const __grid_constant__ TileParams p, std::int64_t* counts) {
  using namespace w4a4_device;
  Counts mine;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.count;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / p.blocks;
    const std::int64_t block = i % p.blocks;
    const auto g = static_cast<int>(row % 8);
    const auto high = static_cast<int>(row / 8 % 2);
    const std::byte* chunk = p.expert + W4a4Weights::kHeaderBytes + row / 16 * p.tile_bytes +
                             block / kBlocksInChunk * kChunkBytes;
    const auto at = static_cast<int>(block % kBlocksInChunk);
    const std::uint8_t* codes = p.codes + row * p.code_stride + block * 8;
    for (int t = 0; t < 4; ++t) {
      compare_codes(
          static_cast<std::uint32_t>(codes[2 * t] | codes[2 * t + 1] << 8),
          *reinterpret_cast<const std::uint16_t*>(chunk + (4 * g + t) * 16 + at * 4 + high * 2), 4,
          mine);
    }
    const auto before =
        static_cast<std::uint32_t>(chunk[kChunkCodeBytes + (4 * g + at) * 2 + high]);
    mine.scale += p.scales[row * p.scale_stride + block] != before;
  }
  add(mine, counts);
}

template <typename T>
struct RowsParams {
  const T* now;
  const T* before;
  std::int64_t now_stride;
  std::int64_t before_stride;
  std::int64_t cols;
  std::int64_t count;  // rows * cols
};

enum class What { kCodes, kScales, kValues };

template <What kWhat, typename T>
__global__ void __launch_bounds__(kThreads)
    flips_of_rows_kernel(const __grid_constant__ RowsParams<T> p, std::int64_t* counts) {
  Counts mine;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.count;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / p.cols, col = i % p.cols;
    const std::uint32_t now = p.now[row * p.now_stride + col];
    const std::uint32_t before = p.before[row * p.before_stride + col];
    if constexpr (kWhat == What::kCodes) compare_codes(now, before, 2, mine);
    if constexpr (kWhat == What::kScales) mine.scale += now != before;
    if constexpr (kWhat == What::kValues) mine.value += is_value_flip(before, now);
  }
  add(mine, counts);
}

unsigned int blocks_for(std::int64_t count, Device device) {
  const std::int64_t most = 8ll * cuda::multiprocessors(device.index);
  return static_cast<unsigned int>(std::min(most, (count + kThreads - 1) / kThreads));
}

template <What kWhat, typename T>
void compare_rows(const T* now, std::int64_t now_stride, const T* before,
                  std::int64_t before_stride, const std::array<std::int64_t, 2>& shape,
                  Device device, std::int64_t* counts, Stream stream) {
  const RowsParams<T> p = {now, before, now_stride, before_stride, shape[1], shape[0] * shape[1]};
  if (p.count == 0) return;
  flips_of_rows_kernel<kWhat>
      <<<blocks_for(p.count, device), kThreads, 0, cuda::stream_of(stream)>>>(p, counts);
  cuda::require_launch("flips_of_rows_kernel");
}

}  // namespace

void count_flips_cuda(const PackedView<const std::uint8_t>& now, const W4a4Weights& before,
                      std::int32_t expert, std::int64_t* counts, Stream stream) {
  const cuda::OnDevice scope(before.device.index);
  TileParams p{};
  p.codes = now.codes.data;
  p.scales = now.scales.data;
  p.code_stride = now.codes.stride[0];
  p.scale_stride = now.scales.stride[0];
  p.expert = before.expert(expert);
  p.tile_bytes = W4a4Weights::tile_bytes(before.cols);
  p.blocks = before.cols / 16;
  p.count = now.codes.shape[0] * p.blocks;
  if (p.count == 0) return;
  flips_of_tiles_kernel<<<blocks_for(p.count, before.device), kThreads, 0,
                          cuda::stream_of(stream)>>>(p, counts);
  cuda::require_launch("flips_of_tiles_kernel");
}

void count_flips_cuda(const PackedView<const std::uint8_t>& now,
                      const PackedView<const std::uint8_t>& before, std::int64_t* counts,
                      Stream stream) {
  const Device device = before.codes.device;
  const cuda::OnDevice scope(device.index);
  compare_rows<What::kCodes>(now.codes.data, now.codes.stride[0], before.codes.data,
                             before.codes.stride[0], now.codes.shape, device, counts, stream);
  compare_rows<What::kScales>(now.scales.data, now.scales.stride[0], before.scales.data,
                              before.scales.stride[0], now.scales.shape, device, counts, stream);
}

void count_flips_cuda(TensorView<const Bf16, 2> now, TensorView<const Bf16, 2> before,
                      std::int64_t* counts, Stream stream) {
  const cuda::OnDevice scope(before.device.index);
  compare_rows<What::kValues>(reinterpret_cast<const std::uint16_t*>(now.data), now.stride[0],
                              reinterpret_cast<const std::uint16_t*>(before.data), before.stride[0],
                              now.shape, before.device, counts, stream);
}

}  // namespace lockstep::kernels
