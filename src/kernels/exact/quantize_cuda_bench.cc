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
  Buffer x, codes, scales, global, records, nonfinite, counts;
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
                        const Quantizer& rule, Encoding encoding, std::int32_t slots = 1,
                        bool counted = false) {
  const RowLayout layout = {encoding, static_cast<std::int32_t>(shape.cols) * slots, rule.block,
                            rule.is_mx() ? 0 : slots};
  const std::int64_t tokens = shape.rows / slots;
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
    set.records = Buffer(device, tokens * layout.bytes());
    if (counted) {
      set.nonfinite = Buffer(device, shape.rows);
      set.counts = to_device(std::vector<std::int64_t>(kNumQuantizeCounts), device);
    }
    all->push_back(std::move(set));
  }
  const auto launch = [all, shape, tokens, rule, layout, device](int i, Stream stream) {
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
    if (rule.global != GlobalScale::kNone) {
      args.out.global = {set.global.as<float>(), {rows}, {1}, device};
    }
    if (layout.encoding != Encoding::kNone) {
      args.layout = layout;
      args.records = {
          set.records.as<std::uint8_t>(), {tokens, layout.bytes()}, {layout.bytes(), 1}, device};
    }
    if (set.counts.bytes() > 0) {
      args.nonfinite = {set.nonfinite.as<std::uint8_t>(), {rows}, {1}, device};
      args.counts = {set.counts.as<std::int64_t>(), {kNumQuantizeCounts}, {1}, device};
    }
    quantize(args, stream);
  };
  return {.name = name, .size = shape.name(), .bytes = bytes, .sets = sets, .launch = launch};
}

void bench_quantize(Bench& bench) {
  const Quantizer mx = mx_rule(ScaleRule::kMxRceil);
  Quantizer matrix = kLockstep;
  matrix.global = GlobalScale::kPerTensor;
  for (const Shape& shape :
       {Shape{65536, 2048}, Shape{8192, 2048}, Shape{65536, 768}, Shape{16384, 8192},
        Shape{1024, 2048}, Shape{64, 2048}, Shape{1, 2048}}) {
    const auto one = [&](const std::string& name, const Quantizer& rule, Encoding encoding,
                         std::int32_t slots = 1, bool counted = false) {
      return quantize_case(bench, "quantize " + name, shape, rule, encoding, slots, counted);
    };
    std::vector<BenchCase> cases = {one("nvfp4", kLockstep, Encoding::kNone),
                                    one("nvfp4, counted", kLockstep, Encoding::kNone, 1, true),
                                    one("nvfp4 + compact", kLockstep, Encoding::kLsb),
                                    one("nvfp4 + mod 4", kLockstep, Encoding::kLsbScaleMod4),
                                    one("nvfp4 + full", kLockstep, Encoding::kCodes)};
    if (shape.cols == 768) {
      cases.push_back(one("nvfp4 + compact, 8 slots", kLockstep, Encoding::kLsb, 8));
    }
    bench.compare(cases);
    bench.compare({one("mxfp4", mx, Encoding::kNone), one("mxfp4 + compact", mx, Encoding::kLsb)});
  }
  // Weights: an amax over the matrix first, which is another read.
  BenchCase weights =
      quantize_case(bench, "quantize nvfp4 per matrix", {98304, 2048}, matrix, Encoding::kNone);
  weights.bytes += 2.0 * 98304 * 2048;
  bench.run(weights);
}

/// Plain, and with compact records: time by tokens. Nothing that an op is given depends on how many
/// experts or words a model has.
void law_of_tokens(Bench& bench) {
  cuda::Law plain = {.cost = "quantize, time", .size = "tokens", .slope = 1, .within = 0.1};
  cuda::Law compact = plain;
  compact.cost = "quantize and capture, time";
  for (const std::int64_t tokens : {16384, 32768, 65536, 131072}) {
    const Shape shape = {tokens, 2048};
    const std::vector<double> us =
        bench.compare({quantize_case(bench, "quantize nvfp4", shape, kLockstep, Encoding::kNone),
                       quantize_case(bench, "and compact", shape, kLockstep, Encoding::kLsb)});
    plain.add(static_cast<double>(tokens), us[0]);
    compact.add(static_cast<double>(tokens), us[1]);
  }
  bench.judge(plain);
  bench.judge(compact);
}

const cuda::BenchEntry kLaw("law_quantize", law_of_tokens);
const cuda::BenchEntry kQuantize("quantize", bench_quantize);

}  // namespace
}  // namespace lockstep::kernels
