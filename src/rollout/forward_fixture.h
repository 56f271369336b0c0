/// For tests: a small random model, a cache to run it on, and passes over it.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "contract/contract.h"
#include "device/stream.h"
#include "device/testing.h"
#include "kernels/exact/quantize.h"
#include "model/names.h"
#include "numerics/bf16.h"
#include "record/trace.h"
#include "rollout/capture.h"
#include "rollout/forward.h"

namespace lockstep::rollout::fixture {

/// Takes everything and keeps nothing: what a sink costs is the store's to measure.
class Discard final : public TraceSink {
 public:
  void open(const Span&, ContractId) override {}
  bool admits(std::int64_t) const override { return true; }
  void append(std::span<const TokenKey>, Rows<const std::byte> rows) override {
    bytes += static_cast<std::int64_t>(rows.bytes.size());
  }
  void truncate(SpanId, std::int32_t) override {}
  void seal(SpanId) override {}
  std::int64_t bytes = 0;
};

/// Where runners, caches and rigs lie: the CPU but in tests of OnDevice.
inline Device& device_under_test() {
  static Device device;
  return device;
}

/// Runs a body on every device.
class OnDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override { device_under_test() = GetParam(); }
  void TearDown() override { device_under_test() = {}; }
  static bool on_cuda() { return device_under_test().kind == Device::Kind::kCuda; }
};

inline ModelConfig small_model() {
  return {.num_layers = 3,
          .hidden = 64,
          .expert_width = 32,
          .num_experts = 6,
          .experts_per_token = 2,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 32,
          .vocabulary = 50,
          .max_positions = 512,
          .rope_theta = 1e4};
}

inline Contract w4a4_contract(const ModelConfig& model) {
  Contract contract = contracts::lockstep(model.num_layers);
  contract.kv_exponents.assign(static_cast<std::size_t>(2 * model.num_layers), -6);
  return contract;
}

/// One weight as a sink takes it, with the memory behind it.
struct OwnedWeight {
  WeightId id;
  std::int64_t rows = 0, cols = 0;
  std::int64_t bands = 0;  // rows of scales
  std::vector<Bf16> plain;
  std::vector<std::uint8_t> codes, scales, mantissas{};
  float global = 1.0f;
  bool coded = false;

  TensorView<const Bf16, 2> plain_view() const { return {plain.data(), {rows, cols}, {cols, 1}}; }
  PackedView<const std::uint8_t> code_view() const {
    const std::int64_t bytes = static_cast<std::int64_t>(codes.size()) / rows;
    const std::int64_t blocks = static_cast<std::int64_t>(scales.size()) / bands;
    return {{codes.data(), {rows, bytes}, {bytes, 1}},
            {scales.data(), {bands, blocks}, {blocks, 1}},
            {&global, {rows}, {0}},
            mantissa_view(mantissas.data())};
  }
  template <typename T>
  TensorView<T, 2> mantissa_view(T* data) const {
    const std::int64_t width = static_cast<std::int64_t>(mantissas.size()) / rows;
    return width == 0 ? TensorView<T, 2>{} : TensorView<T, 2>{data, {rows, width}, {width, 1}};
  }
  Weight weight() const {
    if (coded) return {id, code_view()};
    return {id, plain_view()};
  }
};

/// All weights of a model, random, under a contract.
inline std::vector<OwnedWeight> random_weights(const Agreement& agreement, std::uint32_t seed) {
  const ModelConfig& model = agreement.model;
  const Contract& contract = agreement.contract;
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss;
  std::vector<OwnedWeight> weights;
  for (const WeightId& id : weight_ids(model)) {
    OwnedWeight w{.id = id, .plain = {}, .codes = {}, .scales = {}};
    const auto shape = weight_shape(model, id.role);
    w.rows = shape[0];
    w.cols = shape[1];
    const bool norm = shape[0] == 1;
    const float spread = norm ? 0.1f : 1.0f / std::sqrt(static_cast<float>(w.cols));
    for (std::int64_t i = 0; i < w.rows * w.cols; ++i) {
      w.plain.push_back(to_bf16((norm ? 1.0f : 0.0f) + spread * gauss(random)));
    }
    w.coded = of_expert(id.role) && contract.layers.has(id.layer) &&
              contract.weight.element != Element::kBf16;
    if (w.coded) {
      std::vector<float> master;
      for (const Bf16 x : w.plain) master.push_back(to_float(x));
      const Quantizer& rule = contract.weight;
      const std::int64_t bytes = rule.code_bytes(w.cols);
      const std::int64_t bands = w.bands = rule.scale_rows(w.rows);
      const std::int64_t blocks = rule.scale_cols(w.cols);
      w.codes.resize(static_cast<std::size_t>(w.rows * bytes));
      w.scales.resize(static_cast<std::size_t>(bands * blocks));
      w.mantissas.resize(static_cast<std::size_t>(w.rows * rule.macro_cols(w.cols)));
      const PackedView<std::uint8_t> out = {{w.codes.data(), {w.rows, bytes}, {bytes, 1}},
                                            {w.scales.data(), {bands, blocks}, {blocks, 1}},
                                            {&w.global, {1}, {0}},
                                            w.mantissa_view(w.mantissas.data())};
      kernels::quantize_weight({master.data(), shape, {w.cols, 1}}, contract.weight, out);
    }
    weights.push_back(std::move(w));
  }
  return weights;
}

inline std::vector<std::uint32_t> load(WeightSink& sink, const std::vector<OwnedWeight>& weights,
                                       const Contract& contract, std::int64_t version = 1) {
  sink.begin({version}, contract.id());
  for (const OwnedWeight& w : weights) sink.put(w.weight());
  return sink.commit();
}

/// Pages of a few sequences, filled with 0xFF so that what is read before it is written shows.
class Cache {
 public:
  Cache(const Agreement& agreement, std::int32_t page_tokens, std::int32_t num_pages)
      : page_tokens_(page_tokens) {
    const ModelConfig& model = agreement.model;
    std::int64_t offset = 0;
    for (std::int32_t layer = 0; layer < model.num_layers; ++layer) {
      LayerKv kv;
      for (kernels::PagedKv* one : {&kv.k, &kv.v}) {
        const bool is_k = one == &kv.k;
        const Contract& contract = agreement.contract;
        one->rule = is_k ? contract.k : contract.v;
        if (!contract.layers.has({layer})) one->rule = {};
        const std::int32_t width = model.kv_width();
        one->row_bytes = one->rule.quantizes()
                             ? static_cast<std::int32_t>(one->rule.code_bytes(width) +
                                                         one->rule.scale_cols(width))
                             : 2 * width;
        if (!contract.kv_exponents.empty()) {
          one->exponent = contract.kv_exponents[static_cast<std::size_t>(2 * layer + !is_k)];
        }
        one->page_tokens = page_tokens;
        one->offset = offset;
        offset += page_tokens * one->row_bytes;
      }
      layers_.push_back(kv);
    }
    pool_ = Buffer(device_under_test(), offset * num_pages);
    fill_bytes(pool_.as<void>(), pool_.device(), 0xFF, pool_.bytes());
    synchronize(pool_.device());
    for (LayerKv& kv : layers_) {
      kv.k.pool = kv.v.pool = pool_.as<>();
      kv.k.page_bytes = kv.v.page_bytes = offset;
    }
    // Pages are handed out from both ends in turn, so that no sequence's lie in order.
    for (std::int32_t page = 0; page < num_pages; ++page) {
      free_.push_back(page % 2 == 0 ? page / 2 : num_pages - 1 - page / 2);
    }
  }

  /// Pages for so many tokens of a sequence.
  void hold(std::size_t sequence, std::int32_t tokens) {
    if (tables_.size() <= sequence) tables_.resize(sequence + 1);
    while (static_cast<std::int32_t>(tables_[sequence].size()) * page_tokens_ < tokens) {
      tables_[sequence].push_back(free_.back());
      free_.pop_back();
    }
  }

  std::span<const LayerKv> layers() const { return layers_; }
  const std::vector<std::vector<std::int32_t>>& tables() const { return tables_; }
  std::vector<std::byte> pool() const { return to_host<std::byte>(pool_); }

 private:
  std::int32_t page_tokens_;
  std::vector<LayerKv> layers_;
  Buffer pool_;
  std::vector<std::int32_t> free_;
  std::vector<std::vector<std::int32_t>> tables_;
};

/// Tokens first..end-1 of a sequence in a pass, all logits wanted.
inline void add_rows(Pass& pass, std::int32_t sequence, const std::vector<Token>& tokens,
                     std::int32_t first, std::int32_t end) {
  for (std::int32_t t = first; t < end; ++t) {
    pass.wanted.push_back(static_cast<std::int32_t>(pass.tokens.size()));
    pass.tokens.push_back(tokens[static_cast<std::size_t>(t)]);
    pass.positions.push_back(t);
    pass.keys.push_back({SpanId{static_cast<std::uint64_t>(sequence) + 77}, t});
    pass.sequence.push_back(sequence);
  }
}

/// A model with weights, ready to run.
struct Runner {
  Agreement agreement;
  Options options;
  std::vector<OwnedWeight> weights;
  Device device = device_under_test();
  OwnedStream stream{device};
  Forward forward;
  Capture capture;

  explicit Runner(const Contract& contract, Options opts = {},
                  const ModelConfig& model = small_model())
      : agreement{.model = model, .contract = contract, .guide = {}, .seed = 5},
        options(opts),
        weights(random_weights(agreement, 3)),
        forward(agreement, options, device, stream),
        capture(agreement, nullptr, false, device, stream) {
    load(forward.weights(), weights, contract);
  }

  /// Logits [rows, V] of a pass.
  std::vector<float> run(Pass& pass, Cache& cache) {
    pass.pages.clear();
    for (const auto& table : cache.tables()) pass.pages.push_back(table);
    capture.begin(pass);
    const auto logits = forward.run(pass, cache.layers(), capture);
    forward.finish();
    std::vector<float> values(static_cast<std::size_t>(logits.shape[0] * logits.shape[1]));
    copy_bytes(values.data(), {}, logits.data, device, std::ssize(values) * 4, stream);
    synchronize(device, stream);
    return values;
  }

  /// Logits of every token of sequence 0, `chunk` tokens a pass.
  std::vector<float> prefill(const std::vector<Token>& tokens, std::int32_t chunk,
                             std::int32_t page_tokens) {
    const auto count = static_cast<std::int32_t>(tokens.size());
    Cache cache(agreement, page_tokens, count / page_tokens + 1);
    cache.hold(0, count);
    std::vector<float> all;
    for (std::int32_t first = 0; first < count; first += chunk) {
      Pass pass;
      add_rows(pass, 0, tokens, first, std::min(count, first + chunk));
      const auto logits = run(pass, cache);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }
};

inline std::vector<Token> random_tokens(std::int32_t count, const ModelConfig& model,
                                        std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Token> tokens;
  for (std::int32_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<Token>(random() % static_cast<std::uint32_t>(model.vocabulary)));
  }
  return tokens;
}

}  // namespace lockstep::rollout::fixture
