/// The ops at the demo's shapes: hidden 160, 16 experts, top 2, width 80, 512 rows.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "kernels/dense/attention.h"
#include "kernels/dense/check.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "kernels/dense/router.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

std::vector<Bf16> random_bf16(std::int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> gauss;
  std::vector<Bf16> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(to_bf16(gauss(random)));
  return values;
}

void linear(benchmark::State& state) {
  const std::int64_t rows = state.range(0), in = state.range(1), out = state.range(2);
  const auto x = random_bf16(rows * in);
  auto w = random_bf16(packed_elements(out, in));
  std::vector<Bf16> y(static_cast<std::size_t>(rows * out));
  for (auto _ : state) {
    linear_bf16({.x = rows_of(x.data(), rows, in),
                 .weight = {w.data(), out, in},
                 .y_bf16 = rows_of(y.data(), rows, out)},
                {});
  }
  state.counters["FLOP/s"] = benchmark::Counter(
      static_cast<double>(2 * rows * in * out * static_cast<std::int64_t>(state.iterations())),
      benchmark::Counter::kIsRate);
}
BENCHMARK(linear)
    ->Args({512, 160, 288})
    ->Args({512, 160, 160})
    ->Args({1, 160, 288})
    ->Args({512, 160, 300})
    ->Args({2048, 2048, 2048})
    ->UseRealTime();

void grouped(benchmark::State& state) {
  const std::int64_t rows = 1024, in = 160, out = 160, groups = 16;
  const auto x = random_bf16(rows * in);
  auto w = random_bf16(groups * packed_elements(out, in));
  std::vector<float> y(static_cast<std::size_t>(rows * out));
  std::vector<std::int32_t> offsets;
  for (std::int32_t g = 0; g <= groups; ++g) offsets.push_back(g * 64);
  for (auto _ : state) {
    grouped_linear_bf16({.x = rows_of(x.data(), rows, in),
                         .offsets = offsets,
                         .weights = {w.data(), out, in},
                         .y = rows_of(y.data(), rows, out)},
                        {});
  }
  state.counters["FLOP/s"] = benchmark::Counter(
      static_cast<double>(2 * rows * in * out * static_cast<std::int64_t>(state.iterations())),
      benchmark::Counter::kIsRate);
}
BENCHMARK(grouped)->UseRealTime();

/// Args: rows, length of each row's sequence, rows of one sequence side by side, codes or BF16.
void attend(benchmark::State& state) {
  const std::int64_t rows = state.range(0);
  const auto length = static_cast<std::int32_t>(state.range(1));
  const std::int64_t together = state.range(2);
  constexpr std::int32_t kHeads = 4, kKvHeads = 2, kDim = 32, kWidth = kKvHeads * kDim;
  PagedKv kv;
  if (state.range(3) != 0) {
    kv.rule = {.element = Element::kE2m1,
               .scale = ScaleFormat::kE4m3,
               .global = GlobalScale::kStatic,
               .global_is_power_of_two = true};
  }
  kv.exponent = -7;
  kv.page_tokens = 16;
  kv.row_bytes = state.range(3) != 0 ? kWidth / 2 + kWidth / 16 : 2 * kWidth;
  kv.page_bytes = 16 * kv.row_bytes;
  const std::int64_t sequences = rows / together, pages = (length + 15) / 16;
  std::vector<std::byte> pool(static_cast<std::size_t>(sequences * pages * kv.page_bytes));
  kv.pool = pool.data();
  std::vector<std::vector<std::int32_t>> tables(static_cast<std::size_t>(sequences));
  std::vector<std::span<const std::int32_t>> spans;
  PagedRows where;
  std::vector<std::int32_t> positions, sequence, every_position, every_sequence;
  for (std::int64_t s = 0; s < sequences; ++s) {
    auto& table = tables[static_cast<std::size_t>(s)];
    for (std::int64_t p = 0; p < pages; ++p) {
      table.push_back(static_cast<std::int32_t>(s * pages + p));
    }
    spans.emplace_back(table);
    for (std::int64_t r = 0; r < together; ++r) {
      positions.push_back(length - static_cast<std::int32_t>(together - r));
      sequence.push_back(static_cast<std::int32_t>(s));
    }
    for (std::int32_t p = 0; p < length; ++p) {
      every_position.push_back(p);
      every_sequence.push_back(static_cast<std::int32_t>(s));
    }
  }
  const auto all = static_cast<std::int64_t>(every_position.size());
  const auto x = random_bf16(all * kWidth);
  write_kv({.x = rows_of(x.data(), all, kWidth),
            .kv = kv,
            .rows = {every_position, every_sequence, spans}},
           {});
  const auto q = random_bf16(rows * kHeads * kDim);
  std::vector<Bf16> out(q.size());
  for (auto _ : state) {
    attention({.q = rows_of(q.data(), rows, kHeads * kDim),
               .k = kv,
               .v = kv,
               .rows = {positions, sequence, spans},
               .num_heads = kHeads,
               .num_kv_heads = kKvHeads,
               .head_dim = kDim,
               .out = rows_of(out.data(), rows, kHeads * kDim)},
              {});
  }
  state.counters["keys/s"] = benchmark::Counter(
      static_cast<double>(rows * kKvHeads * length * static_cast<std::int64_t>(state.iterations())),
      benchmark::Counter::kIsRate);
}
BENCHMARK(attend)
    ->Args({512, 100, 1, 1})
    ->Args({512, 100, 1, 0})
    ->Args({512, 256, 1, 1})
    ->Args({512, 64, 64, 1})
    ->UseRealTime();

void noise(benchmark::State& state) {
  const std::int64_t rows = 512, cols = 160;
  auto x = random_bf16(rows * cols);
  const std::vector<std::uint64_t> streams(512, 7);
  const std::vector<std::int32_t> positions(512, 3);
  for (auto _ : state) {
    drift_noise({.x = rows_of(x.data(), rows, cols),
                 .sigma = 1e-3f,
                 .seed = 1,
                 .streams = streams,
                 .positions = positions,
                 .site = 1},
                {});
  }
  state.counters["elements/s"] = benchmark::Counter(
      static_cast<double>(rows * cols * static_cast<std::int64_t>(state.iterations())),
      benchmark::Counter::kIsRate);
}
BENCHMARK(noise)->UseRealTime();

void norm(benchmark::State& state) {
  const std::int64_t rows = 512, cols = 160;
  const auto x = random_bf16(rows * cols), w = random_bf16(cols);
  auto y = x;
  for (auto _ : state) {
    rms_norm({.x = rows_of(x.data(), rows, cols), .weight = w, .y = rows_of(y.data(), rows, cols)},
             {});
  }
}
BENCHMARK(norm)->UseRealTime();

void turn(benchmark::State& state) {
  const std::int64_t rows = 512, cols = 128;
  auto x = random_bf16(rows * cols);
  const auto w = random_bf16(32);
  RopeTable table(1e6, 32);
  table.grow(256);
  const std::vector<std::int32_t> positions(512, 100);
  for (auto _ : state) {
    rope({.x = rows_of(x.data(), rows, cols),
          .head_dim = 32,
          .positions = positions,
          .table = &table,
          .norm = w},
         {});
  }
}
BENCHMARK(turn)->UseRealTime();

void choose(benchmark::State& state) {
  std::vector<float> logits(512 * 16), gates(1024);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7 % 31) * 0.1f;
  std::vector<std::int32_t> experts(1024);
  for (auto _ : state) {
    router({.logits = rows_of(logits.data(), 512, 16),
            .normalize = true,
            .experts = rows_of(experts.data(), 512, 2),
            .gates = rows_of(gates.data(), 512, 2)},
           {});
  }
}
BENCHMARK(choose)->UseRealTime();

void add(benchmark::State& state) {
  const auto x = random_bf16(512 * 160);
  auto h = x;
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        residual_add(rows_of(x.data(), 512, 160), rows_of(h.data(), 512, 160)));
  }
}
BENCHMARK(add)->UseRealTime();

}  // namespace
}  // namespace lockstep::kernels
