#include "kernels/dense/elementwise.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/parallel.h"
#include "kernels/dense/check.h"
#include "kernels/dense/elementwise_rows.h"
#include "kernels/dense/vectors.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

ElementwiseOps ops() {
  switch (vectors()) {
    case Vectors::kAvx512Bf16:
    case Vectors::kAvx512: return elementwise_avx512();
    case Vectors::kAvx2: return elementwise_avx2();
    case Vectors::kPortable: break;
  }
  return elementwise_portable();
}

std::int64_t grain(std::int64_t cols, std::int64_t elements) {
  return 1 + elements / std::max<std::int64_t>(cols, 1);
}

/// The lowest row that fails `good`, -1 if none does.
template <typename Good>
std::int64_t first_bad(std::int64_t rows, std::int64_t cols, const Good& good) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> lowest = kNone;
  parallel_for(rows, grain(cols, 1 << 16), [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t row = first; row < end; ++row) {
      if (good(row)) continue;
      std::int64_t seen = lowest.load();
      while (row < seen && !lowest.compare_exchange_weak(seen, row)) {
      }
    }
  });
  return lowest == kNone ? -1 : lowest.load();
}

void lower(std::int64_t row, std::int32_t* bad) {
  if (row >= 0 && row < *bad) *bad = static_cast<std::int32_t>(row);
}

}  // namespace

std::int64_t residual_add(TensorView<const Bf16, 2> x, TensorView<Bf16, 2> h) {
  const std::int64_t rows = x.shape[0];
  const std::int64_t cols = x.shape[1];
  require_shape("residual_add", "x", x, rows, cols);
  require_shape("residual_add", "h", h, rows, cols);
  const auto add = ops().add;
  return first_bad(rows, cols, [&](std::int64_t row) {
    return add(x.data + row * x.stride[0], cols, h.data + row * h.stride[0]);
  });
}

std::int64_t first_nonfinite(TensorView<const Bf16, 2> x) {
  require_shape("first_nonfinite", "x", x, x.shape[0], x.shape[1]);
  const auto finite = ops().finite;
  return first_bad(x.shape[0], x.shape[1], [&](std::int64_t row) {
    return finite(x.data + row * x.stride[0], x.shape[1]);
  });
}

void residual_add(TensorView<const Bf16, 2> x, TensorView<Bf16, 2> h, std::int32_t* bad,
                  Stream stream) {
  const Device device = x.device;
  require_shape("residual_add", "x", x, x.shape[0], x.shape[1], device);
  require_shape("residual_add", "h", h, x.shape[0], x.shape[1], device);
  require_bad("residual_add", bad, x.shape[0]);
  if (on_cuda("residual_add", device)) {
    if constexpr (build::has_cuda) return residual_add_cuda(x, h, bad, stream);
  }
  lower(residual_add(x, h), bad);
}

void first_nonfinite(TensorView<const Bf16, 2> x, std::int32_t* bad, Stream stream) {
  require_shape("first_nonfinite", "x", x, x.shape[0], x.shape[1], x.device);
  require_bad("first_nonfinite", bad, x.shape[0]);
  if (on_cuda("first_nonfinite", x.device)) {
    if constexpr (build::has_cuda) return first_nonfinite_cuda(x, bad, stream);
  }
  lower(first_nonfinite(x), bad);
}

void first_nonfinite(TensorView<const float, 2> x, std::int32_t* bad, Stream stream) {
  require_shape("first_nonfinite", "x", x, x.shape[0], x.shape[1], x.device);
  require_bad("first_nonfinite", bad, x.shape[0]);
  if (on_cuda("first_nonfinite", x.device)) {
    if constexpr (build::has_cuda) return first_nonfinite_cuda(x, bad, stream);
  }
  const auto found = first_bad(x.shape[0], x.shape[1], [&](std::int64_t row) {
    const float* values = x.data + row * x.stride[0];
    return std::all_of(values, values + x.shape[1], [](float value) { return is_finite(value); });
  });
  lower(found, bad);
}

void combine(const CombineArgs& args, Stream stream) {
  const std::int64_t rows = args.gates.shape[0];
  const std::int64_t slots = args.gates.shape[1];
  const std::int64_t cols = args.out.shape[1];
  const Device device = args.out.device;
  require_shape("combine", "y", args.y, rows * slots, cols, device);
  require_shape("combine", "gates", args.gates, rows, slots, device);
  require_shape("combine", "out", args.out, rows, cols, device);
  if (on_cuda("combine", device)) {
    if constexpr (build::has_cuda) return combine_cuda(args, stream);
  }
  const auto run = ops().combine;
  parallel_for(rows, grain(cols, 1 << 14),
               [&](std::int64_t first, std::int64_t end) { run(args, first, end); });
}

void gather_rows(TensorView<const Bf16, 2> from, std::span<const std::int32_t> index,
                 TensorView<Bf16, 2> to, Stream stream) {
  const auto bytes_of = [](const auto& x) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(x.data)>>,
                                    const std::uint8_t, std::uint8_t>;
    return TensorView<Byte, 2>{reinterpret_cast<Byte*>(x.data),
                               {x.shape[0], 2 * x.shape[1]},
                               {2 * x.stride[0], x.stride[1]},
                               x.device};
  };
  gather_rows(bytes_of(from), index, bytes_of(to), stream);
}

void gather_rows(TensorView<const std::uint8_t, 2> from, std::span<const std::int32_t> index,
                 TensorView<std::uint8_t, 2> to, Stream stream) {
  const GatherArgs args = {from, to};
  gather_rows({&args, 1}, index, stream);
}

void gather_rows(std::span<const GatherArgs> all, std::span<const std::int32_t> index,
                 Stream stream) {
  if (all.empty()) return;
  if (all.size() > kMostGathers) {
    throw Error(cat({"gather_rows: ", all.size(), " at once; at most ", kMostGathers}));
  }
  const auto rows = static_cast<std::int64_t>(index.size());
  const Device device = all[0].from.device;
  for (const auto& [from, to] : all) {
    require_shape("gather_rows", "from", from, from.shape[0], from.shape[1], device);
    require_shape("gather_rows", "to", to, rows, from.shape[1], device);
  }
  if (on_cuda("gather_rows", device)) {
    if constexpr (build::has_cuda) {
      if (all.size() > 1) return gather_all_cuda(all, index, stream);
      return gather_rows_cuda(all[0].from, index, all[0].to, stream);
    }
  }
  for (const auto& [from, to] : all) {
    const std::int64_t cols = from.shape[1];
    require_below("gather_rows", "index", index, from.shape[0]);
    parallel_for(rows, grain(cols, 1 << 18), [&](std::int64_t first, std::int64_t end) {
      for (; first < end; ++first) {
        const std::int64_t row = index[static_cast<std::size_t>(first)];
        std::memcpy(to.data + first * to.stride[0], from.data + row * from.stride[0],
                    static_cast<std::size_t>(cols));
      }
    });
  }
}

void drift_noise(const DriftNoiseArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  require_shape("drift_noise", "x", args.x, rows, cols, args.x.device);
  if (static_cast<std::int64_t>(args.streams.size()) != rows ||
      static_cast<std::int64_t>(args.positions.size()) != rows) {
    throw Error(cat({"drift_noise: ", args.streams.size(), " streams and ", args.positions.size(),
                     " positions for ", rows, " rows"}));
  }
  if (args.site >= 1u << 16 || cols > 1 << 17) {
    throw Error(cat({"drift_noise: site ", args.site, " and ", cols,
                     " columns; expected below 65536 and at most 131072"}));
  }
  if (on_cuda("drift_noise", args.x.device)) {
    if constexpr (build::has_cuda) return drift_noise_cuda(args, stream);
  }
  const auto noise = ops().noise;
  parallel_for(rows, grain(cols, 1 << 12), [&](std::int64_t first, std::int64_t end) {
    for (; first < end; ++first) noise(args, first);
  });
}

}  // namespace lockstep::kernels
