#include "kernels/dense/grouped_product.h"

#include <cmath>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/dense/grouped_product_cuda.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw Error(cat({"grouped_product: ", what}));
}

void check(const GroupedProductArgs& args) {
  const Device device = args.x.device;
  const std::int64_t items = args.x.shape[0];
  const std::int64_t k = args.x.shape[1];
  const std::int64_t out = args.w.shape[args.turned ? 2 : 1];
  require(args.w.shape[args.turned ? 1 : 2] == k, "w must have as many columns as x");
  require(
      args.w.stride[2] == 1 && args.w.stride[1] == args.w.shape[2] && args.w.stride[0] == out * k,
      "w must be contiguous");
  require(args.x.stride[1] == 1 || k == 1, "x must be contiguous along a row");
  require(args.offsets.shape[0] == args.w.shape[0] + 1, "offsets must be the groups and one");
  require(args.to.empty() || args.to.shape[0] == items, "to must have an entry for every item");
  require(args.y.shape[1] == out && args.y.stride[1] == 1 && args.y.shape[0] >= items,
          "y must be [items, out], contiguous along a row");
  require(args.w.device == device && args.y.device == device && args.offsets.device == device,
          "x, w, offsets and y must be on one device");
}

/// One chain of fused multiply-adds an output.
void grouped_product_cpu(const GroupedProductArgs& args) {
  const std::int64_t k = args.x.shape[1];
  const std::int64_t out = args.y.shape[1];
  const std::int64_t next = args.turned ? out : 1;
  for (std::int64_t group = 0; group < args.w.shape[0]; ++group) {
    const std::int64_t begin = args.offsets.data[group];
    const std::int64_t count = args.offsets.data[group + 1] - begin;
    parallel_for(count * out, 16, [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t i = first; i < end; ++i) {
        const std::int64_t item = begin + i / out;
        const Bf16* x = args.x.data + item * args.x.stride[0];
        const Bf16* w = args.w.data + group * out * k + i % out * (args.turned ? 1 : k);
        float sum = 0.0f;
        for (std::int64_t j = 0; j < k; ++j)
          sum = std::fma(to_float(x[j]), to_float(w[j * next]), sum);
        const std::int64_t row = args.to.empty() ? item : args.to.data[item];
        args.y.data[row * args.y.stride[0] + i % out] = sum;
      }
    });
  }
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

bool has_aligned_rows(const TensorView<const Bf16, 2>& x) {
  return x.shape[1] % 8 == 0 && x.stride[0] % 8 == 0 && is_aligned(x.data);
}

void check(const GroupedSumsArgs& args) {
  const auto& [groups, rows, cols] = args.sum.shape;
  require(args.a.shape[0] == args.b.shape[0], "a and b must have the same items");
  require(args.a.shape[1] == rows && args.b.shape[1] == cols, "sum must be [groups, rows, cols]");
  require((args.a.stride[1] == 1 || rows == 1) && (args.b.stride[1] == 1 || cols == 1),
          "a and b must be contiguous along a row");
  require(
      args.sum.stride[2] == 1 && args.sum.stride[1] == cols && args.sum.stride[0] == rows * cols,
      "sum must be contiguous");
  require(args.offsets.shape[0] == groups + 1, "offsets must be the groups and one");
  require(args.b.device == args.a.device && args.sum.device == args.a.device &&
              args.offsets.device == args.a.device,
          "a, b, offsets and sum must be on one device");
}

void grouped_sums_cpu(const GroupedSumsArgs& args) {
  const auto [groups, rows, cols] = args.sum.shape;
  parallel_for(groups * rows, 1,
               [&, rows = rows, cols = cols](std::int64_t first, std::int64_t end) {
                 for (std::int64_t i = first; i < end; ++i) {
                   const std::int64_t group = i / rows, row = i % rows;
                   for (std::int64_t col = 0; col < cols; ++col) {
                     float sum = 0.0f;
                     for (std::int32_t item = args.offsets.data[group];
                          item < args.offsets.data[group + 1]; ++item) {
                       sum = std::fma(to_float(args.a.data[item * args.a.stride[0] + row]),
                                      to_float(args.b.data[item * args.b.stride[0] + col]), sum);
                     }
                     args.sum.data[i * cols + col] += sum;
                   }
                 }
               });
}

}  // namespace

void grouped_product(const GroupedProductArgs& args, Stream stream) {
  check(args);
  if (args.x.shape[0] == 0 || args.y.shape[1] == 0) return;
  if (args.x.device.kind == Device::Kind::kCpu) return grouped_product_cpu(args);
  require(has_aligned_rows(args.x) && args.w.shape[2] % 8 == 0 && is_aligned(args.w.data),
          "rows of x and w must start at multiples of 16 bytes on a CUDA device");
  if constexpr (build::has_cuda) return grouped_product_cuda(args, stream);
  require(false, "this build has no CUDA backend");
}

void grouped_sums(const GroupedSumsArgs& args, Stream stream) {
  check(args);
  if (args.a.shape[0] == 0 || args.sum.shape[1] == 0 || args.sum.shape[2] == 0) return;
  if (args.a.device.kind == Device::Kind::kCpu) return grouped_sums_cpu(args);
  require(has_aligned_rows(args.a) && has_aligned_rows(args.b),
          "rows of a and b must start at multiples of 16 bytes on a CUDA device");
  if constexpr (build::has_cuda) return grouped_sums_cuda(args, stream);
  require(false, "this build has no CUDA backend");
}

}  // namespace lockstep::kernels
