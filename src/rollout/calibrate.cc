#include "rollout/calibrate.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/residual.h"
#include "numerics/scale.h"
#include "rollout/capture.h"
#include "rollout/engine.h"
#include "rollout/forward.h"
#include "rollout/kv_cache.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kTokensPerPass = 2048;  // or one sequence
constexpr std::int32_t kPageTokens = 16;

void hand_over(const Weight& weight, WeightSink& sink) {
  const auto* master = std::get_if<TensorView<const float, 2>>(&weight.value);
  if (master == nullptr) return sink.put(weight);
  const std::int64_t rows = master->shape[0], cols = master->shape[1];
  std::vector<Bf16> rounded(static_cast<std::size_t>(rows * cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      rounded[static_cast<std::size_t>(r * cols + c)] =
          to_bf16(master->data[r * master->stride[0] + c * master->stride[1]]);
    }
  }
  sink.put(
      {weight.id, TensorView<const Bf16, 2>{rounded.data(), {rows, cols}, {cols, 1}, Device{}}});
}

/// The largest magnitude of `count` rows that start at `first` in a page.
float amax(const std::byte* first, std::int64_t count, std::int32_t row_bytes) {
  std::uint16_t most = 0;
  for (std::int64_t i = 0; i < count * row_bytes; i += 2) {
    std::uint16_t bits;
    std::memcpy(&bits, first + i, sizeof bits);
    most = std::max<std::uint16_t>(most, bits & 0x7fff);
  }
  return to_float(static_cast<Bf16>(most));
}

/// One pass over whole sequences; raises `most` [L, 2] to what the cache then shows.
void read(Forward& forward, const Agreement& agreement,
          std::span<const std::vector<Token>> sequences, std::vector<float>& most) {
  std::vector<std::vector<std::int32_t>> tables;
  std::int32_t pages = 0;
  for (const std::vector<Token>& tokens : sequences) {
    std::vector<std::int32_t>& table = tables.emplace_back();
    for (std::size_t i = 0; i < tokens.size(); i += kPageTokens) table.push_back(pages++);
  }
  std::vector<LayerKv> cache = cache_layout(agreement, kPageTokens);
  const auto pool =
      std::make_unique<std::byte[]>(static_cast<std::size_t>(pages * cache[0].k.page_bytes));
  for (LayerKv& layer : cache) layer.k.pool = layer.v.pool = pool.get();

  Pass pass;
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    pass.pages.push_back(tables[s]);
    for (std::size_t i = 0; i < sequences[s].size(); ++i) {
      const auto position = static_cast<std::int32_t>(i);
      pass.tokens.push_back(sequences[s][i]);
      pass.positions.push_back(position);
      pass.keys.push_back({SpanId{s}, position});
      pass.sequence.push_back(static_cast<std::int32_t>(s));
    }
  }
  Capture nothing(agreement, nullptr);
  forward.run(pass, cache, nothing);

  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const auto count = static_cast<std::int32_t>(sequences[s].size());
    for (std::int32_t first = 0; first < count; first += kPageTokens) {
      const std::int64_t rows = std::min(kPageTokens, count - first);
      for (std::size_t i = 0; i < most.size(); ++i) {
        const kernels::PagedKv& kv = i % 2 == 0 ? cache[i / 2].k : cache[i / 2].v;
        most[i] = std::max(most[i], amax(kv.row(tables[s], first), rows, kv.row_bytes));
      }
    }
  }
}

void check_batch(const ModelConfig& model, std::span<const std::vector<Token>> batch) {
  if (batch.empty()) throw Error("the calibration batch is empty: give it sequences");
  for (std::size_t s = 0; s < batch.size(); ++s) {
    if (batch[s].empty() || static_cast<std::int64_t>(batch[s].size()) > model.max_positions) {
      throw Error(cat({"calibration sequence ", s, " has ", batch[s].size(),
                       " tokens, expected 1 to ", model.max_positions}));
    }
    for (const Token token : batch[s]) {
      if (token >= 0 && token < model.vocabulary) continue;
      throw Error(cat({"calibration sequence ", s, " has token ", token, ", the vocabulary has ",
                       model.vocabulary}));
    }
  }
}

}  // namespace

void calibrate(const CalibrationArgs& args) {
  check_batch(args.model, args.batch);
  const Agreement agreement = {
      .model = args.model, .contract = contracts::bf16(), .guide = {}, .seed = 0};
  Forward forward(agreement, Options{}, Device{});
  forward.weights().begin(WeightVersion{0}, agreement.contract.id());
  args.weights.each([&](const Weight& weight) { hand_over(weight, forward.weights()); });
  forward.weights().commit();
  forward.observe(args.observer);

  std::vector<float> most(static_cast<std::size_t>(2 * args.model.num_layers), 0.0f);
  for (std::size_t first = 0; first < args.batch.size();) {
    std::size_t end = first;
    for (std::int64_t tokens = 0;
         end < args.batch.size() && (end == first || tokens < kTokensPerPass); ++end) {
      tokens += static_cast<std::int64_t>(args.batch[end].size());
    }
    read(forward, agreement, args.batch.subspan(first, end - first), most);
    first = end;
  }
  if (args.kv_amax != nullptr) *args.kv_amax = std::move(most);
}

std::vector<std::int8_t> calibrate_kv(const ModelConfig& model, const WeightSource& weights,
                                      std::span<const std::vector<Token>> batch,
                                      const Contract& contract) {
  std::vector<float> most;
  calibrate({.model = model, .weights = weights, .batch = batch, .kv_amax = &most});
  std::vector<std::int8_t> exponents;
  for (std::size_t i = 0; i < most.size(); ++i) {
    const Quantizer& rule = i % 2 == 0 ? contract.k : contract.v;
    exponents.push_back(static_cast<std::int8_t>(kv_exponent(rule, most[i])));
  }
  return exponents;
}

std::vector<std::uint8_t> calibrate_residual(const ModelConfig& model, const Contract& contract,
                                             const Options& options, const WeightSource& weights,
                                             std::span<const std::vector<Token>> batch) {
  const std::int64_t d = model.hidden / 16, f = model.expert_width / 16;
  std::vector<double> scores(static_cast<std::size_t>(model.num_layers * (d + f)));
  const auto add = [&](const ExpertInputs& inputs) {
    const auto [rows, cols] = inputs.x.shape;
    CodeRows codes;
    const auto packed = codes.view(rows, cols, contract.activation);
    kernels::quantize({.x = inputs.x, .rule = contract.activation, .out = packed});
    const std::vector<float> more =
        kernels::residual_scores({.x = inputs.x, .q = packed, .out = {}});
    const std::int64_t first = inputs.layer.value * (d + f) + (inputs.site == Site::kW2In ? d : 0);
    for (std::size_t g = 0; g < more.size(); ++g) {
      scores[static_cast<std::size_t>(first) + g] += static_cast<double>(more[g]);
    }
  };
  calibrate({.model = model, .weights = weights, .batch = batch, .observer = add});

  std::vector<std::uint8_t> chosen;
  const auto pattern = options.residual == Residual::kBlocks ? kernels::ResidualPattern::kBlocks
                                                             : kernels::ResidualPattern::kChannels;
  for (std::size_t at = 0; at < scores.size();) {
    for (const std::int64_t groups : {d, f}) {
      const auto part = std::span(scores).subspan(at, static_cast<std::size_t>(groups));
      const std::vector<float> sums(part.begin(), part.end());
      const std::vector<std::uint8_t> own =
          kernels::choose_groups(sums, pattern, options.residual_permille);
      chosen.insert(chosen.end(), own.begin(), own.end());
      at += static_cast<std::size_t>(groups);
    }
  }
  return chosen;
}

std::map<WeightId, std::vector<double>> calibrate_inputs(
    const ModelConfig& model, const WeightSource& weights,
    std::span<const std::vector<Token>> batch) {
  using Role = WeightId::Role;
  std::map<WeightId, std::vector<double>> squares;
  for (std::int32_t l = 0; l < model.num_layers; ++l) {
    for (std::int32_t e = 0; e < model.num_experts; ++e) {
      squares[{Role::kGateUp, {l}, {e}}].resize(static_cast<std::size_t>(model.hidden));
      squares[{Role::kDown, {l}, {e}}].resize(static_cast<std::size_t>(model.expert_width));
    }
  }
  const auto add = [&](const ExpertInputs& inputs) {
    const Role role = inputs.site == Site::kW13In ? Role::kGateUp : Role::kDown;
    for (std::int32_t e = 0; e < model.num_experts; ++e) {
      std::vector<double>& sums = squares.at({role, inputs.layer, {e}});
      const auto at = static_cast<std::size_t>(e);
      for (std::int32_t i = inputs.offsets[at]; i < inputs.offsets[at + 1]; ++i) {
        const Bf16* x =
            inputs.x.data + inputs.from[static_cast<std::size_t>(i)] * inputs.x.stride[0];
        for (std::size_t c = 0; c < sums.size(); ++c) {
          const auto value = static_cast<double>(to_float(x[c]));
          sums[c] += value * value;
        }
      }
    }
  };
  calibrate({.model = model, .weights = weights, .batch = batch, .observer = add});
  return squares;
}

}  // namespace lockstep::rollout
