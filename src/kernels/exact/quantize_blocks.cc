/// FP8 in blocks of rows and columns, 128 by 128: the weights of `fp8`.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/exact/quantize_rows.h"

namespace lockstep::kernels {
namespace {

template <typename T>
class BlockRows {
 public:
  BlockRows(const QuantizeArgs& args, const TensorView<const T, 2>& x)
      : args_(args), x_(x), cols_(x.shape[1]) {}

  /// The scales of one band of blocks, then the codes of its rows.
  void band(std::int64_t index, QuantizeCounts& counts) const {
    const Quantizer& rule = args_.rule;
    const std::int64_t first = index * rule.block_rows;
    const std::int64_t end = std::min(x_.shape[0], first + rule.block_rows);
    const std::int64_t blocks = rule.scale_cols(cols_);
    std::vector<float> amax(static_cast<std::size_t>(blocks), 0.0f);
    std::vector<std::uint8_t> finite;
    for (std::int64_t row = first; row < end; ++row) {
      finite.push_back(is_finite(row_amax(x(row), cols_)) ? 1 : 0);
      counts[kNonfiniteRows] += finite.back() == 0;
      for (std::int64_t j = 0; j < blocks && finite.back() != 0; ++j) {
        float& most = amax[static_cast<std::size_t>(j)];
        most = std::max(most, row_amax(x(row) + j * rule.block, width(j)));
      }
    }
    std::uint8_t* scales = args_.out.scales.data + index * args_.out.scales.stride[0];
    for (std::int64_t j = 0; j < blocks; ++j) {
      const float most = amax[static_cast<std::size_t>(j)];
      scales[j] = scale_byte(rule, most, {});
      ++counts[kBlocks];
      counts[kZeroBlocks] += most == 0.0f;
    }
    for (std::int64_t row = first; row < end; ++row) {
      code_row(row, finite[static_cast<std::size_t>(row - first)] != 0, scales);
    }
  }

 private:
  const T* x(std::int64_t row) const { return x_.data + row * x_.stride[0]; }
  std::int64_t width(std::int64_t block) const {
    return std::min<std::int64_t>(args_.rule.block, cols_ - block * args_.rule.block);
  }

  void code_row(std::int64_t row, bool finite, const std::uint8_t* scales) const {
    std::uint8_t* codes = args_.out.codes.data + row * args_.out.codes.stride[0];
    for (std::int64_t j = 0; j < args_.rule.scale_cols(cols_) && finite; ++j) {
      const std::int64_t at = j * args_.rule.block;
      encode_e4m3(x(row) + at, width(j), mx_value(args_.rule, scales[j]), codes + at);
    }
    if (!finite) std::memset(codes, 0, static_cast<std::size_t>(cols_));
    if (!args_.nonfinite.empty()) args_.nonfinite.data[row * args_.nonfinite.stride[0]] = !finite;
  }

  const QuantizeArgs& args_;
  const TensorView<const T, 2>& x_;
  std::int64_t cols_;
};

template <typename T>
void run(const QuantizeArgs& args, const TensorView<const T, 2>& x) {
  const BlockRows<T> work(args, x);
  const std::int64_t bands = args.rule.scale_rows(x.shape[0]);
  std::vector<QuantizeCounts> counts(static_cast<std::size_t>(bands), QuantizeCounts{});
  parallel_for(bands, 1, [&](std::int64_t first, std::int64_t end) {
    for (; first < end; ++first) work.band(first, counts[static_cast<std::size_t>(first)]);
  });
  const auto& global = args.out.global;
  for (std::int64_t i = 0; !global.empty() && i < global.shape[0]; ++i) {
    global.data[i * global.stride[0]] = 1.0f;
  }
  if (args.counts.empty()) return;
  for (const QuantizeCounts& band : counts) {
    for (std::size_t i = 0; i < band.size(); ++i) {
      args.counts.data[static_cast<std::int64_t>(i) * args.counts.stride[0]] += band[i];
    }
  }
}

}  // namespace

void quantize_blocks(const QuantizeArgs& args) {
  if (args.x_f32.empty()) return run(args, args.x);
  run(args, args.x_f32);
}

}  // namespace lockstep::kernels
