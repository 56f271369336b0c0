#include "kernels/dense/rope.h"

#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "kernels/dense/check.h"
#include "kernels/dense/rope_rows.h"
#include "kernels/dense/vectors.h"

namespace lockstep::kernels {

RopeTable::RopeTable(double theta, std::int32_t head_dim, Device device)
    : theta_(theta), half_(head_dim / 2), device_(device) {}

void RopeTable::grow(std::int32_t count) {
  if (count <= positions_) return;
  cos_.resize(static_cast<std::size_t>(count * half_));
  sin_.resize(static_cast<std::size_t>(count * half_));
  for (std::int64_t i = 0; i < half_; ++i) {
    const double frequency = std::pow(theta_, -static_cast<double>(i) / static_cast<double>(half_));
    for (std::int32_t position = positions_; position < count; ++position) {
      const double angle = position * frequency;
      const auto at = static_cast<std::size_t>(position * half_ + i);
      cos_[at] = static_cast<float>(std::cos(angle));
      sin_[at] = static_cast<float>(std::sin(angle));
    }
  }
  positions_ = count;
  if (device_.kind == Device::Kind::kCpu) {
    cos_at_ = cos_.data();
    sin_at_ = sin_.data();
    return;
  }
  cos_copy_ = to_device(cos_, device_);
  sin_copy_ = to_device(sin_, device_);
  cos_at_ = cos_copy_.as<float>();
  sin_at_ = sin_copy_.as<float>();
}

void rope(const RopeArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  const Device device = args.x.device;
  require_shape("rope", "x", args.x, rows, cols, device);
  if (args.head_dim <= 0 || args.head_dim % 2 != 0 || cols == 0 || cols % args.head_dim != 0) {
    throw Error(cat({"rope: head_dim is ", args.head_dim, " of ", cols,
                     " columns; expected an even divisor of some"}));
  }
  if (args.table == nullptr) throw Error("rope: table is null; expected one on x's device");
  if (static_cast<std::int64_t>(args.positions.size()) != rows) {
    throw Error(cat({"rope: ", args.positions.size(), " positions for ", rows, " rows"}));
  }
  if (args.table->device() != device) {
    throw Error(cat({"rope: x lies on ", name_of_kind(device), ", its table on ",
                     name_of_kind(args.table->device())}));
  }
  if (!args.norm.empty() && static_cast<std::int32_t>(args.norm.size()) != args.head_dim) {
    throw Error(cat({"rope: norm has ", args.norm.size(), " elements; expected ", args.head_dim}));
  }
  if (on_cuda("rope", device)) {
    if constexpr (build::has_cuda) return rope_cuda(args, stream);
  }
  const auto [low, high] = std::minmax_element(args.positions.begin(), args.positions.end());
  if (rows > 0 && (*low < 0 || *high >= args.table->positions())) {
    throw Error(cat({"rope: positions ", *low, "..", *high, "; the table has 0..",
                     args.table->positions() - 1}));
  }
  parallel_for(rows, 1 + (1 << 14) / cols, [&](std::int64_t first, std::int64_t end) {
    switch (vectors()) {
      case Vectors::kAvx512Bf16:
      case Vectors::kAvx512: return rope_avx512(args, first, end);
      case Vectors::kAvx2: return rope_avx2(args, first, end);
      case Vectors::kPortable: return rope_portable(args, first, end);
    }
  });
}

}  // namespace lockstep::kernels
