#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "kernels/dense/attention_cuda.h"
#include "kernels/exact/quantize_block.h"

namespace lockstep::kernels {
namespace {

constexpr int kWarps = 4;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Params {
  const Bf16* x;
  std::byte* pool;  // with the layer's offset
  const std::int32_t* positions;
  const std::int32_t* sequence;
  const std::int32_t* table;
  std::int64_t* counts;  // or null
  std::int64_t counts_stride;
  std::int64_t x_stride;
  std::int64_t page_bytes;
  std::int64_t table_stride;
  std::int64_t rows;
  Quantizer rule;
  std::int32_t exponent;
  std::int32_t width;
  std::int32_t page_tokens;
  std::int32_t row_bytes;
};

__device__ std::uint8_t* place(const Params& p, std::int64_t row) {
  const std::int32_t position = p.positions[row];
  const std::int64_t page = p.table[p.sequence[row] * p.table_stride + position / p.page_tokens];
  return reinterpret_cast<std::uint8_t*>(p.pool) + page * p.page_bytes +
         std::int64_t{position % p.page_tokens} * p.row_bytes;
}

__device__ float amax_of_warp(float amax) {
  return float_of(__reduce_max_sync(kAllLanes, float_bits(amax)));
}

/// Codes of a finite row, a thread a block of 16 or 32.
__device__ void encode_row(const Params& p, const Bf16* x, float amax, std::uint8_t* to,
                           QuantizeCounts& counts) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const GlobalNumbers global = row_global(p.rule, amax, p.exponent, 0.0f, {});
  const std::int32_t block = p.rule.is_wide() ? 16 : p.rule.block;
  std::uint8_t* const scales = to + p.rule.code_bytes(p.width);
  const float inverse = p.rule.is_wide() ? inverse_of(power_of_two(p.exponent)) : 0.0f;
  for (std::int32_t j = lane; j * block < p.width; j += 32) {
    Bf16 own[32];
    std::uint8_t codes[16] = {};
    const std::int32_t size = min(block, p.width - j * block);
#pragma unroll
    for (std::int32_t i = 0; i < 32; ++i) own[i] = i < size ? x[j * block + i] : Bf16{};
    if (p.rule.is_wide()) {
#pragma unroll
      for (std::int32_t i = 0; i < 16; ++i) {
        codes[i] = bits_of(to_e4m3_scaled(to_float(own[i]), inverse));
        if (i < size) to[j * block + i] = codes[i];
      }
      continue;
    }
    const float block_amax = amax_of(own, 32);  // what is past the block is 0
    const std::uint8_t byte = block_byte(own, block_amax, p.rule, global);
    const BlockCoder coder = block_coder(p.rule, byte, global);
#pragma unroll
    for (std::int32_t i = 0; i < 16; ++i) {
      const E2m1 low = code_of(to_float(own[2 * i]), coder);
      const E2m1 high = code_of(to_float(own[2 * i + 1]), coder);
      codes[i] = static_cast<std::uint8_t>(bits_of(low) | bits_of(high) << 4);
      if (2 * i < block) to[j * block / 2 + i] = codes[i];
    }
    scales[j] = byte;
    count_block(block_amax, byte, p.rule, global, counts);
  }
  if (p.rule.is_wide() && lane == 0) count_wide_block(amax, p.rule, global, counts);
}

/// A warp a row.
__global__ void __launch_bounds__(32 * kWarps) write_kv_kernel(const __grid_constant__ Params p) {
  cuda::take_turn();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const Bf16* const x = p.x + row * p.x_stride;
  std::uint8_t* const to = place(p, row);
  if (!p.rule.quantizes()) {
    for (std::int32_t i = lane; i < p.width; i += 32) reinterpret_cast<Bf16*>(to)[i] = x[i];
    return;
  }
  float amax = 0.0f;
  for (std::int32_t i = lane; i < p.width; i += 32) amax = fmaxf(amax, amax_of(x + i, 1));
  amax = amax_of_warp(amax);
  QuantizeCounts counts{};
  if (is_finite(amax)) {
    encode_row(p, x, amax, to, counts);
  } else {
    for (std::int32_t i = lane; i < p.row_bytes; i += 32) to[i] = 0;
    counts[kNonfiniteRows] = lane == 0;
  }
  if (p.counts == nullptr) return;
#pragma unroll
  for (int i = 0; i < kNumQuantizeCounts; ++i) {
    const int sum =
        __reduce_add_sync(kAllLanes, static_cast<int>(counts[static_cast<std::size_t>(i)]));
    if (lane == 0 && sum > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + i * p.counts_stride),
                static_cast<unsigned long long>(sum));
    }
  }
}

}  // namespace

void write_kv_cuda(const WriteKvArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  if (rows == 0) return;
  const PagedKv& kv = args.kv;
  if (args.rows.table.empty()) {
    throw Error("write_kv: rows.table is empty; on a CUDA device it tells a row's page");
  }
  const cuda::OnDevice scope(args.x.device.index);
  const Params params{args.x.data,
                      kv.pool + kv.offset,
                      args.rows.positions.data(),
                      args.rows.sequence.data(),
                      args.rows.table.data,
                      args.counts.data,
                      args.counts.stride[0],
                      args.x.stride[0],
                      kv.page_bytes,
                      args.rows.table.stride[0],
                      rows,
                      kv.rule,
                      kv.exponent,
                      static_cast<std::int32_t>(args.x.shape[1]),
                      kv.page_tokens,
                      kv.row_bytes};
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps));
  cuda::launch_beside("write_kv_kernel", write_kv_kernel, grid, dim3(32 * kWarps), 0, stream,
                      params);
}

}  // namespace lockstep::kernels
