#include <benchmark/benchmark.h>

#include <vector>

#include "base/parallel.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kRows = 512;
constexpr std::int64_t kCols = 2048;

struct Matrix {
  std::vector<Bf16> x = std::vector<Bf16>(kRows * kCols);
  std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(kRows * kCols / 2);
  std::vector<std::uint8_t> scales = std::vector<std::uint8_t>(kRows * kCols / 16);
  std::vector<std::uint8_t> records;
  std::vector<float> global = std::vector<float>(kRows);

  Matrix() {
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = to_bf16(static_cast<float>(static_cast<int>(i * 2654435761u % 2001) - 1000) * 0.003f);
    }
  }

  QuantizeArgs args(const Quantizer& rule, Encoding encoding) {
    QuantizeArgs args{.x = {x.data(), {kRows, kCols}, {kCols, 1}, {}}, .rule = rule};
    args.out = {{codes.data(), {kRows, kCols / 2}, {kCols / 2, 1}, {}},
                {scales.data(), {kRows, kCols / rule.block}, {kCols / rule.block, 1}, {}},
                {global.data(), {kRows}, {1}, {}}};
    if (encoding != Encoding::kNone) {
      args.layout = {encoding, kCols, rule.block, rule.is_mx() ? 0 : 1};
      records.resize(static_cast<std::size_t>(kRows * args.layout.bytes()));
      args.records = {records.data(), {kRows, args.layout.bytes()}, {args.layout.bytes(), 1}, {}};
    }
    return args;
  }
};

constexpr Quantizer kLockstep = {.element = Element::kE2m1,
                                 .scale = ScaleFormat::kE4m3,
                                 .global = GlobalScale::kPerToken,
                                 .global_is_power_of_two = true};

void quantize_rows(benchmark::State& state, const Quantizer& rule, Encoding encoding) {
  set_threads(1);
  Matrix matrix;
  const QuantizeArgs args = matrix.args(rule, encoding);
  for (auto _ : state) quantize(args);
  state.SetBytesProcessed(state.iterations() * kRows * kCols * 2);
}

Quantizer portable() {
  Quantizer rule = kLockstep;
  rule.tie = Tie::kTowardZero;  // which the SIMD file leaves to the definition
  return rule;
}

constexpr Quantizer kMx = {.element = Element::kE2m1,
                           .block = 32,
                           .scale = ScaleFormat::kE8m0,
                           .scale_rule = ScaleRule::kMxEven};

BENCHMARK_CAPTURE(quantize_rows, lockstep, kLockstep, Encoding::kNone);
BENCHMARK_CAPTURE(quantize_rows, lockstep_lsb_records, kLockstep, Encoding::kLsb);
BENCHMARK_CAPTURE(quantize_rows, lockstep_mod4_records, kLockstep, Encoding::kLsbScaleMod4);
BENCHMARK_CAPTURE(quantize_rows, mx_even, kMx, Encoding::kNone);
BENCHMARK_CAPTURE(quantize_rows, definition, portable(), Encoding::kNone);

void weight(benchmark::State& state) {
  set_threads(1);
  Matrix matrix;
  std::vector<float> master(matrix.x.size());
  for (std::size_t i = 0; i < master.size(); ++i) master[i] = to_float(matrix.x[i]);
  Quantizer rule = kLockstep;
  rule.global = GlobalScale::kPerTensor;
  const PackedView<std::uint8_t> out = matrix.args(rule, Encoding::kNone).out;
  for (auto _ : state) {
    quantize_weight({master.data(), {kRows, kCols}, {kCols, 1}, {}}, rule, out);
  }
  state.SetBytesProcessed(state.iterations() * kRows * kCols * 4);
}
BENCHMARK(weight);

void dequantize_rows(benchmark::State& state) {
  set_threads(1);
  Matrix matrix;
  const QuantizeArgs args = matrix.args(kLockstep, Encoding::kNone);
  quantize(args);
  std::vector<Bf16> back(matrix.x.size());
  const DequantizeArgs backwards{
      .codes = args.out, .rule = kLockstep, .bf16 = {back.data(), {kRows, kCols}, {kCols, 1}, {}}};
  for (auto _ : state) dequantize(backwards);
  state.SetBytesProcessed(state.iterations() * kRows * kCols * 2);
}
BENCHMARK(dequantize_rows);

}  // namespace
}  // namespace lockstep::kernels
