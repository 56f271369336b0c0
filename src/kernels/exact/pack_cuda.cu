/// Layouts of codes and scales on a CUDA device: each thread makes one word or byte of the output.
#include <algorithm>
#include <limits>

#include "device/cuda/check.h"
#include "kernels/exact/pack_rows.h"
#include "numerics/e2m1.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNowhere = std::numeric_limits<unsigned long long>::max();

dim3 grid_of(std::int64_t rows, std::int64_t across) {
  return {static_cast<unsigned int>((across + kThreads - 1) / kThreads),
          static_cast<unsigned int>(std::min<std::int64_t>(rows, 32768))};
}

/// body(row, i) for all i < across of all rows, a thread each; rows beyond the grid's follow.
template <typename Body>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(std::int64_t rows, std::int64_t across, const __grid_constant__ Body body) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= across) return;
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) body(row, i);
}

template <typename Body>
void over_rows(std::int64_t rows, std::int64_t across, const Body& body, Device device,
               Stream stream) {
  if (rows == 0 || across == 0) return;
  const cuda::OnDevice scope(device.index);
  rows_kernel<<<grid_of(rows, across), kThreads, 0, cuda::stream_of(stream)>>>(rows, across, body);
  cuda::require_launch("rows_kernel");
}

/// Where the first element that cannot be packed lies.
class FirstBad {
 public:
  FirstBad(Device device, Stream stream) : at_(device, sizeof(kNowhere), stream), stream_(stream) {
    fill_bytes(at_.as<void>(), device, 0xFF, at_.bytes(), stream);
  }
  unsigned long long* device_data() const { return at_.as<unsigned long long>(); }
  /// Waits. Negative: nowhere.
  std::int64_t wait() const {
    unsigned long long at = kNowhere;
    copy_bytes(&at, {}, at_.as<void>(), at_.device(), sizeof(at), stream_);
    synchronize(at_.device(), stream_);
    return at == kNowhere ? -1 : static_cast<std::int64_t>(at);
  }

 private:
  Buffer at_;
  Stream stream_;
};

/// A word of a tiled layout: the scales of four blocks of a row.
struct Swizzle {
  TensorView<const std::uint8_t, 2> scales;
  ScaleLayout layout;
  std::uint8_t* out;
  __device__ void operator()(std::int64_t row, std::int64_t four) const {
    const auto [rows, blocks] = scales.shape;
    std::uint8_t* to = out + scale_place(layout, row, four * 4, blocks);
    for (std::int64_t i = 0; i < 4; ++i) {
      const std::int64_t block = four * 4 + i;
      const bool there = row < rows && block < blocks;
      to[i] = there ? scales.data[row * scales.stride[0] + block] : std::uint8_t{0};
    }
  }
};

struct CopyScales {
  TensorView<const std::uint8_t, 2> scales;
  std::uint8_t* out;
  __device__ void operator()(std::int64_t row, std::int64_t block) const {
    out[row * scales.shape[1] + block] = scales.data[row * scales.stride[0] + block];
  }
};

struct Unswizzle {
  const std::uint8_t* from;
  ScaleLayout layout;
  TensorView<std::uint8_t, 2> scales;
  __device__ void operator()(std::int64_t row, std::int64_t block) const {
    scales.data[row * scales.stride[0] + block] =
        from[scale_place(layout, row, block, scales.shape[1])];
  }
};

struct PackCodes {
  TensorView<const std::uint8_t, 2> codes;
  TensorView<std::uint8_t, 2> packed;
  unsigned long long* bad;
  __device__ void operator()(std::int64_t row, std::int64_t i) const {
    const std::uint8_t* from = codes.data + row * codes.stride[0] + 2 * i;
    for (int j = 0; j < 2; ++j) {
      if (from[j] <= 15) continue;
      atomicMin(bad, static_cast<unsigned long long>(row * codes.shape[1] + 2 * i + j));
    }
    packed.data[row * packed.stride[0] + i] = static_cast<std::uint8_t>(from[0] | from[1] << 4);
  }
};

struct UnpackCodes {
  TensorView<const std::uint8_t, 2> packed;
  TensorView<std::uint8_t, 2> codes;
  __device__ void operator()(std::int64_t row, std::int64_t i) const {
    const std::uint8_t byte = packed.data[row * packed.stride[0] + i];
    std::uint8_t* to = codes.data + row * codes.stride[0] + 2 * i;
    to[0] = byte & 15;
    to[1] = byte >> 4;
  }
};

template <typename T>
__device__ float float_value(T x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return to_float(x);
  } else {
    return static_cast<float>(x);
  }
}

template <typename T>
struct PackValues {
  TensorView<const T, 2> values;
  TensorView<std::uint8_t, 2> packed;
  unsigned long long* bad;
  __device__ void operator()(std::int64_t row, std::int64_t i) const {
    std::uint32_t byte = 0;
    for (int j = 0; j < 2; ++j) {
      const float value = float_value(values.data[row * values.stride[0] + 2 * i + j]);
      const E2m1 code = to_e2m1(value);
      if (!(to_float(code) == value)) {
        atomicMin(bad, static_cast<unsigned long long>(row * values.shape[1] + 2 * i + j));
      }
      byte |= std::uint32_t{bits_of(code)} << (4 * j);
    }
    packed.data[row * packed.stride[0] + i] = static_cast<std::uint8_t>(byte);
  }
};

__device__ std::uint32_t nibble(const std::uint8_t* packed, std::int64_t i) {
  return static_cast<std::uint32_t>(packed[i / 2] >> (i % 2 * 4) & 15);
}

/// A group of elements that share a scale: into ggml's blocks, or back.
struct Ggml {
  GgmlBlock block;
  std::uint8_t* codes;
  std::int64_t codes_stride;
  std::uint8_t* scales;
  std::int64_t scales_stride;
  std::uint8_t* ggml;
  std::int64_t ggml_stride;
  bool back;
  __device__ void operator()(std::int64_t row, std::int64_t group) const {
    const std::int64_t inside = group % block.groups;
    const std::int64_t half = block.group / 2;
    std::uint8_t* at = ggml + row * ggml_stride + group / block.groups * block.bytes();
    std::uint8_t* scale = scales + row * scales_stride + group;
    std::uint8_t* linear = codes + row * codes_stride + group * half;
    back ? * scale = at[inside] : at[inside] = *scale;
    at += block.groups + inside * half;
    for (std::int64_t j = 0; j < half; ++j) {
      if (back) {
        // Byte j holds elements 2j and 2j + 1; element i is of byte i mod half.
        const std::int64_t low = 2 * j;
        const auto code = [&](std::int64_t i) {
          return static_cast<std::uint32_t>(at[i % half] >> (i / half * 4) & 15);
        };
        linear[j] = static_cast<std::uint8_t>(code(low) | code(low + 1) << 4);
      } else {
        at[j] = static_cast<std::uint8_t>(nibble(linear, j) | nibble(linear, j + half) << 4);
      }
    }
  }
};

}  // namespace

void swizzle_scales_cuda(TensorView<const std::uint8_t, 2> scales, ScaleLayout layout,
                         std::uint8_t* out, Stream stream) {
  const auto [rows, blocks] = scales.shape;
  if (layout == ScaleLayout::kLinear) {
    return over_rows(rows, blocks, CopyScales{scales, out}, scales.device, stream);
  }
  const std::int64_t tile = scale_tile_rows(layout);
  over_rows((rows + tile - 1) / tile * tile, (blocks + 3) / 4, Swizzle{scales, layout, out},
            scales.device, stream);
}

void unswizzle_scales_cuda(const std::uint8_t* from, ScaleLayout layout,
                           TensorView<std::uint8_t, 2> scales, Stream stream) {
  over_rows(scales.shape[0], scales.shape[1], Unswizzle{from, layout, scales}, scales.device,
            stream);
}

std::int64_t pack_codes_cuda(TensorView<const std::uint8_t, 2> codes,
                             TensorView<std::uint8_t, 2> packed, Stream stream) {
  const FirstBad bad(codes.device, stream);
  over_rows(packed.shape[0], packed.shape[1], PackCodes{codes, packed, bad.device_data()},
            codes.device, stream);
  return bad.wait();
}

void unpack_codes_cuda(TensorView<const std::uint8_t, 2> packed, TensorView<std::uint8_t, 2> codes,
                       Stream stream) {
  over_rows(packed.shape[0], packed.shape[1], UnpackCodes{packed, codes}, packed.device, stream);
}

template <typename T>
std::int64_t pack_values_cuda(TensorView<const T, 2> values, TensorView<std::uint8_t, 2> packed,
                              Stream stream) {
  const FirstBad bad(values.device, stream);
  over_rows(packed.shape[0], packed.shape[1], PackValues<T>{values, packed, bad.device_data()},
            values.device, stream);
  return bad.wait();
}

template std::int64_t pack_values_cuda(TensorView<const Bf16, 2>, TensorView<std::uint8_t, 2>,
                                       Stream);
template std::int64_t pack_values_cuda(TensorView<const float, 2>, TensorView<std::uint8_t, 2>,
                                       Stream);
template std::int64_t pack_values_cuda(TensorView<const double, 2>, TensorView<std::uint8_t, 2>,
                                       Stream);

void ggml_cuda(const PackedView<std::uint8_t>& linear, GgmlBlock block,
               TensorView<std::uint8_t, 2> ggml, bool back, Stream stream) {
  const Ggml body = {block,
                     linear.codes.data,
                     linear.codes.stride[0],
                     linear.scales.data,
                     linear.scales.stride[0],
                     ggml.data,
                     ggml.stride[0],
                     back};
  over_rows(linear.codes.shape[0], linear.codes.shape[1] * 2 / block.group, body,
            linear.codes.device, stream);
}

}  // namespace lockstep::kernels
