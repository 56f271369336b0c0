/// Whole decoding passes of Qwen3-30B-A3B's shape under made-up weights: every layer, the head, no
/// sampling. What must be read is counted as if each token's experts were drawn alike.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "base/text.h"
#include "contract/contract.h"
#include "device/cuda/bench.h"
#include "device/stream.h"
#include "kernels/exact/quantize.h"
#include "model/names.h"
#include "model/testing.h"
#include "rollout/capture.h"
#include "rollout/forward.h"
#include "rollout/forward_fixture.h"
#include "rollout/kv_cache.h"

namespace lockstep::rollout {
namespace {

constexpr std::int32_t kPageTokens = 16;

/// One weight of each role, which stands for all of its kind.
class MadeUp {
 public:
  MadeUp(const cuda::Bench& bench, const ModelConfig& model, const Contract& contract)
      : bench_(bench), model_(model), contract_(contract) {}

  Weight weight(const WeightId& id) {
    const bool codes = of_expert(id.role) && contract_.layers.has(id.layer) &&
                       contract_.weight.element != Element::kBf16;
    if (!codes) return {id, plain(id.role)};
    auto found = codes_.find(id.role);
    if (found == codes_.end()) found = codes_.emplace(id.role, quantized(id.role)).first;
    return {id, found->second.view};
  }

 private:
  struct Codes {
    Buffer codes, scales, global;
    PackedView<const std::uint8_t> view;
  };

  TensorView<const Bf16, 2> plain(WeightId::Role role) {
    const auto [rows, cols] = weight_shape(model_, role);
    auto found = plain_.find(role);
    if (found == plain_.end()) {
      const float deviation = rows == 1 || cols == 1 ? 1.0f : 0.02f;
      const auto seed = static_cast<std::uint64_t>(role) + 1;
      found = plain_.emplace(role, bench_.normal_bf16(rows * cols, seed, deviation)).first;
      synchronize(bench_.device(), bench_.stream());  // others read it in an order of their own
    }
    return {found->second.as<const Bf16>(), {rows, cols}, {cols, 1}, bench_.device()};
  }

  Codes quantized(WeightId::Role role) {
    const auto [rows, cols] = weight_shape(model_, role);
    const Device device = bench_.device();
    const Quantizer& rule = contract_.weight;
    Codes made{.codes = Buffer(device, rows * rule.code_bytes(cols)),
               .scales = Buffer(device, rows * rule.scale_cols(cols)),
               .global = Buffer(device, 4),
               .view = {}};
    const auto bytes = [&](const Buffer& buffer, std::int64_t width) {
      return TensorView<std::uint8_t, 2>{
          buffer.as<std::uint8_t>(), {rows, width}, {width, 1}, device};
    };
    const PackedView<std::uint8_t> out = {bytes(made.codes, rule.code_bytes(cols)),
                                          bytes(made.scales, rule.scale_cols(cols)),
                                          {made.global.as<float>(), {rows}, {0}, device}};
    kernels::quantize({.x = plain(role), .rule = rule, .out = out});
    synchronize(device);
    made.view = out;
    return made;
  }

  const cuda::Bench& bench_;
  ModelConfig model_;
  Contract contract_;
  std::map<WeightId::Role, Buffer> plain_;
  std::map<WeightId::Role, Codes> codes_;
};

/// Pages in no order, of bytes that are small numbers in every format.
class MadeUpCache {
 public:
  MadeUpCache(const cuda::Bench& bench, const Agreement& agreement, std::int64_t pages)
      : layers_(cache_layout(agreement, kPageTokens)),
        pool_(bench.random_bytes(pages * layers_[0].k.page_bytes, 7, 0x38)) {
    synchronize(bench.device(), bench.stream());
    for (LayerKv& layer : layers_) {
      layer.k.pool = pool_.as<std::byte>();
      layer.v.pool = pool_.as<std::byte>();
    }
    synchronize(bench.device(), bench.stream());
  }
  std::span<const LayerKv> layers() const { return layers_; }
  /// Of all layers.
  std::int64_t token_bytes() const { return layers_[0].k.page_bytes / kPageTokens; }

 private:
  std::vector<LayerKv> layers_;
  Buffer pool_;
};

struct Decoding {
  std::int32_t rows = 0;
  std::int32_t context = 0;
  bool captured = false;  // with records of w13_in in all layers, and of routes
  bool graph = true;      // given as one call
};

/// The last token of each sequence.
struct DecodePass {
  explicit DecodePass(const Decoding& of) {
    const std::int32_t pages = (of.context + kPageTokens - 1) / kPageTokens;
    tables.resize(static_cast<std::size_t>(of.rows));
    for (std::int32_t row = 0; row < of.rows; ++row) {
      auto& table = tables[static_cast<std::size_t>(row)];
      for (std::int32_t page = 0; page < pages; ++page) {
        table.push_back(page * of.rows + (row + page * 7) % of.rows);
      }
      pass.tokens.push_back(row * 1009 % 4096);
      pass.positions.push_back(of.context - 1);
      pass.keys.push_back({SpanId{static_cast<std::uint64_t>(row) + 1}, of.context - 1});
      pass.sequence.push_back(row);
      pass.pages.push_back(table);
      pass.wanted.push_back(row);
    }
    if (of.graph) pass.real_rows = of.rows;
  }
  static std::int64_t pages_of(const Decoding& of) {
    return (of.context + kPageTokens - 1) / kPageTokens * std::int64_t{of.rows};
  }
  std::vector<std::vector<std::int32_t>> tables;
  Pass pass;
};

/// Bytes that a pass must read: the weights of the experts that are chosen, all others once, the
/// cache of its sequences.
double bytes_of(const ModelConfig& model, const Contract& contract, const Decoding& of,
                std::int64_t token_bytes) {
  const double experts = model.num_experts;
  const double chosen =
      experts * (1 - std::pow(1 - model.experts_per_token / experts, double{1} * of.rows));
  double bytes = 0;
  for (const WeightId& id : weight_ids(model)) {
    const auto [rows, cols] = weight_shape(model, id.role);
    const Quantizer& rule = contract.weight;
    const bool codes = of_expert(id.role) && rule.element != Element::kBf16;
    const std::int64_t size =
        codes ? rows * (rule.code_bytes(cols) + rule.scale_cols(cols)) : 2 * rows * cols;
    if (id.role == WeightId::Role::kEmbedding) continue;
    bytes += static_cast<double>(size) * (of_expert(id.role) ? chosen / experts : 1);
  }
  return bytes + static_cast<double>(token_bytes) * of.context * of.rows;
}

struct PassTime {
  double ms = 0;       // from one pass to the next
  double host_ms = 0;  // of it, until the host has given everything
};

PassTime median_time(Forward& forward, const Pass& pass, std::span<const LayerKv> cache,
                     Capture& capture) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point began) {
    return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
  };
  std::vector<double> times, host;
  for (int i = 0; i < 15; ++i) {  // the first ones find memory and note the graph
    const auto began = Clock::now();
    capture.begin(pass);
    forward.run(pass, cache, capture);
    const double given = since(began);
    capture.flush();  // of the pass before
    capture.send();
    forward.finish();
    if (i < 4) continue;
    times.push_back(since(began));
    host.push_back(given);
  }
  capture.flush();
  std::nth_element(times.begin(), times.begin() + 5, times.end());
  std::nth_element(host.begin(), host.begin() + 5, host.end());
  return {times[5], host[5]};
}

/// A model's weights under a contract, and passes over it.
class Decoder {
 public:
  Decoder(cuda::Bench& bench, const char* name, const ModelConfig& model, Contract contract)
      : bench_(bench), name_(name), agreement_(agreement(model, std::move(contract))) {
    MadeUp weights(bench, model, agreement_.contract);
    WeightSink& sink = forward_.weights();
    sink.begin(WeightVersion{1}, agreement_.contract.id());
    for (const WeightId& id : weight_ids(model)) sink.put(weights.weight(id));
    sink.commit();
  }

  /// Measures and prints a row.
  PassTime run(const Decoding& of) {
    const MadeUpCache cache(bench_, agreement_, DecodePass::pages_of(of));
    const DecodePass decode(of);
    const PassTime time =
        median_time(forward_, decode.pass, cache.layers(), of.captured ? all_ : none_);
    const double bytes = bytes_of(agreement_.model, agreement_.contract, of, cache.token_bytes());
    const double floor = bytes / bench_.ceilings().read * 1e3;
    std::printf("%-38s B %d, %dK tokens%s %8.2f ms %8.0f MB %6.3f TB/s  floor %.3f\n", name_,
                of.rows, of.context / 1024,
                of.captured ? ", captured"
                : of.graph  ? ""
                            : ", no graph",
                time.ms, bytes / 1e6, bytes / time.ms / 1e9, floor / time.ms);
    std::fflush(stdout);
    return time;
  }

  /// Does the cache fit beside the weights? Says so where it does not.
  bool has_room(const Decoding& of) const {
    constexpr std::int64_t kForOthers = std::int64_t{1} << 30;
    trim_pool(bench_.device());
    const std::int64_t bytes = DecodePass::pages_of(of) * kPageTokens * token_bytes();
    const std::int64_t free = device_memory(bench_.device()).free;
    if (bytes + kForOthers <= free) return true;
    std::printf("%-38s B %d, %dK tokens: the cache takes %.1f GB, %.1f GB are free\n", name_,
                of.rows, of.context / 1024, static_cast<double>(bytes) / 1e9,
                static_cast<double>(free) / 1e9);
    return false;
  }

  /// Of a token in all layers of the cache.
  std::int64_t token_bytes() const {
    return cache_layout(agreement_, kPageTokens)[0].k.page_bytes / kPageTokens;
  }

 private:
  static Agreement agreement(const ModelConfig& model, Contract contract) {
    if (contract.k.quantizes())
      contract.kv_exponents.assign(static_cast<std::size_t>(2 * model.num_layers), 0);
    return {.model = model,
            .contract = std::move(contract),
            .guide = {.mode = Guidance::kLsb,
                      .sites = {Site::kW13In},
                      .layers = LayerSet::range(0, model.num_layers),
                      .replay_experts = true}};
  }

  cuda::Bench& bench_;
  const char* name_;
  Agreement agreement_;
  OwnedStream stream_{bench_.device()};
  Forward forward_{agreement_, {}, bench_.device(), stream_};
  fixture::Discard sink_;
  Capture none_{agreement_, nullptr, false, bench_.device(), stream_};
  Capture all_{agreement_, &sink_, false, bench_.device(), stream_};
};

/// How many sequences of 64K and 128K tokens a cache of so many bytes holds, and the tokens a
/// second that they come to.
constexpr double kCacheBytes = 40e9;
constexpr std::int32_t kLong[] = {1 << 16, 1 << 17};

std::vector<double> long_contexts(Decoder& decoder) {
  std::vector<double> rates;
  for (const std::int32_t context : kLong) {
    const double each = static_cast<double>(decoder.token_bytes()) * context;
    const auto rows = static_cast<std::int32_t>(kCacheBytes / each);
    rates.push_back(rows / decoder.run({rows, context}).ms * 1e3);
    std::printf("  %d sequences of %dK in %.0f GB: %.0f tokens/s\n", rows, context / 1024,
                kCacheBytes / 1e9, rates.back());
  }
  return rates;
}

constexpr const char* kCodes = "decode nvfp4 (W4A4, FP4 cache)";

void decode_entry(cuda::Bench& bench) {
  bench.heading("a decoding pass of Qwen3-30B-A3B's 48 layers and head");
  const ModelConfig model = testing::qwen3_30b_a3b();
  const auto run = [&](const char* name, const Contract& contract,
                       const std::vector<Decoding>& cases) {
    Decoder decoder(bench, name, model, contract);
    for (const Decoding& of : cases) {
      if (decoder.has_room(of)) decoder.run(of);
    }
  };
  run(kCodes, contracts::lockstep(model.num_layers),
      {{1, 8192},
       {1, 8192, false, false},
       {8, 8192},
       {64, 8192},
       {64, 8192, true},
       {64, 8192, false, false},
       {128, 8192},
       {8, 65536},
       {8, 131072},
       {32, 65536}});
  run("decode bf16", contracts::bf16(),
      {{1, 8192}, {8, 8192}, {64, 8192}, {8, 65536}, {8, 131072}});
}

/// What FP4 is worth where memory, not time, says how many sequences there are.
void long_entry(cuda::Bench& bench) {
  bench.heading("decoding of long contexts in one amount of cache, 48 layers and head");
  const ModelConfig model = testing::qwen3_30b_a3b();
  const auto rates = [&](const char* name, const Contract& contract) {
    Decoder decoder(bench, name, model, contract);
    return long_contexts(decoder);
  };
  const std::vector<double> codes = rates(kCodes, contracts::lockstep(model.num_layers));
  const std::vector<double> plain = rates("decode bf16", contracts::bf16());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    std::printf("in %.0f GB of cache, %dK tokens: FP4 has %.2f times BF16's tokens a second\n",
                kCacheBytes / 1e9, kLong[i] / 1024, codes[i] / plain[i]);
  }
}

/// The host's time for a pass by layers: a graph is one call. Few experts, which change nothing of
/// what the host does.
void law_of_host(cuda::Bench& bench) {
  cuda::Law law = {.cost = "decode pass, the host's time", .size = "layers", .within = 0.1};
  law.slope = 0;
  for (const std::int32_t layers : {6, 12, 24, 48}) {
    ModelConfig model = testing::qwen3_30b_a3b();
    model.num_layers = layers;
    model.num_experts = 16;
    model.vocabulary = 4096;
    Decoder decoder(bench, "decode nvfp4", model, contracts::lockstep(layers));
    law.add(layers, decoder.run({64, 1024}).host_ms);
  }
  bench.judge(law);
}

const cuda::BenchEntry kHost("law_host", law_of_host);
const cuda::BenchEntry kDecode("whole_pass", decode_entry);
const cuda::BenchEntry kLongContexts("whole_pass_long", long_entry);

}  // namespace
}  // namespace lockstep::rollout
