// W4A4 on one core: multiply-adds a second. The ceiling is that of vpdpbusd alone, 64 products an
// instruction, which `peak_vnni` measures on the same machine; scaling a block's sum of 16 products
// exactly costs seven further instructions beside four of them.
#include <benchmark/benchmark.h>

#include <memory>
#include <numeric>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/parallel.h"
#include "kernels/exact/w4a4.h"
#include "numerics/exponent.h"

namespace lockstep::kernels {
namespace {

struct Operand {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
  std::vector<float> global;
  PackedView<const std::uint8_t> view;

  Operand(std::int64_t rows, std::int64_t cols)
      : codes(static_cast<std::size_t>(rows * cols / 2)),
        scales(static_cast<std::size_t>(rows * cols / 16)),
        global(static_cast<std::size_t>(rows), 1.0f) {
    std::uint32_t x = 1;
    const auto next = [&] {
      return static_cast<std::uint8_t>((x = x * 1664525u + 1013904223u) >> 24);
    };
    for (auto& c : codes) c = next();
    for (auto& s : scales) s = next() % 0x7F;
    view = {{codes.data(), {rows, cols / 2}, {cols / 2, 1}},
            {scales.data(), {rows, cols / 16}, {cols / 16, 1}},
            {global.data(), {rows}, {1}}};
  }
};

// Arguments: rows (each to two experts), cols, outputs, experts, instructions, residual.
void product(benchmark::State& state) {
  const std::int64_t rows = state.range(0);
  const auto cols = static_cast<std::int32_t>(state.range(1));
  const auto out = static_cast<std::int32_t>(state.range(2));
  const auto experts = static_cast<std::int32_t>(state.range(3));
  const auto isa = static_cast<Isa>(state.range(4));
  if (!has_isa(isa)) return state.SkipWithError("this machine does not have these instructions");
  set_threads(1);
  const Operand a(rows, cols);
  const Operand w(out, cols);
  std::vector<std::byte> bytes(
      static_cast<std::size_t>(experts * W4a4Weights::expert_bytes(out, cols) + 64));
  void* data = bytes.data();
  std::size_t space = bytes.size();
  const W4a4Weights weights = {static_cast<std::byte*>(std::align(64, 64, data, space)), experts,
                               out, cols};
  for (std::int32_t e = 0; e < experts; ++e) w4a4_fill(weights, e, 0, w.view);
  const std::int64_t items = experts == 1 ? rows : rows * 2;
  std::vector<std::int32_t> from;
  std::vector<std::int32_t> offsets = {0};
  for (std::int32_t e = 0; e < experts; ++e) {
    for (std::int64_t i = items * e / experts; i < items * (e + 1) / experts; ++i) {
      from.push_back(static_cast<std::int32_t>(i % rows));
    }
    offsets.push_back(static_cast<std::int32_t>(from.size()));
  }
  std::vector<float> y(static_cast<std::size_t>(items * out));
  W4a4Args args;
  args.a = a.view;
  if (state.range(5) != 0) args.residual = a.view;
  args.w = weights;
  args.offsets = {offsets.data(), {experts + 1}, {1}};
  args.from = {from.data(), {items}, {1}};
  args.out = {y.data(), {items, out}, {out, 1}};
  for (auto _ : state) {
    w4a4_on(args, isa);
    benchmark::ClobberMemory();
  }
  state.counters["MAC/s"] =
      benchmark::Counter(static_cast<double>(items * cols * out * (state.range(5) + 1)),
                         benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(product)
    ->Args({512, 128, 160, 16, 2, 0})
    ->Args({512, 160, 160, 12, 2, 0})
    ->Args({512, 80, 160, 12, 2, 0})
    ->Args({512, 128, 160, 16, 2, 1})
    ->Args({512, 128, 160, 16, 1, 0})
    ->Args({512, 128, 160, 16, 0, 0})
    ->Args({64, 128, 160, 16, 2, 0})
    ->Args({1024, 2048, 1536, 1, 2, 0})
    ->Args({1, 2048, 1536, 8, 2, 0});

// A refit of one expert's gate and up, 2 * 64 x 128.
void fill(benchmark::State& state) {
  const Operand w(128, 128);
  std::vector<std::byte> bytes(static_cast<std::size_t>(W4a4Weights::expert_bytes(128, 128)));
  const W4a4Weights weights = {bytes.data(), 1, 128, 128};
  for (auto _ : state) {
    w4a4_fill(weights, 0, 0, w.view);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * 128 * 128);
}
BENCHMARK(fill);

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512vnni")]] void many_dots(__m512i* sums, std::int64_t count) {
  __m512i acc[8];
  const __m512i x = _mm512_set1_epi32(0x01020304);
  for (auto& a : acc) a = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 8
    for (auto& a : acc) a = _mm512_dpbusd_epi32(a, x, x);
  }
  for (int i = 0; i < 8; ++i) sums[i] = acc[i];
}

void peak_vnni(benchmark::State& state) {
  if (!has_isa(Isa::kAvx512)) return state.SkipWithError("this machine does not have VNNI");
  alignas(64) __m512i sums[8];
  for (auto _ : state) {
    many_dots(sums, 100000);
    benchmark::DoNotOptimize(sums);
  }
  state.counters["MAC/s"] =
      benchmark::Counter(100000.0 * 8 * 64, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(peak_vnni);
#endif

}  // namespace
}  // namespace lockstep::kernels
