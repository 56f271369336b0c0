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
      pass.tokens.push_back(row * 1009 % 151936);
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

double median_ms(Forward& forward, const Pass& pass, std::span<const LayerKv> cache,
                 Capture& capture) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {  // the first ones find memory and note the graph
    const auto began = Clock::now();
    capture.begin(pass);
    forward.run(pass, cache, capture);
    capture.flush();  // of the pass before
    capture.send();
    forward.finish();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - began).count());
  }
  capture.flush();
  times.erase(times.begin(), times.begin() + 4);
  std::nth_element(times.begin(), times.begin() + 5, times.end());
  return times[5];
}

void decode(cuda::Bench& bench, const char* name, Contract contract,
            const std::vector<Decoding>& cases) {
  const ModelConfig model = testing::qwen3_30b_a3b();
  if (contract.k.quantizes())
    contract.kv_exponents.assign(static_cast<std::size_t>(2 * model.num_layers), 0);
  Agreement agreement = {.model = model, .contract = contract, .guide = {}};
  agreement.guide = {.mode = Guidance::kLsb,
                     .sites = {Site::kW13In},
                     .layers = LayerSet::range(0, model.num_layers),
                     .replay_experts = true};
  const OwnedStream stream(bench.device());
  Forward forward(agreement, {}, bench.device(), stream);
  {
    MadeUp weights(bench, agreement.model, contract);
    WeightSink& sink = forward.weights();
    sink.begin(WeightVersion{1}, contract.id());
    for (const WeightId& id : weight_ids(agreement.model)) sink.put(weights.weight(id));
    sink.commit();
  }
  fixture::Discard sink;
  Capture none(agreement, nullptr, false, bench.device(), stream);
  Capture all(agreement, &sink, false, bench.device(), stream);
  for (const Decoding& of : cases) {
    const MadeUpCache cache(bench, agreement, DecodePass::pages_of(of));
    const DecodePass decode(of);
    const double ms = median_ms(forward, decode.pass, cache.layers(), of.captured ? all : none);
    const double bytes = bytes_of(agreement.model, contract, of, cache.token_bytes());
    const double floor = bytes / bench.ceilings().read * 1e3;
    std::printf("%-38s B %d, %dK tokens%s %8.2f ms %8.0f MB %6.3f TB/s  floor %.3f\n", name,
                of.rows, of.context / 1024,
                of.captured ? ", captured"
                : of.graph  ? ""
                            : ", no graph",
                ms, bytes / 1e6, bytes / ms / 1e9, floor / ms);
    std::fflush(stdout);
  }
}

void decode_entry(cuda::Bench& bench) {
  bench.heading("a decoding pass of Qwen3-30B-A3B's 48 layers and head");
  const std::int32_t layers = testing::qwen3_30b_a3b().num_layers;
  decode(bench, "decode nvfp4 (W4A4, FP4 cache)", contracts::lockstep(layers),
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
  decode(bench, "decode bf16", contracts::bf16(),
         {{1, 8192}, {8, 8192}, {64, 8192}, {8, 65536}, {8, 131072}});
}

const cuda::BenchEntry kDecode("whole_pass", decode_entry);

}  // namespace
}  // namespace lockstep::rollout
