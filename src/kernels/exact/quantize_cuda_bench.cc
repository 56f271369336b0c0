#include <memory>

#include "device/cuda/bench.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

using cuda::Bench;
using cuda::BenchCase;

/// One set of inputs and outputs for each rotation.
struct Set {
  Buffer x, codes, scales, global, records, amax;
};

struct Shape {
  std::int64_t rows, cols;
  std::string name() const { return std::to_string(rows) + "x" + std::to_string(cols); }
  double elements() const { return static_cast<double>(rows * cols); }
};

double bytes_of(const Shape& shape, const Quantizer& rule, const RowLayout& layout) {
  const double plain = 2.0 + 0.5 + 1.0 / rule.block;
  const double records =
      layout.bytes() > 0 ? static_cast<double>(layout.bytes()) / layout.width : 0;
  const double global =
      rule.global == GlobalScale::kPerToken ? 4.0 * static_cast<double>(shape.rows) : 0;
  return shape.elements() * (plain + records) + global;
}

BenchCase quantize_case(const Bench& bench, const std::string& name, const Shape& shape,
                        const Quantizer& rule, Encoding encoding, bool amax_given = false) {
  const RowLayout layout = {encoding, static_cast<std::int32_t>(shape.cols), rule.block,
                            rule.is_mx() ? 0 : 1};
  const double bytes = bytes_of(shape, rule, layout);
  const int sets = Bench::sets_of(bytes);
  auto all = std::make_shared<std::vector<Set>>();
  const Device device = bench.device();
  for (int i = 0; i < sets; ++i) {
    Set set;
    const auto seed = static_cast<std::uint64_t>(i + 1);
    set.x = bench.normal_bf16(shape.rows * shape.cols, seed);
    set.codes = Buffer(device, shape.rows * shape.cols / 2);
    set.scales = Buffer(device, shape.rows * shape.cols / rule.block);
    set.global = Buffer(device, shape.rows * 4);
    set.records = Buffer(device, shape.rows * layout.bytes());
    if (amax_given) {
      // Four standard deviations and a half: what a row of normal numbers has.
      const std::vector<float> amax(static_cast<std::size_t>(shape.rows), 4.5f);
      set.amax = to_device(amax, device);
    }
    all->push_back(std::move(set));
  }
  const auto launch = [all, shape, rule, layout, device](int i, Stream stream) {
    const Set& set = (*all)[static_cast<std::size_t>(i)];
    const auto [rows, cols] = shape;
    QuantizeArgs args{
        .x = {set.x.as<Bf16>(), {rows, cols}, {cols, 1}, device},
        .rule = rule,
        .out = {{set.codes.as<std::uint8_t>(), {rows, cols / 2}, {cols / 2, 1}, device},
                {set.scales.as<std::uint8_t>(),
                 {rows, cols / rule.block},
                 {cols / rule.block, 1},
                 device},
                {}}};
    if (rule.global != GlobalScale::kNone)
      args.out.global = {set.global.as<float>(), {rows}, {1}, device};
    if (set.amax.bytes() > 0) args.amax = {set.amax.as<float>(), {rows}, {1}, device};
    if (layout.encoding != Encoding::kNone) {
      args.layout = layout;
      args.records = {
          set.records.as<std::uint8_t>(), {rows, layout.bytes()}, {layout.bytes(), 1}, device};
    }
    quantize(args, stream);
  };
  return {.name = name, .size = shape.name(), .bytes = bytes, .sets = sets, .launch = launch};
}

void bench_quantize(Bench& bench) {
  for (const Shape& shape :
       {Shape{65536, 2048}, Shape{8192, 2048}, Shape{65536, 768}, Shape{64, 2048}}) {
    bench.compare(
        {quantize_case(bench, "quantize nvfp4", shape, kLockstep, Encoding::kNone),
         quantize_case(bench, "quantize nvfp4, amax given", shape, kLockstep, Encoding::kNone,
                       true),
         quantize_case(bench, "quantize nvfp4 + compact", shape, kLockstep, Encoding::kLsb),
         quantize_case(bench, "quantize nvfp4 + mod 4", shape, kLockstep, Encoding::kLsbScaleMod4),
         quantize_case(bench, "quantize nvfp4 + full", shape, kLockstep, Encoding::kCodes)});
    const Quantizer mx = mx_rule(ScaleRule::kMxRceil);
    bench.compare({quantize_case(bench, "quantize mxfp4", shape, mx, Encoding::kNone),
                   quantize_case(bench, "quantize mxfp4 + compact", shape, mx, Encoding::kLsb)});
  }
}

const cuda::BenchEntry kQuantize("quantize", bench_quantize);

}  // namespace
}  // namespace lockstep::kernels
