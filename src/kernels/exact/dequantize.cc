#include "kernels/exact/dequantize.h"

#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
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
  float scale(std::uint8_t byte, float global) const {
    if (args_.rule.is_mx()) return to_float(static_cast<E8m0>(byte));
    return to_float(static_cast<E4m3>(byte)) * global;
  }

  float global(std::int64_t row) const {
    const auto& view = args_.codes.global;
    if (view.empty()) return power_of_two(args_.exponent);
    return view.data[view.shape[0] == 1 ? 0 : row * view.stride[0]];
  }

  void one(std::int64_t row) const {
    const std::int64_t blocks = args_.codes.scales.shape[1];
    const float whole = global(row);
    const std::uint8_t* scales = args_.codes.scales.data + row * args_.codes.scales.stride[0];
    const std::uint8_t* codes = args_.codes.codes.data + row * args_.codes.codes.stride[0];
    const std::uint8_t most = args_.rule.is_mx() ? 0xFE : kE4m3Max;
    for (std::int64_t j = 0; j < blocks; ++j) {
      if (scales[j] > most) {
        throw Error(
            cat({"dequantize: the scale byte of row ", row, ", block ", j, " is ", int{scales[j]},
                 ", must be at most ", int{most}, "; the data is damaged"}));
      }
      const float value = scale(scales[j], whole);
      const std::int64_t end = (j + 1) * args_.rule.block;
      for (std::int64_t i = j * args_.rule.block; i < end; ++i) {
        const auto code = static_cast<E2m1>(codes[i / 2] >> (i % 2 * 4) & 15);
        put(row, i, to_float(code) * value);
      }
    }
  }

  void put(std::int64_t row, std::int64_t col, float value) const {
    if (!args_.bf16.empty()) args_.bf16.data[row * args_.bf16.stride[0] + col] = to_bf16(value);
    if (!args_.f32.empty()) args_.f32.data[row * args_.f32.stride[0] + col] = value;
  }

  const DequantizeArgs& args_;
};

}  // namespace

void dequantize(const DequantizeArgs& args, Stream) {
  const std::int64_t rows = args.codes.codes.shape[0];
  const std::int64_t cols = args.codes.codes.shape[1] * 2;
  const auto fits = [&](const auto& view) {
    return view.empty() || (view.shape[0] == rows && view.shape[1] == cols);
  };
  if (!fits(args.bf16) || !fits(args.f32)) {
    throw Error(cat({"dequantize: the output must be [", rows, ", ", cols, "] as the codes are"}));
  }
  if (args.codes.scales.shape[0] != rows || args.codes.scales.shape[1] * args.rule.block != cols) {
    throw Error(cat({"dequantize: scales are [", args.codes.scales.shape[0], ", ",
                     args.codes.scales.shape[1], "], must be [", rows, ", ",
                     cols / std::max(args.rule.block, 1), "]"}));
  }
  const Rows work(args);
  parallel_for(rows, kGrainElements / std::max<std::int64_t>(cols, 1),
               [&](std::int64_t first, std::int64_t end) { work.run(first, end); });
}

}  // namespace lockstep::kernels
