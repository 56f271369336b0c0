#include "kernels/dense/w4a16.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/dense/w4a16_cuda.h"
#include "kernels/exact/items.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace lockstep::kernels {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw Error(cat({"w4a16: ", what}));
}

Items items_of(const W4a16Args& args) { return {args.offsets, args.from, args.to}; }

void check(const W4a16Args& args, std::int64_t items) {
  require(args.w.data != nullptr && args.w.experts > 0 && args.w.out > 0, "the weights are empty");
  require(!args.w.scaled, "global scales of the weights may be no powers of two; take w4a4()");
  require(args.x.shape[1] == args.w.cols, "x must have as many columns as the weights");
  require(args.x.stride[1] == 1, "x must be contiguous along a row");
  require(args.out.shape[1] == args.w.out && (args.out.stride[1] == 1 || args.w.out == 1),
          "out must have a column for every output, contiguous along a row");
  require(args.x.device == args.w.device && args.out.device == args.w.device,
          "x, w and out must be on one device");
  check_item_shapes("w4a16", items_of(args), items, args.w.experts, args.x.shape[0],
                    args.out.shape[0]);
}

/// Output `row` of an expert as FP32 numbers.
void read_row(const W4a4Weights& w, std::int32_t expert, std::int32_t row, std::vector<float>& to) {
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(w.cols) / 2);
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(w.cols) / 16);
  w4a4_read(w, expert, row, codes, scales);
  std::int32_t n;
  std::memcpy(&n, w.expert(expert), sizeof n);
  to.resize(static_cast<std::size_t>(w.cols));
  for (std::size_t i = 0; i < to.size(); ++i) {
    const int pair = codes[i / 2];
    const auto code = static_cast<E2m1>(static_cast<std::uint8_t>(i % 2 ? pair >> 4 : pair & 15));
    to[i] = std::ldexp(to_float(code) * to_float(static_cast<E4m3>(scales[i / 16])), n);
  }
}

void w4a16_cpu(const W4a16Args& args, std::int64_t items) {
  const Items all = items_of(args);
  check_items("w4a16", all, items, args.w.experts, args.x.shape[0], args.out.shape[0]);
  for (std::int32_t e = 0; e < args.w.experts; ++e) {
    const std::int64_t begin = args.offsets.empty() ? 0 : args.offsets.data[e];
    const std::int64_t end = args.offsets.empty() ? (e == 0 ? items : 0) : args.offsets.data[e + 1];
    if (begin >= end) continue;
    parallel_for(args.w.out, 1, [&](std::int64_t first, std::int64_t last) {
      std::vector<float> w;
      for (std::int64_t row = first; row < last; ++row) {
        read_row(args.w, e, static_cast<std::int32_t>(row), w);
        for (std::int64_t i = begin; i < end; ++i) {
          const Bf16* x = args.x.data + all.from_row(i) * args.x.stride[0];
          float sum = 0.0f;
          for (std::size_t k = 0; k < w.size(); ++k) sum = std::fma(to_float(x[k]), w[k], sum);
          args.out.data[all.to_row(i) * args.out.stride[0] + row] = sum;
        }
      }
    });
  }
}

}  // namespace

void w4a16(const W4a16Args& args, Stream stream) {
  const std::int64_t items = count_items(items_of(args), args.x.shape[0]);
  check(args, items);
  if (items == 0) return;
  if (args.w.device.kind == Device::Kind::kCpu) return w4a16_cpu(args, items);
  if constexpr (build::has_cuda) return w4a16_cuda(args, items, stream);
  require(false, "this build has no CUDA backend");
}

bool w4a16_takes_any(Device device) {
  if (device.kind == Device::Kind::kCpu) return false;
  if constexpr (build::has_cuda) return w4a16_takes_any_cuda(device);
  return false;
}

}  // namespace lockstep::kernels
