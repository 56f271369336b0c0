#include "kernels/exact/pack.h"

#include <algorithm>
#include <cstring>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/pack_rows.h"
#include "numerics/e2m1.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

void require_bytes(const char* what, std::int64_t have, std::int64_t need) {
  if (have != need) throw Error(cat({what, " holds ", have, " bytes, must hold ", need}));
}

template <typename A, typename B>
void require_packed(const TensorView<A, 2>& codes, const TensorView<B, 2>& packed) {
  if (codes.shape[0] != packed.shape[0] || codes.shape[1] != 2 * packed.shape[1]) {
    throw Error(
        cat({"pack: ", codes.shape[0], " by ", codes.shape[1], " codes and ", packed.shape[0],
             " by ", packed.shape[1], " bytes disagree: two codes a byte, an even number a row"}));
  }
}

/// Whether the work is a CUDA device's. Throws Error where views disagree or the build has none.
bool on_cuda(Device device, Device other) {
  if (device != other) throw Error("pack: the views are on different devices");
  if (device.kind == Device::Kind::kCpu) return false;
  if constexpr (build::has_cuda) return true;
  throw Error("pack: the data is on a CUDA device, this build has no CUDA backend");
}

template <typename T>
T* row_of(const TensorView<T, 2>& view, std::int64_t row) {
  return view.data + row * view.stride[0];
}

/// ggml_cuda() reads one side and writes the other, and takes both alike.
TensorView<std::uint8_t, 2> writable(const TensorView<const std::uint8_t, 2>& view) {
  return {const_cast<std::uint8_t*>(view.data), view.shape, view.stride, view.device};
}

template <typename T>
T on_host(const T* at, Device device, Stream stream) {
  T value{};
  copy_bytes(&value, {}, at, device, sizeof(T), stream);
  synchronize(device, stream);
  return value;
}

std::uint8_t nibble(const std::uint8_t* packed, std::int64_t i) {
  return packed[i / 2] >> (i % 2 * 4) & 15;
}

GgmlBlock ggml_block(const Quantizer& rule) {
  return rule.is_mx() ? GgmlBlock{32, 1} : GgmlBlock{16, 4};
}

void require_ggml(const Quantizer& rule, std::int64_t rows, std::int64_t cols,
                  std::int64_t have_rows, std::int64_t have_bytes) {
  const std::int64_t need = ggml_row_bytes(rule, cols);
  if (rows != have_rows || need != have_bytes) {
    throw Error(cat({"pack: ggml blocks are ", have_rows, " by ", have_bytes, " bytes, must be ",
                     rows, " by ", need}));
  }
}

}  // namespace

std::int64_t scale_layout_bytes(ScaleLayout layout, std::int64_t rows, std::int64_t blocks) {
  if (layout == ScaleLayout::kLinear) return rows * blocks;
  return round_up(rows, scale_tile_rows(layout)) * round_up(blocks, 4);
}

std::int64_t scale_offset(ScaleLayout layout, std::int64_t row, std::int64_t block,
                          std::int64_t blocks) {
  return scale_place(layout, row, block, blocks);
}

void swizzle_scales(TensorView<const std::uint8_t, 2> scales, ScaleLayout layout,
                    std::span<std::uint8_t> out, Stream stream) {
  const auto [rows, blocks] = scales.shape;
  require_bytes("swizzle: out", static_cast<std::int64_t>(out.size()),
                scale_layout_bytes(layout, rows, blocks));
  if (on_cuda(scales.device, scales.device)) {
    if constexpr (build::has_cuda) swizzle_scales_cuda(scales, layout, out.data(), stream);
    return;
  }
  std::fill(out.begin(), out.end(), std::uint8_t{0});
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      out[static_cast<std::size_t>(scale_place(layout, row, block, blocks))] =
          row_of(scales, row)[block];
    }
  }
}

void unswizzle_scales(std::span<const std::uint8_t> from, ScaleLayout layout,
                      TensorView<std::uint8_t, 2> scales, Stream stream) {
  const auto [rows, blocks] = scales.shape;
  require_bytes("unswizzle: from", static_cast<std::int64_t>(from.size()),
                scale_layout_bytes(layout, rows, blocks));
  if (on_cuda(scales.device, scales.device)) {
    if constexpr (build::has_cuda) unswizzle_scales_cuda(from.data(), layout, scales, stream);
    return;
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      row_of(scales, row)[block] =
          from[static_cast<std::size_t>(scale_place(layout, row, block, blocks))];
    }
  }
}

void pack_codes(TensorView<const std::uint8_t, 2> codes, TensorView<std::uint8_t, 2> packed,
                Stream stream) {
  require_packed(codes, packed);
  const auto refuse = [](std::int64_t row, std::int64_t col, int code) {
    throw Error(cat(
        {"pack: the code of row ", row, ", column ", col, " is ", code, ", must be at most 15"}));
  };
  if (on_cuda(codes.device, packed.device)) {
    if constexpr (build::has_cuda) {
      const std::int64_t bad = pack_codes_cuda(codes, packed, stream);
      if (bad < 0) return;
      const std::int64_t row = bad / codes.shape[1], col = bad % codes.shape[1];
      refuse(row, col, on_host(row_of(codes, row) + col, codes.device, stream));
    }
  }
  for (std::int64_t row = 0; row < codes.shape[0]; ++row) {
    const std::uint8_t* from = row_of(codes, row);
    for (std::int64_t col = 0; col < codes.shape[1]; ++col) {
      if (from[col] > 15) refuse(row, col, from[col]);
    }
    std::uint8_t* to = row_of(packed, row);
    for (std::int64_t i = 0; i < packed.shape[1]; ++i) {
      to[i] = static_cast<std::uint8_t>(from[2 * i] | from[2 * i + 1] << 4);
    }
  }
}

void unpack_codes(TensorView<const std::uint8_t, 2> packed, TensorView<std::uint8_t, 2> codes,
                  Stream stream) {
  require_packed(codes, packed);
  if (on_cuda(packed.device, codes.device)) {
    if constexpr (build::has_cuda) unpack_codes_cuda(packed, codes, stream);
    return;
  }
  for (std::int64_t row = 0; row < codes.shape[0]; ++row) {
    for (std::int64_t col = 0; col < codes.shape[1]; ++col) {
      row_of(codes, row)[col] = nibble(row_of(packed, row), col);
    }
  }
}

namespace {

template <typename T>
float float_value(T raw) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return to_float(raw);
  } else {
    return static_cast<float>(raw);
  }
}

[[noreturn]] void refuse_value(std::int64_t row, std::int64_t col, float value) {
  throw Error(cat({"pack: the value of row ", row, ", column ", col, " is ", value,
                   ", must be one of 0, .5, 1, 1.5, 2, 3, 4, 6 or their negatives"}));
}

}  // namespace

template <typename T>
void pack_values(TensorView<const T, 2> values, TensorView<std::uint8_t, 2> packed, Stream stream) {
  require_packed(values, packed);
  if (on_cuda(values.device, packed.device)) {
    if constexpr (build::has_cuda) {
      const std::int64_t bad = pack_values_cuda(values, packed, stream);
      if (bad < 0) return;
      const std::int64_t row = bad / values.shape[1], col = bad % values.shape[1];
      refuse_value(row, col,
                   float_value(on_host(row_of(values, row) + col, values.device, stream)));
    }
  }
  for (std::int64_t row = 0; row < values.shape[0]; ++row) {
    std::uint8_t* to = row_of(packed, row);
    std::fill(to, to + packed.shape[1], std::uint8_t{0});
    for (std::int64_t col = 0; col < values.shape[1]; ++col) {
      const float value = float_value(row_of(values, row)[col]);
      const E2m1 code = to_e2m1(value);
      if (!(to_float(code) == value)) refuse_value(row, col, value);
      to[col / 2] = static_cast<std::uint8_t>(to[col / 2] | bits_of(code) << (col % 2 * 4));
    }
  }
}

template void pack_values(TensorView<const Bf16, 2>, TensorView<std::uint8_t, 2>, Stream);
template void pack_values(TensorView<const float, 2>, TensorView<std::uint8_t, 2>, Stream);
template void pack_values(TensorView<const double, 2>, TensorView<std::uint8_t, 2>, Stream);

std::int64_t ggml_row_bytes(const Quantizer& rule, std::int64_t cols) {
  const GgmlBlock block = ggml_block(rule);
  if (cols % block.elements() != 0) {
    throw Error(cat({"pack: a ggml block holds ", block.elements(),
                     " elements, which do not divide ", cols, " columns"}));
  }
  return cols / block.elements() * block.bytes();
}

void pack_ggml(const PackedView<const std::uint8_t>& from, const Quantizer& rule,
               TensorView<std::uint8_t, 2> out, Stream stream) {
  const std::int64_t cols = from.codes.shape[1] * 2;
  require_ggml(rule, from.codes.shape[0], cols, out.shape[0], out.shape[1]);
  const GgmlBlock block = ggml_block(rule);
  if (on_cuda(from.codes.device, out.device)) {
    if constexpr (build::has_cuda) {
      ggml_cuda({writable(from.codes), writable(from.scales), {}}, block, out, false, stream);
    }
    return;
  }
  for (std::int64_t row = 0; row < out.shape[0]; ++row) {
    const std::uint8_t* codes = row_of(from.codes, row);
    const std::uint8_t* scales = row_of(from.scales, row);
    std::uint8_t* to = row_of(out, row);
    for (std::int64_t group = 0; group < cols / block.group; ++group) {
      const std::int64_t inside = group % block.groups;
      std::uint8_t* at = to + group / block.groups * block.bytes();
      at[inside] = scales[group];
      at += block.groups + inside * block.group / 2;
      for (std::int64_t j = 0; j < block.group / 2; ++j) {
        const std::int64_t low = group * block.group + j;
        at[j] = static_cast<std::uint8_t>(nibble(codes, low) | nibble(codes, low + block.group / 2)
                                                                   << 4);
      }
    }
  }
}

void unpack_ggml(TensorView<const std::uint8_t, 2> from, const Quantizer& rule,
                 const PackedView<std::uint8_t>& out, Stream stream) {
  const std::int64_t cols = out.codes.shape[1] * 2;
  require_ggml(rule, out.codes.shape[0], cols, from.shape[0], from.shape[1]);
  const GgmlBlock block = ggml_block(rule);
  if (on_cuda(from.device, out.codes.device)) {
    if constexpr (build::has_cuda) ggml_cuda(out, block, writable(from), true, stream);
    return;
  }
  for (std::int64_t row = 0; row < from.shape[0]; ++row) {
    std::uint8_t* codes = row_of(out.codes, row);
    std::fill(codes, codes + cols / 2, std::uint8_t{0});
    for (std::int64_t group = 0; group < cols / block.group; ++group) {
      const std::int64_t inside = group % block.groups;
      const std::uint8_t* at = row_of(from, row) + group / block.groups * block.bytes();
      row_of(out.scales, row)[group] = at[inside];
      at += block.groups + inside * block.group / 2;
      for (std::int64_t j = 0; j < block.group; ++j) {
        const std::int64_t half = block.group / 2;
        const int code = at[j % half] >> (j / half * 4) & 15;
        const std::int64_t i = group * block.group + j;
        codes[i / 2] = static_cast<std::uint8_t>(codes[i / 2] | code << (i % 2 * 4));
      }
    }
  }
}

}  // namespace lockstep::kernels
