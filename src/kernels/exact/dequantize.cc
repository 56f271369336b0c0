#include "kernels/exact/dequantize.h"

#include <algorithm>
#include <array>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/dequantize_rows.h"
#include "numerics/macro_block.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kGrainElements = 1 << 14;

class Rows {
 public:
  explicit Rows(const DequantizeArgs& args) : args_(args) {}

  void run(std::int64_t first, std::int64_t end) const {
    for (std::int64_t row = first; row < end; ++row) one(row);
  }

 private:
  float global(std::int64_t row) const {
    const auto& view = args_.codes.global;
    if (view.empty()) return power_of_two(args_.exponent);
    return view.data[view.shape[0] == 1 ? 0 : row * view.stride[0]];
  }

  void wide(std::int64_t row) const {
    const Quantizer& rule = args_.rule;
    const float whole = global(row);
    const std::int64_t cols = args_.codes.codes.shape[1];
    const std::uint8_t* codes = args_.codes.codes.data + row * args_.codes.codes.stride[0];
    const std::int64_t block = rule.is_mx() ? rule.block : cols;
    for (std::int64_t first = 0; first < cols; first += block) {
      float factor = whole;
      if (rule.is_mx()) {
        const std::int64_t j = first / block;
        const auto& scales = args_.codes.scales;
        const std::uint8_t byte = scales.data[row / rule.block_rows * scales.stride[0] + j];
        if (byte > most_) throw_damaged(row, j, byte, most_);
        factor = decode_factor(rule, byte, whole);
      }
      for (std::int64_t i = first; i < std::min(cols, first + block); ++i) {
        if ((codes[i] & 0x7Fu) > kE4m3Max) {
          throw Error(cat({"dequantize: the code of row ", row, ", column ", i, " is ",
                           int{codes[i]}, ", which is no number; the data is damaged"}));
        }
        const float value = to_float(static_cast<E4m3>(codes[i])) * factor;
        if (!args_.f32.empty()) args_.f32.data[row * args_.f32.stride[0] + i] = value;
        if (!args_.bf16.empty()) args_.bf16.data[row * args_.bf16.stride[0] + i] = to_bf16(value);
      }
    }
  }

  [[noreturn]] static void throw_damaged(std::int64_t row, std::int64_t block, int byte, int most) {
    throw Error(cat({"dequantize: the scale byte of row ", row, ", block ", block, " is ", byte,
                     ", must be at most ", most, "; the data is damaged"}));
  }

  void one(std::int64_t row) const {
    if (args_.rule.is_wide()) return wide(row);
    const std::int64_t blocks = args_.codes.scales.shape[1];
    const float whole = global(row);
    const std::uint8_t* scales = args_.codes.scales.data + row * args_.codes.scales.stride[0];
    const std::uint8_t* codes = args_.codes.codes.data + row * args_.codes.codes.stride[0];
    for (std::int64_t j = 0; j < blocks; ++j) {
      if (scales[j] > most_) throw_damaged(row, j, scales[j], most_);
      // The sixteen values there are in the block, so that an element is a lookup.
      const float factor = decode_factor(args_.rule, scales[j], whole);
      std::array<float, 16> values{};
      for (std::uint8_t code = 0; code < 16; ++code) {
        values[code] = to_float(static_cast<E2m1>(code)) * factor;
      }
      const std::int64_t first = j * args_.rule.block;
      if (args_.rule.macro_block > 0) unstretch_all(row, first, values);
      if (!args_.bf16.empty()) {
        std::array<Bf16, 16> rounded{};
        for (std::size_t code = 0; code < 16; ++code) rounded[code] = to_bf16(values[code]);
        unpack(codes + first / 2, rounded, args_.bf16.data + row * args_.bf16.stride[0] + first);
      }
      if (!args_.f32.empty()) {
        unpack(codes + first / 2, values, args_.f32.data + row * args_.f32.stride[0] + first);
      }
    }
  }

  void unstretch_all(std::int64_t row, std::int64_t col, std::array<float, 16>& values) const {
    const auto& mantissas = args_.codes.mantissas;
    const std::uint8_t m = mantissas.data[row * mantissas.stride[0] + col / args_.rule.macro_block];
    for (float& value : values) value = unstretch(value, m);
  }

  template <typename T>
  void unpack(const std::uint8_t* codes, const std::array<T, 16>& values, T* out) const {
    for (std::int32_t i = 0; i < args_.rule.block / 2; ++i) {
      out[2 * i] = values[codes[i] & 15];
      out[2 * i + 1] = values[codes[i] >> 4];
    }
  }

  const DequantizeArgs& args_;
  std::uint8_t most_ = most_scale_byte(args_.rule);
};

void check(const DequantizeArgs& args, std::int64_t rows, std::int64_t cols) {
  const auto fits = [&](const auto& view) {
    return view.empty() || (view.shape[0] == rows && view.shape[1] == cols);
  };
  if (!fits(args.bf16) || !fits(args.f32)) {
    throw Error(cat({"dequantize: the output must be [", rows, ", ", cols, "] as the codes are"}));
  }
  const Quantizer& rule = args.rule;
  const bool scaled = rule.scale != ScaleFormat::kNone;
  if (!rule.quantizes() || (!scaled && !rule.is_wide())) {
    throw Error(cat({"dequantize: rule.element is ", name_of(rule.element), ", rule.scale is ",
                     name_of(rule.scale), "; e2m1 codes need e4m3 or e8m0 scales"}));
  }
  if (scaled && (args.codes.scales.shape[0] != rule.scale_rows(rows) ||
                 args.codes.scales.shape[1] != rule.scale_cols(cols) ||
                 (!rule.is_wide() && cols % rule.block != 0))) {
    throw Error(cat({"dequantize: scales are [", args.codes.scales.shape[0], ", ",
                     args.codes.scales.shape[1], "], must be [", rule.scale_rows(rows), ", ",
                     rule.scale_cols(cols), "]"}));
  }
  if (args.codes.mantissas.shape[1] != rule.macro_cols(cols) ||
      (rule.macro_block > 0 && args.codes.mantissas.shape[0] != rows)) {
    throw Error(cat({"dequantize: mantissas are [", args.codes.mantissas.shape[0], ", ",
                     args.codes.mantissas.shape[1], "], must be [", rows, ", ",
                     rule.macro_cols(cols), "]"}));
  }
  const Device device = args.codes.codes.device;
  const auto elsewhere = [device](const auto& view) {
    return !view.empty() && view.device != device;
  };
  if ((scaled && elsewhere(args.codes.scales)) || elsewhere(args.codes.global) ||
      elsewhere(args.codes.mantissas) || elsewhere(args.bf16) || elsewhere(args.f32)) {
    throw Error("dequantize: codes, scales, global scale and outputs must be on one device");
  }
  const auto contiguous = [](const auto& view) {
    return view.empty() || view.stride[1] == 1 || view.shape[1] <= 1;
  };
  if (!contiguous(args.codes.codes) || !contiguous(args.codes.scales) || !contiguous(args.bf16) ||
      !contiguous(args.f32)) {
    throw Error("dequantize: codes, scales and values must be contiguous along a row");
  }
  const auto& global = args.codes.global;
  if (!global.empty() && global.shape[0] != rows && global.shape[0] != 1) {
    throw Error(
        cat({"dequantize: global is [", global.shape[0], "], must be [", rows, "], [1] or empty"}));
  }
}

}  // namespace

void dequantize(const DequantizeArgs& args, Stream stream) {
  const std::int64_t rows = args.codes.codes.shape[0];
  const std::int64_t cols = args.rule.columns(args.codes.codes.shape[1]);
  check(args, rows, cols);
  if (args.codes.codes.device.kind == Device::Kind::kCuda) {
    if constexpr (build::has_cuda) return dequantize_cuda(args, stream);
    throw Error("dequantize: the codes are on a CUDA device, this build has no CUDA backend");
  }
  const Rows work(args);
  parallel_for(rows, kGrainElements / std::max<std::int64_t>(cols, 1),
               [&](std::int64_t first, std::int64_t end) { work.run(first, end); });
}

}  // namespace lockstep::kernels
