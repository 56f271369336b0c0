#include "kernels/exact/moe_w4a4.h"

#include <algorithm>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/dense/elementwise.h"
#include "kernels/exact/moe_w4a4_cuda.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/swiglu.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kRule = {.element = Element::kE2m1,
                             .scale = ScaleFormat::kE4m3,
                             .global = GlobalScale::kPerToken,
                             .global_is_power_of_two = true};

void require(bool holds, const char* what) {
  if (!holds) throw Error(cat({"moe_w4a4: ", what}));
}

template <typename T>
bool is_matrix(const TensorView<T, 2>& x, std::int64_t rows, std::int64_t cols, Device device) {
  return x.shape[0] == rows && x.shape[1] == cols && (x.stride[1] == 1 || cols == 1) &&
         x.device == device;
}

/// What the two products and the ops between them do not check themselves.
void check(const MoeW4a4Args& args) {
  const Device device = args.a.codes.device;
  const std::int64_t rows = args.gates.shape[0];
  const std::int64_t items = rows * args.gates.shape[1];
  const std::int64_t width = args.down.cols;
  require(args.gate_up.device == device && args.down.device == device,
          "a and the weights must be on one device");
  require(args.gate_up.out == 2 * width && args.down.out == args.gate_up.cols &&
              args.down.experts == args.gate_up.experts,
          "gate_up must be [2F, D] and down [D, F], of as many experts");
  require(!args.gate_up.scaled && !args.down.scaled,
          "global scales of the weights may be no powers of two; take w4a4()");
  require(is_matrix(args.gates, rows, args.gates.shape[1], device),
          "gates must be [rows, K], contiguous, on a's device");
  require(args.a.codes.shape[0] == rows, "a must have a row for every row of gates");
  require(args.offsets.shape[0] == args.gate_up.experts + 1, "offsets must be the experts and one");
  require(args.rows_of.shape[0] == items && args.slots_of.shape[0] == items,
          "rows_of and slots_of must have an entry for every gate");
  require(is_matrix(args.up, items, 2 * width, device), "up must be [rows * K, 2F]");
  require(is_matrix(args.w2_in.codes, items, width / 2, device) &&
              is_matrix(args.w2_in.scales, items, width / 16, device) &&
              args.w2_in.global.shape[0] == items,
          "w2_in must be codes of [rows * K, F]");
  require(is_matrix(args.y, items, args.down.out, device), "y must be [rows * K, D]");
  require(args.out.empty() || is_matrix(args.out, rows, args.down.out, device),
          "out must be [rows, D], or empty");
}

void moe_w4a4_cpu(const MoeW4a4Args& args) {
  const std::int64_t slots = args.gates.shape[1];
  const std::int64_t items = args.gates.shape[0] * slots;
  const std::int64_t width = args.down.cols;
  w4a4({.a = args.a,
        .w = args.gate_up,
        .offsets = args.offsets,
        .from = args.rows_of,
        .to = args.slots_of,
        .out = args.up});
  std::vector<Bf16> values(static_cast<std::size_t>(items * width));
  const TensorView<Bf16, 2> x = {values.data(), {items, width}, {width, 1}};
  swiglu({.gate = {args.up.data, {items, width}, args.up.stride},
          .up = {args.up.data + width, {items, width}, args.up.stride},
          .out = x});
  const std::int64_t bad = first_nonfinite(x);
  if (bad >= 0 && args.bad != nullptr) {
    *args.bad = std::min(*args.bad, static_cast<std::int32_t>(bad / slots));
  }
  quantize({.x = x, .rule = kRule, .out = args.w2_in});
  w4a4({.a = args.w2_in,
        .w = args.down,
        .offsets = args.offsets,
        .from = args.slots_of,
        .to = args.slots_of,
        .out = args.y});
  if (!args.out.empty()) combine({.y = args.y, .gates = args.gates, .out = args.out}, {});
}

}  // namespace

void moe_w4a4(const MoeW4a4Args& args, Stream stream) {
  check(args);
  if (args.gates.shape[0] == 0 || args.gates.shape[1] == 0) return;
  if (args.a.codes.device.kind == Device::Kind::kCpu) return moe_w4a4_cpu(args);
  require(args.down.cols <= kMoeMostWidth, "F is above 4096, what a block of threads holds");
  if constexpr (build::has_cuda) return moe_w4a4_cuda(args, stream);
  require(false, "this build has no CUDA backend");
}

}  // namespace lockstep::kernels
