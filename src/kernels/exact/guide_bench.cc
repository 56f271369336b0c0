// Guided rounding on one core, 10,000 rows of 128, beside the floor: copying the rows.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "base/philox.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kRows = 10000;
constexpr std::int32_t kCols = 128;
constexpr Quantizer kRule = {.element = Element::kE2m1,
                             .scale = ScaleFormat::kE4m3,
                             .global = GlobalScale::kPerToken,
                             .global_is_power_of_two = true};

std::vector<Bf16> values() {
  std::vector<Bf16> x(kRows * kCols);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const PhiloxWords w = philox(1, philox_counter(i, 0, 0));
    x[i] = to_bf16(static_cast<float>(unit(w[0], w[1]) + unit(w[2], w[3]) - 1.0));
  }
  return x;
}

// Arguments: guidance, instructions.
void guide_rows(benchmark::State& state) {
  const auto guidance = static_cast<Guidance>(state.range(0));
  const auto isa = static_cast<Isa>(state.range(1));
  if (!has_isa(isa)) return state.SkipWithError("this machine does not have these instructions");
  set_threads(1);
  const std::vector<Bf16> x = values();
  std::vector<Bf16> out(x.size());
  RowLayout layout{encoding_for(guidance), kCols, 16, 1};
  std::vector<std::uint8_t> records(static_cast<std::size_t>(kRows * layout.bytes() + 1));
  std::vector<std::uint8_t> codes(x.size() / 2);
  std::vector<std::uint8_t> scales(x.size() / 16);
  std::vector<float> global(kRows);
  const TensorView<const Bf16, 2> view = {x.data(), {kRows, kCols}, {kCols, 1}};
  QuantizeArgs quantized{.x = view, .rule = kRule};
  quantized.out = {{codes.data(), {kRows, kCols / 2}, {kCols / 2, 1}},
                   {scales.data(), {kRows, kCols / 16}, {kCols / 16, 1}},
                   {global.data(), {kRows}, {1}}};
  GuideArgs args{.x = view, .rule = kRule, .guidance = guidance, .layout = layout};
  if (guidance != Guidance::kOwnScale) {
    quantized.layout = layout;
    quantized.records = {records.data(), {kRows, layout.bytes()}, {layout.bytes(), 1}};
    args.records = quantized.records;
  }
  quantize(quantized);
  args.out = {out.data(), {kRows, kCols}, {kCols, 1}};
  for (auto _ : state) {
    guide_on(args, isa);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kRows * kCols);
}
BENCHMARK(guide_rows)->ArgsProduct({{0, 1, 2, 3, 4, 5}, {2}})->ArgsProduct({{0, 3}, {0, 1}});

void floor_copy_rows(benchmark::State& state) {
  const std::vector<Bf16> x = values();
  std::vector<Bf16> out(x.size());
  for (auto _ : state) {
    std::memcpy(out.data(), x.data(), x.size() * sizeof(Bf16));
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kRows * kCols);
}
BENCHMARK(floor_copy_rows);

}  // namespace
}  // namespace lockstep::kernels
