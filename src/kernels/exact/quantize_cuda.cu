/// quantize() on a CUDA device by every rule: a block of threads takes a record's rows and runs the
/// definition of quantize_block.h. quantize_lane_cuda.cu is the fast way under the usual rules.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/quantize_params.h"
#include "kernels/exact/record_byte.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostSlots = 256;
constexpr int kMostBandRows = 1024;

struct Shared {
  std::uint32_t bits[kThreads / 32];
  unsigned long long counts[kNumQuantizeCounts];
  std::int8_t exponents[kMostSlots];
};

/// The largest of all threads' bits, for each of them.
__device__ std::uint32_t most_of_all(std::uint32_t bits, Shared& shared) {
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if (threadIdx.x % 32 == 0) shared.bits[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = shared.bits[threadIdx.x % (kThreads / 32)];
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  __syncthreads();
  return bits;
}

template <typename T>
__device__ float block_amax(const T* x, std::int64_t cols, Shared& shared) {
  std::uint32_t bits = 0;
  for (std::int64_t i = threadIdx.x; i < cols; i += kThreads) {
    bits = max(bits, float_bits(value_of(x[i])) & 0x7FFFFFFFu);
  }
  return float_of(min(most_of_all(bits, shared), 0x7F800000u));
}

template <typename T>
__device__ const T* row_of(const QuantizeParams& p, std::int64_t row) {
  return static_cast<const T*>(p.x) + row * p.x_stride;
}

template <typename T>
__device__ float amax_of_row(const QuantizeParams& p, std::int64_t row, Shared& shared) {
  if (p.amax != nullptr) {
    return float_of(min(float_bits(p.amax[row * p.amax_stride]) & 0x7FFFFFFFu, 0x7F800000u));
  }
  return block_amax(row_of<T>(p, row), p.cols, shared);
}

/// Blocks of E2M1, a thread each.
template <typename T>
__device__ void encode_blocks(const QuantizeParams& p, std::int64_t row,
                              const GlobalNumbers& global, QuantizeCounts& counts) {
  const T* x = row_of<T>(p, row);
  std::uint8_t* codes = p.codes + row * p.codes_stride;
  const std::int32_t block = p.rule.block;
  for (std::int64_t j = threadIdx.x; j < p.cols / block; j += kThreads) {
    p.scales[row * p.scales_stride + j] =
        encode_block(x + j * block, p.rule, global, codes + j * block / 2, counts);
  }
}

__device__ void encode_e4m3_code(float x, float inverse, std::uint8_t* code) {
  *code = bits_of(to_e4m3_scaled(x, inverse));
}

/// Blocks of E4M3, a thread each; without scales the row is one block and the threads share it.
template <typename T>
__device__ void encode_wide(const QuantizeParams& p, std::int64_t row, float amax,
                            const GlobalNumbers& global, QuantizeCounts& counts) {
  const T* x = row_of<T>(p, row);
  std::uint8_t* codes = p.codes + row * p.codes_stride;
  if (!p.rule.is_mx()) {
    const float inverse = inverse_of(scale_value(p.rule, 0, global.exponent));
    for (std::int64_t i = threadIdx.x; i < p.cols; i += kThreads) {
      encode_e4m3_code(value_of(x[i]), inverse, codes + i);
    }
    if (threadIdx.x == 0 && p.cols > 0) count_wide_block(amax, p.rule, global, counts);
    return;
  }
  const std::int64_t block = p.rule.block;
  for (std::int64_t j = threadIdx.x; j * block < p.cols; j += kThreads) {
    const std::int64_t first = j * block;
    const std::int64_t end = min(first + block, p.cols);
    const float most = amax_of(x + first, end - first);
    const std::uint8_t byte = scale_byte(p.rule, most, global);
    p.scales[row * p.scales_stride + j] = byte;
    const float inverse = inverse_of(scale_value(p.rule, byte, global.exponent));
    for (std::int64_t i = first; i < end; ++i) {
      encode_e4m3_code(value_of(x[i]), inverse, codes + i);
    }
    count_wide_block(most, p.rule, global, counts);
  }
}

__device__ void clear_row(const QuantizeParams& p, std::int64_t row) {
  std::uint8_t* codes = p.codes + row * p.codes_stride;
  for (std::int64_t i = threadIdx.x; i < p.rule.code_bytes(p.cols); i += kThreads) codes[i] = 0;
  if (p.scales == nullptr) return;
  std::uint8_t* scales = p.scales + row * p.scales_stride;
  for (std::int64_t i = threadIdx.x; i < p.rule.scale_cols(p.cols); i += kThreads) scales[i] = 0;
}

template <typename T>
__device__ void quantize_row(const QuantizeParams& p, std::int64_t row, std::int64_t slot,
                             Shared& shared, QuantizeCounts& counts) {
  const float amax = amax_of_row<T>(p, row, shared);
  const bool finite = is_finite(amax);
  GlobalNumbers whole;
  if (p.rule.global == GlobalScale::kPerTensor) whole = global_of_amax(p.rule, *p.global);
  const GlobalNumbers global =
      row_global(p.rule, finite ? amax : 0.0f, p.exponent, p.static_amax, whole);
  if (!finite) {
    clear_row(p, row);
  } else if (p.rule.is_wide()) {
    encode_wide<T>(p, row, amax, global, counts);
  } else {
    encode_blocks<T>(p, row, global, counts);
  }
  if (threadIdx.x != 0) return;
  counts[kNonfiniteRows] += !finite;
  if (p.nonfinite != nullptr) p.nonfinite[row * p.nonfinite_stride] = finite ? 0 : 1;
  if (row < p.globals && p.global != nullptr && p.rule.global != GlobalScale::kPerTensor) {
    p.global[row * p.global_stride] = stored_global(p.rule, global);
  }
  if (slot < kMostSlots) shared.exponents[slot] = static_cast<std::int8_t>(global.exponent);
}

template <typename T>
__device__ void write_group_record(const QuantizeParams& p, std::int64_t group,
                                   const Shared& shared) {
  std::uint8_t* out = p.records + group * p.records_stride;
  const std::int64_t first = group * p.slots;
  if (p.layout.encoding == Encoding::kBf16) {
    for (std::int64_t i = threadIdx.x; i < p.slots * p.cols * 2; i += kThreads) {
      const std::int64_t at = i / 2;
      const auto* x = static_cast<const Bf16*>(p.x) + (first + at / p.cols) * p.x_stride;
      out[i] = static_cast<std::uint8_t>(bits_of(x[at % p.cols]) >> (i % 2 * 8));
    }
    return;
  }
  const CodedSlots rows = {p.codes + first * p.codes_stride,
                           p.scales + first * p.scales_stride,
                           p.codes_stride,
                           p.scales_stride,
                           static_cast<std::int32_t>(p.cols),
                           p.rule.is_wide()};
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < p.layout.bytes();
       i += kThreads) {
    out[i] = record_byte(rows, p.layout, shared.exponents, i);
  }
}

__device__ void add_counts(const QuantizeParams& p, const QuantizeCounts& counts, Shared& shared) {
  if (p.counts == nullptr) return;
  if (threadIdx.x < kNumQuantizeCounts) shared.counts[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kNumQuantizeCounts; ++i) {
    const auto count = static_cast<unsigned long long>(counts[static_cast<std::size_t>(i)]);
    if (count > 0) atomicAdd(&shared.counts[i], count);
  }
  __syncthreads();
  if (threadIdx.x >= kNumQuantizeCounts || shared.counts[threadIdx.x] == 0) return;
  auto* to = reinterpret_cast<unsigned long long*>(p.counts + threadIdx.x * p.counts_stride);
  atomicAdd(to, shared.counts[threadIdx.x]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_general_kernel(const __grid_constant__ QuantizeParams p) {
  __shared__ Shared shared;
  QuantizeCounts counts{};
  for (std::int64_t group = blockIdx.x; group < p.rows / p.slots; group += gridDim.x) {
    for (std::int64_t slot = 0; slot < p.slots; ++slot) {
      quantize_row<T>(p, group * p.slots + slot, slot, shared, counts);
    }
    if (p.layout.encoding != Encoding::kNone) {
      __syncthreads();  // the record is made of what all threads wrote
      write_group_record<T>(p, group, shared);
      __syncthreads();  // before the next one's exponents
    }
  }
  add_counts(p, counts, shared);
}

/// The amax of the finite rows into *global, which began as 0: floats that are not negative are
/// ordered as their bits are.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_amax_kernel(const __grid_constant__ QuantizeParams p) {
  __shared__ Shared shared;
  std::uint32_t most = 0;
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const float amax = amax_of_row<T>(p, row, shared);
    if (is_finite(amax)) most = max(most, float_bits(amax));
  }
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned int*>(p.global), most);
}

/// The number that stands beside the codes of a matrix, in the place of its amax.
__global__ void quantize_global_kernel(const __grid_constant__ QuantizeParams p) {
  const float amax = *p.global;
  __syncthreads();
  const float stored = stored_global(p.rule, global_of_amax(p.rule, amax));
  for (std::int64_t i = threadIdx.x; i < p.globals; i += kThreads) {
    p.global[i * p.global_stride] = stored;
  }
}

/// Blocks of many rows of E4M3: scales of one band of blocks, then the codes of its rows.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_bands_kernel(const __grid_constant__ QuantizeParams p) {
  __shared__ Shared shared;
  __shared__ bool finite[kMostBandRows];
  QuantizeCounts counts{};
  const std::int64_t first = std::int64_t{blockIdx.x} * p.rule.block_rows;
  const auto rows = static_cast<std::int32_t>(min(p.rows - first, std::int64_t{p.rule.block_rows}));
  for (std::int32_t r = 0; r < rows; ++r) {
    const bool good = is_finite(amax_of_row<T>(p, first + r, shared));
    if (threadIdx.x != 0) continue;
    finite[r] = good;
    counts[kNonfiniteRows] += !good;
    if (p.nonfinite != nullptr) p.nonfinite[(first + r) * p.nonfinite_stride] = good ? 0 : 1;
  }
  __syncthreads();
  for (std::int64_t j = 0; j < p.rule.scale_cols(p.cols); ++j) {
    const std::int64_t at = j * p.rule.block;
    const auto width = static_cast<std::int32_t>(min(std::int64_t{p.rule.block}, p.cols - at));
    std::uint32_t bits = 0;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < rows * width; i += kThreads) {
      if (!finite[i / width]) continue;
      const float x = value_of(row_of<T>(p, first + i / width)[at + i % width]);
      bits = max(bits, float_bits(x) & 0x7FFFFFFFu);
    }
    const float amax = float_of(most_of_all(bits, shared));
    const std::uint8_t byte = scale_byte(p.rule, amax, {});
    const float inverse = inverse_of(mx_value(p.rule, byte));
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < rows * width; i += kThreads) {
      const std::int64_t row = first + i / width;
      const float x = finite[i / width] ? value_of(row_of<T>(p, row)[at + i % width]) : 0.0f;
      encode_e4m3_code(x, inverse, p.codes + row * p.codes_stride + at + i % width);
    }
    if (threadIdx.x != 0) continue;
    p.scales[blockIdx.x * p.scales_stride + j] = byte;
    ++counts[kBlocks];
    counts[kZeroBlocks] += amax == 0.0f;
  }
  add_counts(p, counts, shared);
}

template <typename T>
void launch(const QuantizeParams& p, Device device, cudaStream_t stream) {
  const int most = cuda::multiprocessors(device.index) * 8;
  const auto grid = [most](std::int64_t work) {
    return static_cast<unsigned int>(std::min<std::int64_t>(work, most));
  };
  if (p.rule.block_rows > 1) {
    const std::int64_t bands = p.rule.scale_rows(p.rows);
    quantize_bands_kernel<T><<<static_cast<unsigned int>(bands), kThreads, 0, stream>>>(p);
    return cuda::require_launch("quantize_bands_kernel");
  }
  quantize_general_kernel<T><<<grid(p.rows / p.slots), kThreads, 0, stream>>>(p);
  cuda::require_launch("quantize_general_kernel");
}

template <typename T>
void launch_amax(const QuantizeParams& p, Device device, cudaStream_t stream) {
  const int most = cuda::multiprocessors(device.index) * 8;
  quantize_amax_kernel<T>
      <<<static_cast<unsigned int>(std::min<std::int64_t>(p.rows, most)), kThreads, 0, stream>>>(p);
  cuda::require_launch("quantize_amax_kernel");
}

QuantizeParams params_of(const QuantizeArgs& args) {
  const bool f32 = !args.x_f32.empty();
  QuantizeParams p;
  p.rule = args.rule;
  p.x = f32 ? static_cast<const void*>(args.x_f32.data) : args.x.data;
  p.x_stride = f32 ? args.x_f32.stride[0] : args.x.stride[0];
  p.rows = f32 ? args.x_f32.shape[0] : args.x.shape[0];
  p.cols = f32 ? args.x_f32.shape[1] : args.x.shape[1];
  p.amax = args.amax.data;
  p.amax_stride = args.amax.stride[0];
  p.exponent = args.exponent;
  p.static_amax = args.static_amax;
  p.codes = args.out.codes.data;
  p.codes_stride = args.out.codes.stride[0];
  if (args.rule.scale != ScaleFormat::kNone) p.scales = args.out.scales.data;
  p.scales_stride = args.out.scales.stride[0];
  p.global = args.out.global.data;
  p.global_stride = args.out.global.stride[0];
  p.globals = args.out.global.shape[0];
  p.layout = args.layout;
  if (args.layout.encoding != Encoding::kNone) {
    p.slots = args.layout.width / p.cols;
    p.records = args.records.data;
    p.records_stride = args.records.stride[0];
  }
  p.nonfinite = args.nonfinite.data;
  p.nonfinite_stride = args.nonfinite.stride[0];
  p.counts = args.counts.data;
  p.counts_stride = args.counts.stride[0];
  return p;
}

/// What a kernel has no room for.
void check_kernel(const QuantizeParams& p) {
  const bool whole = p.rule.global == GlobalScale::kPerTensor && p.rows > 0;
  if (whole && (p.global == nullptr || p.globals == 0)) {
    throw Error("quantize: out.global is empty, must have an element under a per-tensor rule");
  }
  if (p.slots > kMostSlots) {
    throw Error(cat({"quantize: a record of ", p.slots, " rows, must be at most ", kMostSlots,
                     " on a CUDA device"}));
  }
  if (p.rule.block_rows > kMostBandRows) {
    throw Error(cat({"quantize: rule.block_rows is ", p.rule.block_rows, ", must be at most ",
                     kMostBandRows, " on a CUDA device"}));
  }
}

}  // namespace

void quantize_cuda(const QuantizeArgs& args, Stream stream) {
  const bool f32 = !args.x_f32.empty();
  const Device device = f32 ? args.x_f32.device : args.x.device;
  const cuda::OnDevice scope(device.index);
  const QuantizeParams p = params_of(args);
  check_kernel(p);
  const cudaStream_t order = cuda::stream_of(stream);
  const bool whole = p.rule.global == GlobalScale::kPerTensor;
  const bool known = whole || p.rule.block_rows > 1;  // one number for all rows
  if (known && p.globals > 0 && p.global != nullptr) {
    cuda::require(cudaMemsetAsync(p.global, 0, sizeof(float), order), "cudaMemsetAsync");
  }
  if (p.rows > 0) {
    if (whole && f32) launch_amax<float>(p, device, order);
    if (whole && !f32 && !amax_lanes(p, device, stream)) launch_amax<Bf16>(p, device, order);
    if (f32) {
      launch<float>(p, device, order);
    } else if (p.rule.block_rows > 1 || !quantize_lanes(p, stream)) {
      launch<Bf16>(p, device, order);
    }
  }
  if (!known || p.globals == 0 || p.global == nullptr) return;
  quantize_global_kernel<<<1, kThreads, 0, order>>>(p);
  cuda::require_launch("quantize_global_kernel");
}

}  // namespace lockstep::kernels
