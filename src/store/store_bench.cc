// What a store costs beside a copy of the same bytes: rows as a decoding engine appends them, and
// runs as a trainer reads them.
#include <benchmark/benchmark.h>

#include <cstring>
#include <filesystem>

#include "store/store.h"

namespace lockstep::store {
namespace {

/// One bit and a scale of a row of a model's hidden size: 25 bytes for 128, 385 for 2048.
RowLayout row_of(std::int64_t hidden) {
  return {Encoding::kLsb, static_cast<std::int32_t>(hidden), 16, 1};
}
constexpr int kSequences = 512;
constexpr int kLayers = 24;
constexpr int kTokens = 128;

struct Rollout {
  explicit Rollout(RowLayout row)
      : layout(row), bytes(static_cast<std::size_t>(row.bytes())), rows(kSequences * bytes) {}

  RowLayout layout;
  std::size_t bytes;
  std::vector<TokenKey> tokens{kSequences};
  std::vector<std::byte> rows;

  void begin(Store& store) {
    for (std::size_t s = 0; s < kSequences; ++s) {
      tokens[s] = {SpanId{s}, 0};
      store.open({.id = tokens[s].span}, ContractId{1});
    }
  }
  void pass(Store& store) {
    for (int layer = 0; layer < kLayers; ++layer) {
      store.append(tokens, {{Layer{layer}, Site::kW13In}, layout, rows});
    }
    for (TokenKey& token : tokens) ++token.position;
  }
  void end(Store& store) {
    for (const TokenKey& token : tokens) store.seal(token.span);
  }
};

/// A pass appends a row of 512 sequences in each layer.
void append_decode(benchmark::State& state) {
  Store store({.ram_bytes = 1ll << 40});
  Rollout rollout(row_of(state.range(0)));
  rollout.begin(store);
  for (auto _ : state) {
    if (rollout.tokens[0].position == kTokens) {
      state.PauseTiming();
      rollout.end(store);
      rollout.begin(store);
      state.ResumeTiming();
    }
    rollout.pass(store);
  }
  state.SetItemsProcessed(state.iterations() * kLayers * kSequences);
  state.SetBytesProcessed(state.items_processed() * static_cast<std::int64_t>(rollout.bytes));
}
BENCHMARK(append_decode)->Arg(128)->Arg(2048)->Unit(benchmark::kMicrosecond);

/// The same rows copied to where they would lie, without a store.
void copy_decode(benchmark::State& state) {
  const Rollout rollout(row_of(state.range(0)));
  const std::size_t bytes = rollout.bytes;
  std::vector<std::byte> columns(std::size_t{kLayers} * kSequences * kTokens * bytes);
  std::size_t position = 0;
  for (auto _ : state) {
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t s = 0; s < kSequences; ++s) {
        const std::size_t row = (s * kLayers + layer) * kTokens + position;
        std::memcpy(columns.data() + row * bytes, rollout.rows.data() + s * bytes, bytes);
      }
    }
    position = (position + 1) % kTokens;
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kLayers * kSequences);
  state.SetBytesProcessed(state.items_processed() * static_cast<std::int64_t>(rollout.bytes));
}
BENCHMARK(copy_decode)->Arg(128)->Arg(2048)->Unit(benchmark::kMicrosecond);

/// A training step reads whole spans, place by place; from RAM, or from disk (page cache).
void read_step(benchmark::State& state) {
  const bool from_disk = state.range(0) != 0;
  const auto folder = std::filesystem::temp_directory_path() / "lockstep_store_bench";
  std::filesystem::remove_all(folder);
  {
    Store store({.folder = from_disk ? folder : std::filesystem::path(),
                 .ram_bytes = from_disk ? 0 : 1ll << 40});
    Rollout rollout(row_of(2048));
    rollout.begin(store);
    for (int t = 0; t < kTokens; ++t) rollout.pass(store);
    rollout.end(store);
    if (!store.flush()) state.SkipWithError("no room on disk");
    constexpr int kBatch = 64;
    std::vector<TokenKey> tokens;
    for (std::size_t s = 0; s < kBatch; ++s) {
      for (int t = 0; t < kTokens; ++t) tokens.push_back({SpanId{s * 8}, t});
    }
    std::vector<std::byte> rows(tokens.size() * rollout.bytes);
    std::vector<std::uint8_t> present(tokens.size());
    int layer = 0;
    for (auto _ : state) {
      const auto count = store.read(tokens, ContractId{1},
                                    {{Layer{layer}, Site::kW13In}, rollout.layout, rows}, present);
      if (count != tokens.size()) state.SkipWithError("rows are absent");
      layer = (layer + 1) % kLayers;
    }
    state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(tokens.size()));
    state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(rows.size()));
  }
  std::filesystem::remove_all(folder);
}
BENCHMARK(read_step)->Arg(0)->Arg(1)->Unit(benchmark::kMicrosecond);

void copy_step(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(row_of(2048).bytes());
  std::vector<std::byte> from(std::size_t{kLayers} * 64 * kTokens * bytes, std::byte{1});
  std::vector<std::byte> rows(64 * kTokens * bytes);
  std::size_t layer = 0;
  for (auto _ : state) {
    std::memcpy(rows.data(), from.data() + layer * rows.size(), rows.size());
    benchmark::ClobberMemory();
    layer = (layer + 1) % kLayers;
  }
  state.SetItemsProcessed(state.iterations() * 64 * kTokens);
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(rows.size()));
}
BENCHMARK(copy_step)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace lockstep::store
