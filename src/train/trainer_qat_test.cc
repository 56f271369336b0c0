// What the trainer imitates and follows: replayed routes, quantized weights, the real product,
// records.
#include "train/trainer.h"
#include "train/trainer_fixture.h"

namespace lockstep::train {
namespace {

void add_paths(std::vector<Trajectory>& batch) {
  for (std::size_t i = 0; i < batch.size(); ++i) {
    batch[i].path = {{.id = SpanId{i + 1},
                      .first = 0,
                      .count = static_cast<std::int32_t>(batch[i].tokens.size()) - 1}};
  }
}

TEST_P(TrainerOn, R79_ReplayedRoutesCarryAGradientToTheRouter) {
  Agreement agreement;
  agreement.model = small_model();
  agreement.guide.replay_experts = true;
  std::vector<Trajectory> batch = random_batch(agreement.model, {21});
  add_paths(batch);
  FakeTrace trace;
  std::vector<Tensor> routes;
  std::mt19937_64 random(3);
  for (std::int32_t l = 0; l < agreement.model.num_layers; ++l) {
    routes.push_back(at::empty({20, 2}, at::kLong));
    for (const TokenKey& key : keys(batch[0])) {
      const auto a = static_cast<std::uint8_t>(random() % 6);
      const auto b = static_cast<std::uint8_t>((a + 1 + random() % 5) % 6);
      trace.put(key, {Layer{l}, Site::kRouter}, Encoding::kExperts8, {a, b});
      routes.back()[key.position][0] = a;
      routes.back()[key.position][1] = b;
    }
  }
  Weights weights = random_weights(agreement.model, 1);
  const auto trainer = make(agreement, reveals_gradient(), weights);
  std::vector<float> slope;
  trainer->accumulate(batch, &trace, [&](std::size_t i, auto logp, auto dlogp) {
    const double loss = some_loss(i, logp, dlogp);
    slope.assign(dlogp.begin(), dlogp.end());
    return loss;
  });
  trainer->update();
  const Metrics metrics = trainer->metrics();
  EXPECT_EQ(metrics.at("fp4/routes/absent_frac"), 0.0);
  EXPECT_GT(metrics.at("fp4/routes/mismatch_frac"), 0.3);
  const Weights gradient = minus(weights, take(trainer->weights()));

  for (auto& [id, w] : weights) w.requires_grad_(true);
  const Tensor plain = plain_logp(agreement.model, weights, batch[0], routes);
  for (std::size_t t = 0; t < slope.size(); ++t) {
    if (batch[0].response_mask[t] == 0) slope[t] = 0.0f;
  }
  plain.backward(at::from_blob(slope.data() + 1, {plain.numel()}, at::kFloat));
  for (const auto& [id, w] : weights) {
    EXPECT_LT(relative_error(gradient.at(id), w.grad()), 1e-3) << to_string(id);
    if (id.role == Role::kRouter) {
      EXPECT_GT(gradient.at(id).norm().item<float>(), 1e-4);
    }
  }
}

TEST_P(TrainerOn, R2_AnUpdateTakesTheExpertsOfTheOldPolicysPass) {
  Agreement agreement;
  agreement.model = small_model();
  const std::vector<Trajectory> batch = random_batch(agreement.model, {21, 9, 14});
  Options options;
  options.bf16 = false;
  options.lr = 0.3;  // far enough for routers to change their minds
  options.warmup_updates = 0;
  const Weights weights = random_weights(agreement.model, 1);
  const auto trainer = make(agreement, options, weights);
  Routes routes;
  const PerToken old = trainer->logprobs(batch, nullptr, &routes);
  ASSERT_EQ(routes[0].size(), 20u * 2 * 2);
  trainer->accumulate(
      batch, nullptr,
      [&](std::size_t i, auto logp, auto dlogp) {
        EXPECT_TRUE(std::ranges::equal(logp, old[i]));
        return some_loss(i, logp, dlogp);
      },
      &routes);
  trainer->update();
  EXPECT_EQ(trainer->metrics().at("fp4/routes/mismatch_frac"), 0);

  const Weights moved = take(trainer->weights());
  std::vector<Tensor> of_layer;
  for (int l = 0; l < 2; ++l) {
    of_layer.push_back(at::empty({20, 2}, at::kLong));
    for (int t = 0; t < 20; ++t) {
      for (int k = 0; k < 2; ++k) {
        of_layer[static_cast<std::size_t>(l)][t][k] =
            routes[0][static_cast<std::size_t>((t * 2 + l) * 2 + k)];
      }
    }
  }
  const Tensor plain = plain_logp(agreement.model, moved, batch[0], of_layer);
  trainer->accumulate(
      batch, nullptr,
      [&](std::size_t i, auto logp, auto dlogp) {
        for (std::size_t t = 8; i == 0 && t < 21; ++t) {
          EXPECT_NEAR(logp[t], plain[static_cast<std::int64_t>(t) - 1].item<float>(), 1e-3);
        }
        return some_loss(i, logp, dlogp);
      },
      &routes);
  trainer->update();
  EXPECT_GT(trainer->metrics().at("fp4/routes/mismatch_frac"), 0);

  routes[1].pop_back();
  EXPECT_THROW(trainer->accumulate(batch, nullptr, some_loss, &routes), Error);
}

/// What the routed experts compute with.
Weights fake_quantized(const Weights& weights, const Quantizer& rule) {
  Weights out;
  for (const auto& [id, w] : weights) {
    out[id] = w.clone();
    if (!of_expert(id.role)) continue;
    const std::int64_t rows = w.size(0), cols = w.size(1), blocks = cols / rule.block;
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(w.numel() / 2));
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows * blocks));
    float global = 0.0f;
    const PackedView<std::uint8_t> packed = {
        .codes = {codes.data(), {rows, cols / 2}, {cols / 2, 1}},
        .scales = {scales.data(), {rows, blocks}, {blocks, 1}},
        .global = {&global, {rows}, {0}}};
    kernels::quantize_weight({w.data_ptr<float>(), {rows, cols}, {cols, 1}}, rule, packed);
    kernels::dequantize({.codes = packed,
                         .rule = rule,
                         .f32 = {out[id].data_ptr<float>(), {rows, cols}, {cols, 1}}});
  }
  return out;
}

TEST_P(TrainerOn, R22_WeightsLearnThroughTheirQuantizedValues) {
  Agreement agreement;
  agreement.model = small_model();
  agreement.contract = contracts::lockstep(agreement.model.num_layers);
  const std::vector<Trajectory> batch = random_batch(agreement.model, {21});
  const Weights masters = random_weights(agreement.model, 1);
  const auto trainer = make(agreement, reveals_gradient(), masters, {.weights = true});
  std::vector<float> slope;
  trainer->accumulate(batch, nullptr, [&](std::size_t i, auto logp, auto dlogp) {
    const double loss = some_loss(i, logp, dlogp);
    slope.assign(dlogp.begin(), dlogp.end());
    return loss;
  });
  trainer->update();
  const Weights gradient = minus(masters, take(trainer->weights()));

  // The gradient at the quantized values is the masters'.
  Weights leaves = fake_quantized(masters, agreement.contract.weight);
  for (auto& [id, w] : leaves) w.requires_grad_(true);
  const Tensor plain = plain_logp(agreement.model, leaves, batch[0]);
  for (std::size_t t = 0; t < slope.size(); ++t) {
    if (batch[0].response_mask[t] == 0) slope[t] = 0.0f;
  }
  plain.backward(at::from_blob(slope.data() + 1, {plain.numel()}, at::kFloat));
  for (const auto& [id, w] : leaves) {
    EXPECT_LT(relative_error(gradient.at(id), w.grad()), 1e-3) << to_string(id);
    if (of_expert(id.role)) {
      EXPECT_FALSE(w.equal(masters.at(id))) << to_string(id);
    }
  }
}

class TrainerGuided : public TrainerTest,
                      public ::testing::WithParamInterface<std::tuple<Guidance, Device>> {
 protected:
  void SetUp() override { device_ = std::get<1>(GetParam()); }
  static Guidance mode() { return std::get<0>(GetParam()); }
};

TEST_P(TrainerGuided, EveryPassReadsTheSameRecords) {
  Agreement agreement;
  agreement.model = small_model();
  agreement.contract = contracts::lockstep(agreement.model.num_layers);
  agreement.contract.kv_exponents.assign(4, -9);
  agreement.guide = {.mode = mode(),
                     .sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV},
                     .layers = LayerSet::range(1, 2),
                     .replay_experts = true,
                     .audit_every = 4};
  const Qat qat = {.weights = true, .activations = true, .k = true, .v = true};
  std::vector<Trajectory> batch = random_batch(agreement.model, {30, 12, 31, 8, 25});
  add_paths(batch);
  const RandomTrace trace(6);
  std::vector<Weights> after;
  for (const bool recompute : {false, true}) {
    Options options;
    options.lr = 1e-3;
    options.recompute = recompute;
    options.tokens_per_pass = 50;
    const auto trainer = make(agreement, options, random_weights(agreement.model, 3), qat);
    const PerToken old = trainer->logprobs(batch, &trace);
    trainer->accumulate(batch, &trace, [&](std::size_t i, auto logp, auto dlogp) {
      EXPECT_TRUE(std::ranges::equal(logp, old[i])) << i;
      return some_loss(i, logp, dlogp);
    });
    trainer->update();
    const Metrics metrics = trainer->metrics();
    after.push_back(take(trainer->weights()));

    const bool follows = mode() != Guidance::kOwnScale;
    EXPECT_EQ(metrics.contains("fp4/guide/covered_frac/k"), follows);
    if (follows) {
      EXPECT_EQ(metrics.at("fp4/guide/covered_frac"), 1.0);
    }
    EXPECT_GT(metrics.at("fp4/act/flip_frac"), 0.5);  // nothing in common with those codes
    if (mode() == Guidance::kFullForced) {
      EXPECT_EQ(metrics.at("fp4/kv/residual_frac/layer_1"), 0.0);
      EXPECT_GT(metrics.at("fp4/kv/residual_frac/layer_0"), 0.1);
    }
    // Without a trace the numbers are others.
    EXPECT_NE(trainer->logprobs(batch, nullptr), trainer->logprobs(batch, &trace));
  }
  for (const auto& [id, w] : after[0]) EXPECT_TRUE(w.equal(after[1].at(id))) << to_string(id);
}

INSTANTIATE_TEST_SUITE_P(
    Modes, TrainerGuided,
    ::testing::Combine(::testing::Values(Guidance::kOwnScale, Guidance::kRolloutScale,
                                         Guidance::kLsbScaleMod4, Guidance::kLsb,
                                         Guidance::kFullGuided, Guidance::kFullForced),
                       ::testing::ValuesIn(trainer_devices())));

TEST_F(TrainerTest, RefusesWhatItCannotTrainOn) {
  Agreement agreement;
  agreement.model = small_model();
  Trainer empty(agreement, {}, {}, Device{}, *comm_);
  std::vector<Trajectory> batch = random_batch(agreement.model, {12});
  EXPECT_THROW(empty.logprobs(batch, nullptr), Error);  // no weights yet
  Weights weights = random_weights(agreement.model, 1);
  weights.begin()->second[0][0] = NAN;
  EXPECT_THROW(give(weights, agreement.model, empty.initial_weights()), Error);

  const auto trainer = make(agreement, {}, random_weights(agreement.model, 1));
  batch[0].tokens[3] = agreement.model.vocabulary;
  EXPECT_THROW(trainer->logprobs(batch, nullptr), Error);
  batch = random_batch(agreement.model, {66});
  EXPECT_THROW(trainer->logprobs(batch, nullptr), Error);
  batch = random_batch(agreement.model, {12});
  batch[0].response_mask.pop_back();
  EXPECT_THROW(trainer->logprobs(batch, nullptr), Error);
  batch = random_batch(agreement.model, {12});  // R74: 11 records, or 12
  for (const int count : {10, 11, 12, 13}) {
    batch[0].path = {{.id = SpanId{1}, .first = 0, .count = count}};
    if (count == 11 || count == 12) {
      EXPECT_NO_THROW(trainer->logprobs(batch, nullptr));
    } else {
      EXPECT_THROW(trainer->logprobs(batch, nullptr), Error);
    }
  }
}

}  // namespace
}  // namespace lockstep::train
