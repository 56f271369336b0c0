#include "kernels/dense/linear.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "device/memory.h"
#include "kernels/dense/check.h"
#include "kernels/dense/linear_rows.h"
#include "kernels/dense/vectors.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kBlockRows = 96;  // rows that share a panel while it is in the first cache

std::int64_t panels(std::int64_t out) { return (out + kPanel - 1) / kPanel; }

Bf16& element(const PackedMatrix& m, std::int64_t out, std::int64_t in) {
  return m.data[(out / kPanel * m.in + in / 2 * 2) * kPanel + out % kPanel * 2 + in % 2];
}

void run_panel(const PanelArgs& args) {
  switch (vectors()) {
    case Vectors::kAvx512Bf16: return linear_panel_avx512_bf16(args);
    case Vectors::kAvx512:
    case Vectors::kAvx2: return linear_panel_avx2(args);
    case Vectors::kPortable: return linear_panel_portable(args);
  }
}

/// Blocks of rows by panels, in parallel.
void run(const GroupedLinearArgs& args, TensorView<Bf16, 2> y_bf16) {
  const PackedMatrix& weight = args.weights;
  const std::int64_t columns = panels(weight.out);
  const std::size_t groups = args.offsets.size() - 1;
  std::vector<std::int64_t> first_task(groups + 1, 0);
  for (std::size_t g = 0; g < groups; ++g) {
    const std::int64_t rows = args.offsets[g + 1] - args.offsets[g];
    first_task[g + 1] = first_task[g] + (rows + kBlockRows - 1) / kBlockRows * columns;
  }
  const std::int64_t work = weight.in * kPanel * std::min(kBlockRows, args.x.shape[0] + 1);
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 19) / std::max<std::int64_t>(work, 1));
  parallel_for(first_task.back(), grain, [&](std::int64_t task, std::int64_t end) {
    for (; task < end; ++task) {
      const auto after = std::upper_bound(first_task.begin(), first_task.end(), task);
      const auto g = static_cast<std::size_t>(after - first_task.begin()) - 1;
      const std::int64_t local = task - first_task[g];
      const std::int64_t panel = local % columns;
      const std::int64_t row = args.offsets[g] + local / columns * kBlockRows;
      const std::int64_t offset =
          static_cast<std::int64_t>(g) * packed_elements(weight.out, weight.in);
      PanelArgs block{
          .x = args.x.data + row * args.x.stride[0],
          .x_stride = args.x.stride[0],
          .rows = std::min<std::int64_t>(kBlockRows, args.offsets[g + 1] - row),
          .panel = weight.data + offset + panel * weight.in * kPanel,
          .pairs = weight.in / 2,
          .split = args.split_k ? weight.in / 4 : 0,
          .y = nullptr,
          .y_bf16 = nullptr,
          .y_stride = 0,
          .to = args.to.empty() ? nullptr : args.to.data() + row,
          .columns = std::min(kPanel, weight.out - panel * kPanel),
      };
      if (y_bf16.empty()) {
        const std::int64_t first = args.to.empty() ? row * args.y.stride[0] : 0;
        block.y = args.y.data + first + panel * kPanel;
        block.y_stride = args.y.stride[0];
      } else {
        block.y_bf16 = y_bf16.data + row * y_bf16.stride[0] + panel * kPanel;
        block.y_stride = y_bf16.stride[0];
      }
      run_panel(block);
    }
  });
}

std::int64_t bytes_of(std::int64_t elements) {
  return elements * static_cast<std::int64_t>(sizeof(Bf16));
}

/// pack_rows() onto a CUDA device.
void copy_rows(const TensorView<const Bf16, 2>& rows, std::int64_t first, const PackedMatrix& into,
               Stream stream) {
  const std::int64_t count = rows.shape[0];
  const std::int64_t at_once = rows.stride[0] == into.in ? count : 1;
  for (std::int64_t row = 0; row < count; row += at_once) {
    copy_bytes(into.data + (first + row) * into.in, into.device, rows.data + row * rows.stride[0],
               rows.device, bytes_of(at_once * into.in), stream);
  }
  if (first + count < into.out) return;
  fill_bytes(into.data + into.out * into.in, into.device, 0,
             bytes_of(packed_elements(into.out, into.in) - into.out * into.in), stream);
}

}  // namespace

void require_packed(const char* op, const PackedMatrix& weight) {
  if (weight.data == nullptr || weight.out <= 0 || weight.in <= 0 || weight.in % 2 != 0) {
    throw Error(cat({op, ": the weight is [", weight.out, ", ", weight.in,
                     "]; expected a packed matrix with an even number of inputs"}));
  }
}

std::int64_t packed_elements(std::int64_t out, std::int64_t in) {
  return panels(out) * kPanel * in;
}

void pack_rows(TensorView<const Bf16, 2> rows, std::int64_t first, const PackedMatrix& into,
               Stream stream) {
  require_packed("pack_rows", into);
  const bool there = on_cuda("pack_rows", into.device);
  require_shape("pack_rows", "rows", rows, rows.shape[0], into.in, there ? rows.device : Device{});
  const std::int64_t end = first + rows.shape[0];
  if (first < 0 || end > into.out) {
    throw Error(cat({"pack_rows: rows ", first, "..", end - 1, " do not fit a weight of ", into.out,
                     " outputs"}));
  }
  if (there) return copy_rows(rows, first, into, stream);
  for (std::int64_t row = 0; row < rows.shape[0]; ++row) {
    const Bf16* from = rows.data + row * rows.stride[0];
    for (std::int64_t i = 0; i < into.in; ++i) element(into, first + row, i) = from[i];
  }
  if (end != into.out) return;
  for (std::int64_t row = end; row < panels(into.out) * kPanel; ++row) {
    for (std::int64_t i = 0; i < into.in; ++i) element(into, row, i) = Bf16{};
  }
}

void unpack_row(const PackedMatrix& from, std::int64_t row, std::span<Bf16> into) {
  require_packed("unpack_row", from);
  if (row < 0 || row >= from.out || std::ssize(into) < from.in) {
    throw Error(cat({"unpack_row: row ", row, " into ", into.size(), " numbers; expected 0..",
                     from.out - 1, " and ", from.in}));
  }
  if (on_cuda("unpack_row", from.device)) {
    copy_bytes(into.data(), {}, from.data + row * from.in, from.device, bytes_of(from.in));
    return synchronize(from.device);
  }
  for (std::int64_t i = 0; i < from.in; ++i) {
    into[static_cast<std::size_t>(i)] = element(from, row, i);
  }
}

void linear_bf16(const LinearArgs& args, Stream stream) {
  const PackedMatrix& weight = args.weight;
  require_packed("linear_bf16", weight);
  const std::int64_t rows = args.x.shape[0];
  const Device device = weight.device;
  require_shape("linear_bf16", "x", args.x, rows, weight.in, device);
  if (args.y.empty() == args.y_bf16.empty() && rows > 0) {
    throw Error("linear_bf16: give exactly one of y and y_bf16");
  }
  if (!args.y.empty()) require_shape("linear_bf16", "y", args.y, rows, weight.out, device);
  if (!args.y_bf16.empty()) {
    require_shape("linear_bf16", "y_bf16", args.y_bf16, rows, weight.out, device);
  }
  if (on_cuda("linear_bf16", device)) {
    if constexpr (build::has_cuda) {
      return linear_cuda(
          {.x = args.x, .offsets = {}, .weights = weight, .y = args.y, .split_k = args.split_k},
          false, args.y_bf16, args.settled, stream);
    }
  }
  const std::int32_t offsets[2] = {0, static_cast<std::int32_t>(rows)};
  run({.x = args.x, .offsets = offsets, .weights = weight, .y = args.y, .split_k = args.split_k},
      args.y_bf16);
}

void grouped_linear_bf16(const GroupedLinearArgs& args, Stream stream) {
  require_packed("grouped_linear_bf16", args.weights);
  const std::int64_t rows = args.x.shape[0];
  require_shape("grouped_linear_bf16", "x", args.x, rows, args.weights.in, args.weights.device);
  require_shape("grouped_linear_bf16", "y", args.y, rows, args.weights.out, args.weights.device);
  const auto& offsets = args.offsets;
  if (offsets.empty()) throw Error("grouped_linear_bf16: offsets are empty; expected groups + 1");
  if (!args.to.empty() && static_cast<std::int64_t>(args.to.size()) != rows) {
    throw Error(cat({"grouped_linear_bf16: ", args.to.size(), " targets; expected ", rows}));
  }
  if (on_cuda("grouped_linear_bf16", args.weights.device)) {
    if constexpr (build::has_cuda) return linear_cuda(args, true, {}, false, stream);
  }
  if (offsets.front() != 0 || offsets.back() != rows ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    throw Error(
        cat({"grouped_linear_bf16: offsets must rise from 0 to the number of rows, ", rows}));
  }
  run(args, {});
}

}  // namespace lockstep::kernels
