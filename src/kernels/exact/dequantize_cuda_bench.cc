#include <memory>

#include "device/cuda/bench.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/packed_matrix.h"
#include "numerics/e4m3.h"

namespace lockstep::kernels {
namespace {

using cuda::Bench;
using cuda::BenchCase;

struct Set {
  Buffer codes, scales, out;
};

BenchCase dequantize_case(const Bench& bench, const std::string& name, std::int64_t rows,
                          std::int64_t cols, const Quantizer& rule, bool f32) {
  const double each = 0.5 + 1.0 / rule.block + (f32 ? 4 : 2);
  const double bytes = static_cast<double>(rows * cols) * each;
  const int sets = Bench::sets_of(bytes);
  const Device device = bench.device();
  auto all = std::make_shared<std::vector<Set>>();
  for (int i = 0; i < sets; ++i) {
    const auto seed = static_cast<std::uint64_t>(2 * i);
    Set set;
    set.codes = bench.random_bytes(rows * cols / 2, seed);
    set.scales = bench.random_bytes(rows * cols / rule.block, seed + 1, kE4m3Max);
    set.out = Buffer(device, rows * cols * (f32 ? 4 : 2));
    all->push_back(std::move(set));
  }
  const auto launch = [=](int i, Stream stream) {
    const Set& set = (*all)[static_cast<std::size_t>(i)];
    DequantizeArgs args{
        .codes = {{set.codes.as<std::uint8_t>(), {rows, cols / 2}, {cols / 2, 1}, device},
                  {set.scales.as<std::uint8_t>(),
                   {rows, cols / rule.block},
                   {cols / rule.block, 1},
                   device},
                  {}},
        .rule = rule};
    if (f32) {
      args.f32 = {set.out.as<float>(), {rows, cols}, {cols, 1}, device};
    } else {
      args.bf16 = {set.out.as<Bf16>(), {rows, cols}, {cols, 1}, device};
    }
    dequantize(args, stream);
  };
  return {.name = name,
          .size = std::to_string(rows) + "x" + std::to_string(cols),
          .bytes = bytes,
          .sets = sets,
          .launch = launch};
}

void bench_dequantize(Bench& bench) {
  const Quantizer mx = mx_rule(ScaleRule::kMxRceil);
  bench.run(dequantize_case(bench, "dequantize nvfp4 to bf16", 65536, 2048, kLockstep, false));
  bench.run(dequantize_case(bench, "dequantize mxfp4 to bf16", 65536, 2048, mx, false));
  bench.run(dequantize_case(bench, "dequantize nvfp4 to f32", 65536, 2048, kLockstep, true));
  bench.run(dequantize_case(bench, "dequantize nvfp4 to bf16", 196608, 768, kLockstep, false));
}

const cuda::BenchEntry kDequantize("dequantize", bench_dequantize);

}  // namespace
}  // namespace lockstep::kernels
