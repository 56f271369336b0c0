// SwiGLU on one core, beside the floor: reading both inputs and writing the output (memcpy's rate).
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/exact/swiglu.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kRows = 1024;

// Arguments: F, instructions.
void swiglu_rows(benchmark::State& state) {
  const std::int64_t f = state.range(0);
  const auto isa = static_cast<Isa>(state.range(1));
  if (!has_isa(isa)) return state.SkipWithError("this machine does not have these instructions");
  set_threads(1);
  std::vector<float> both(static_cast<std::size_t>(kRows * 2 * f));
  for (std::size_t i = 0; i < both.size(); ++i) both[i] = static_cast<float>(i % 1999) * 0.01f - 10;
  std::vector<Bf16> out(static_cast<std::size_t>(kRows * f));
  const SwigluArgs args = {{both.data(), {kRows, f}, {2 * f, 1}},
                           {both.data() + f, {kRows, f}, {2 * f, 1}},
                           {out.data(), {kRows, f}, {f, 1}}};
  for (auto _ : state) {
    swiglu_on(args, isa);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kRows * f);
  state.SetBytesProcessed(state.iterations() * kRows * f * 10);
}
BENCHMARK(swiglu_rows)->ArgsProduct({{80}, {0, 1, 2}});

void floor_memcpy(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(kRows * state.range(0) * 5);
  std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kRows * state.range(0));
  state.SetBytesProcessed(state.iterations() * kRows * state.range(0) * 10);
}
BENCHMARK(floor_memcpy)->Arg(80);

}  // namespace
}  // namespace lockstep::kernels
