/// The forward pass against one written for reading: plain loops, sums in double, BF16 where the
/// model rounds. Codes come from quantize() and dequantize(), which have tests of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>

#include "kernels/exact/dequantize.h"
#include "kernels/exact/residual.h"
#include "rollout/forward_experts.h"
#include "rollout/forward_fixture.h"

namespace lockstep::rollout {
namespace {

using Vector = std::vector<double>;

double rounded(double x) { return to_float(to_bf16(static_cast<float>(x))); }

class Reference {
 public:
  Reference(const Agreement& agreement, const Options& options,
            const std::vector<fixture::OwnedWeight>& weights)
      : agreement_(agreement), model_(agreement.model), options_(options) {
    for (const auto& w : weights) {
      Vector values;
      if (w.coded) {
        std::vector<float> worth(static_cast<std::size_t>(w.rows * w.cols));
        kernels::dequantize({.codes = w.code_view(),
                             .rule = agreement.contract.weight,
                             .f32 = {worth.data(), {w.rows, w.cols}, {w.cols, 1}}});
        values.assign(worth.begin(), worth.end());
      } else {
        for (const Bf16 x : w.plain) values.push_back(to_float(x));
      }
      weights_[w.id] = std::move(values);
    }
  }

  /// Logits of each token, [T, V].
  Vector run(const std::vector<Token>& tokens) {
    std::vector<Vector> h;
    for (const Token token : tokens) {
      const auto from = weight(WeightId::Role::kEmbedding).begin() + token * model_.hidden;
      h.emplace_back(from, from + model_.hidden);
    }
    for (layer_ = {0}; layer_.value < model_.num_layers; ++layer_.value) {
      attend(h);
      for (Vector& row : h) add(row, experts(norm(row, weight(WeightId::Role::kMlpNorm))));
    }
    Vector logits;
    layer_ = {};
    for (const Vector& row : h) {
      const auto part =
          times(weight(WeightId::Role::kHead), norm(row, weight(WeightId::Role::kFinalNorm)));
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
  }

 private:
  using Role = WeightId::Role;

  const Vector& weight(Role role, std::int32_t expert = 0) {
    return weights_.at({role, of_layer(role) ? layer_ : Layer{}, {expert}});
  }

  static Vector times(const Vector& w, const Vector& x) {
    Vector y;
    for (auto row = w.begin(); row != w.end(); row += static_cast<std::ptrdiff_t>(x.size())) {
      y.push_back(std::inner_product(x.begin(), x.end(), row, 0.0));
    }
    return y;
  }

  static Vector bf16(Vector x) {
    for (double& v : x) v = rounded(v);
    return x;
  }

  Vector norm(const Vector& x, const Vector& w) const {
    const double squares = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + model_.rms_eps);
    Vector y = x;
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = rounded(rounded(x[i] * scale) * w[i]);
    return y;
  }

  static void add(Vector& h, const Vector& x) {
    for (std::size_t i = 0; i < h.size(); ++i) h[i] = rounded(h[i] + rounded(x[i]));
  }

  /// Heads, normalized and turned to a position.
  Vector heads(const Vector& x, const Vector& w, std::size_t position) const {
    const auto dim = static_cast<std::size_t>(model_.head_dim);
    Vector out;
    for (auto head = x.begin(); head != x.end(); head += model_.head_dim) {
      const Vector y = norm(Vector(head, head + model_.head_dim), w);
      for (std::size_t c = 0; c < dim; ++c) {
        const std::size_t pair = c % (dim / 2);
        const double angle = static_cast<double>(position) *
                             std::pow(model_.rope_theta,
                                      -2.0 * static_cast<double>(pair) / static_cast<double>(dim));
        const double other = c < dim / 2 ? -y[c + dim / 2] : y[c - dim / 2];
        out.push_back(rounded(y[c] * std::cos(angle) + other * std::sin(angle)));
      }
    }
    return out;
  }

  /// What x is worth once quantized; with `residual`, less what the second pass takes back.
  Vector quantized(const Vector& x, Quantizer rule, std::int8_t exponent, bool residual) {
    if (rule.is_wide()) rule.block = std::min(rule.block, static_cast<std::int32_t>(x.size()));
    if (rule.element == Element::kBf16 || !agreement_.contract.layers.has(layer_)) return x;
    const auto cols = static_cast<std::int64_t>(x.size());
    std::vector<Bf16> values;
    for (const double v : x) values.push_back(to_bf16(static_cast<float>(v)));
    CodeRows codes, lost;
    const auto view = codes.view(1, cols, rule);
    const TensorView<const Bf16, 2> row = {values.data(), {1, cols}, {cols, 1}};
    kernels::quantize({.x = row, .rule = rule, .exponent = exponent, .out = view});
    std::vector<float> worth(x.size());
    const TensorView<float, 2> f32 = {worth.data(), {1, cols}, {cols, 1}};
    if (rule.global == GlobalScale::kStatic) *view.global.data = std::ldexp(1.0f, exponent);
    kernels::dequantize({.codes = view, .rule = rule, .f32 = f32});
    Vector result(worth.begin(), worth.end());
    if (!residual) return result;
    const auto second = lost.view(1, cols, rule);
    kernels::residual(
        {.x = row, .q = view, .per_mille = options_.residual_permille, .out = second});
    *second.global.data = *view.global.data / 4;
    kernels::dequantize({.codes = second, .rule = rule, .f32 = f32});
    for (std::size_t i = 0; i < result.size(); ++i) result[i] -= worth[i];
    return result;
  }

  void attend(std::vector<Vector>& h) {
    const Contract& contract = agreement_.contract;
    const auto dim = static_cast<std::size_t>(model_.head_dim);
    const auto exponent = [&](int which) {
      const auto at = static_cast<std::size_t>(2 * layer_.value + which);
      return at < contract.kv_exponents.size() ? contract.kv_exponents[at] : std::int8_t{0};
    };
    std::vector<Vector> q, k, v;
    for (std::size_t t = 0; t < h.size(); ++t) {
      const Vector x = norm(h[t], weight(Role::kAttentionNorm));
      q.push_back(heads(bf16(times(weight(Role::kQ), x)), weight(Role::kQNorm), t));
      k.push_back(quantized(heads(bf16(times(weight(Role::kK), x)), weight(Role::kKNorm), t),
                            contract.k, exponent(0), false));
      v.push_back(quantized(bf16(times(weight(Role::kV), x)), contract.v, exponent(1), false));
    }
    const auto group = static_cast<std::size_t>(model_.num_heads / model_.num_kv_heads);
    for (std::size_t t = 0; t < h.size(); ++t) {
      Vector out;
      for (std::size_t head = 0; head < static_cast<std::size_t>(model_.num_heads); ++head) {
        const std::size_t at = head / group * dim;
        Vector p;
        for (std::size_t j = 0; j <= t; ++j) {
          double score = 0;
          for (std::size_t c = 0; c < dim; ++c) score += q[t][head * dim + c] * k[j][at + c];
          p.push_back(score / std::sqrt(static_cast<double>(dim)));
        }
        const double top = *std::max_element(p.begin(), p.end());
        double total = 0;
        for (double& s : p) total += s = std::exp(s - top);
        for (std::size_t c = 0; c < dim; ++c) {
          double sum = 0;
          for (std::size_t j = 0; j <= t; ++j) sum += p[j] / total * v[j][at + c];
          out.push_back(rounded(sum));
        }
      }
      add(h[t], times(weight(Role::kO), out));
    }
  }

  Vector experts(const Vector& x) {
    const auto count = static_cast<std::size_t>(model_.num_experts);
    Vector p = times(weight(Role::kRouter), x);
    const double top = *std::max_element(p.begin(), p.end());
    double total = 0;
    for (double& s : p) total += s = std::exp(s - top);
    std::vector<std::size_t> order(count);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return p[a] > p[b]; });
    order.resize(static_cast<std::size_t>(model_.experts_per_token));
    double kept = 0;
    for (const std::size_t e : order) kept += p[e];
    const Quantizer& rule = agreement_.contract.activation;
    const Vector in = quantized(x, rule, 0, options_.residual != Residual::kNone);
    Vector out(x.size(), 0.0);
    for (const std::size_t e : order) {
      const auto expert = static_cast<std::int32_t>(e);
      const Vector both = times(weight(Role::kGateUp, expert), in);
      Vector middle;
      for (std::size_t i = 0; i < both.size() / 2; ++i) {
        const double gate = both[i], up = both[i + both.size() / 2];
        middle.push_back(rounded(gate / (1 + std::exp(-gate)) * up));
      }
      const Vector y = times(weight(Role::kDown, expert), quantized(middle, rule, 0, false));
      for (std::size_t i = 0; i < y.size(); ++i) out[i] += p[e] / kept * y[i];
    }
    return out;
  }

  Agreement agreement_;
  ModelConfig model_;
  Options options_;
  Layer layer_{};
  std::map<WeightId, Vector> weights_;
};

struct Arm {
  const char* name;
  double bound;  // of the root mean square difference, in that of the logits
};

class AgainstReference : public testing::TestWithParam<Arm> {};

// A rounding that falls the other way moves a BF16 number by 2^-8 of itself, and a code by up to a
// third of its block's greatest: the bounds leave room for a few of either. A wrong wire is of
// order one.
INSTANTIATE_TEST_SUITE_P(Forward, AgainstReference,
                         testing::Values(Arm{"bf16", 0.01}, Arm{"w4a16", 0.03}, Arm{"w4a4", 0.06},
                                         Arm{"quads", 0.06}, Arm{"mxfp4", 0.06}, Arm{"w4a8", 0.06},
                                         Arm{"fp8", 0.06}));

TEST_P(AgainstReference, LogitsAreThoseOfPlainLoops) {
  const std::string arm = GetParam().name;
  const ModelConfig model = fixture::small_model();
  Contract contract = fixture::w4a4_contract(model);
  Options options;
  if (arm == "bf16") contract = contracts::bf16();
  if (arm == "w4a16") contract.activation = {};
  if (arm == "quads") options.residual = Residual::kChannels;
  if (arm == "mxfp4") {
    contract = contracts::preset("mx-rceil", model.num_layers);
  }
  if (arm == "w4a8") {
    contract = contracts::preset("mx-rceil", model.num_layers);
    contract.activation = contracts::format("mxfp8", contracts::Tensor::kActivation);
  }
  if (arm == "fp8") {
    contract = contracts::preset("fp8", model.num_layers);
    contract.kv_exponents.assign(static_cast<std::size_t>(2 * model.num_layers), -5);
  }
  fixture::Runner runner(contract, options);
  const auto tokens = fixture::random_tokens(70, model, 2);
  const auto ours = runner.prefill(tokens, 70, 16);
  const auto exact = Reference(runner.agreement, options, runner.weights).run(tokens);
  ASSERT_EQ(ours.size(), exact.size());
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference += (ours[i] - exact[i]) * (ours[i] - exact[i]);
    size += exact[i] * exact[i];
  }
  const double relative = std::sqrt(difference / size);
  RecordProperty("relative", std::to_string(relative));
  std::cout << arm << ": relative difference " << relative << "\n";
  EXPECT_LT(relative, GetParam().bound);
}

}  // namespace
}  // namespace lockstep::rollout
