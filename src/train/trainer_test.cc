#include "train/trainer.h"

#include "train/trainer_fixture.h"

namespace lockstep::train {
namespace {

class TrainerGradient : public TrainerTest,
                        public ::testing::WithParamInterface<std::tuple<bool, Device>> {
 protected:
  void SetUp() override { device_ = std::get<1>(GetParam()); }
  static bool tied() { return std::get<0>(GetParam()); }
};

TEST_P(TrainerGradient, EqualsAutograd) {
  Agreement agreement;
  agreement.model = small_model(tied());
  agreement.model.normalize_gates = !tied();
  const std::vector<Trajectory> batch = random_batch(agreement.model, {11, 5, 23, 2, 16});
  Weights weights = random_weights(agreement.model, 1);
  const auto trainer = make(agreement, reveals_gradient(), weights);
  const PerToken logp = trainer->logprobs(batch, nullptr);
  const double loss = trainer->accumulate(batch, nullptr, some_loss);
  trainer->update();
  const Weights gradient = minus(weights, take(trainer->weights()));

  for (auto& [id, w] : weights) w.requires_grad_(true);
  double expected_loss = 0.0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Tensor plain = plain_logp(agreement.model, weights, batch[i]);
    std::vector<float> expected(batch[i].tokens.size(), 0.0f), slope(expected);
    for (std::size_t t = 1; t < expected.size(); ++t) {
      if (batch[i].response_mask[t] == 0) continue;
      expected[t] = plain[static_cast<std::int64_t>(t) - 1].item<float>();
      EXPECT_NEAR(logp[i][t], expected[t], 2e-5) << i << " " << t;
    }
    expected_loss += some_loss(i, expected, slope);
    for (std::size_t t = 0; t < slope.size(); ++t) {
      if (batch[i].response_mask[t] == 0) slope[t] = 0.0f;
    }
    plain.backward(at::from_blob(slope.data() + 1, {plain.numel()}, at::kFloat));
  }
  EXPECT_NEAR(loss, expected_loss, 1e-3);
  for (const auto& [id, w] : weights) {
    EXPECT_LT(relative_error(gradient.at(id), w.grad()), 1e-3) << to_string(id);
  }
}

TEST_P(TrainerGradient, OfTopTokensEqualsAutograd) {
  constexpr std::int64_t kTop = 3;
  Agreement agreement;
  agreement.model = small_model(tied());
  std::vector<Trajectory> batch = random_batch(agreement.model, {11, 5, 16});
  for (Trajectory& t : batch) {
    for (std::size_t i = 0; i < t.tokens.size() * kTop; ++i) {
      t.top_tokens.push_back(static_cast<Token>(i * 7 % 40));
    }
    t.top_tokens[5 * kTop / 2] = t.tokens[2];  // one that was drawn as well
  }
  Weights weights = random_weights(agreement.model, 1);
  const auto trainer = make(agreement, reveals_gradient(), weights);
  PerToken seen(batch.size()), top_slopes(batch.size());
  trainer->accumulate(batch, nullptr, [&](std::size_t i, const LogProbs& p, const Slopes& d) {
    seen[i].assign(p.top.begin(), p.top.end());
    for (std::size_t j = 0; j < p.top.size(); ++j) {
      d.top[j] = static_cast<float>(std::sin(static_cast<double>(j + i)));
    }
    top_slopes[i].assign(d.top.begin(), d.top.end());
    return some_loss(i, p, d);
  });
  trainer->update();
  const Weights gradient = minus(weights, take(trainer->weights()));

  for (auto& [id, w] : weights) w.requires_grad_(true);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto length = static_cast<std::int64_t>(batch[i].tokens.size());
    const Tensor all = plain_log_softmax(agreement.model, weights, batch[i]);
    const Tensor own = at::zeros({length - 1, agreement.model.vocabulary});
    std::vector<float> logp(batch[i].tokens.size()), slope(logp);
    for (std::size_t t = 1; t < logp.size(); ++t) {
      if (batch[i].response_mask[t] == 0) continue;
      logp[t] = all[static_cast<std::int64_t>(t) - 1][batch[i].tokens[t]].item<float>();
    }
    some_loss(i, logp, slope);
    for (std::size_t t = 1; t < logp.size(); ++t) {
      if (batch[i].response_mask[t] == 0) continue;
      const auto row = static_cast<std::int64_t>(t) - 1;
      own[row][batch[i].tokens[t]] += slope[t];
      for (std::size_t j = t * kTop; j < (t + 1) * kTop; ++j) {
        EXPECT_NEAR(seen[i][j], all[row][batch[i].top_tokens[j]].item<float>(), 2e-5);
        own[row][batch[i].top_tokens[j]] += top_slopes[i][j];
      }
    }
    all.backward(own);
  }
  for (const auto& [id, w] : weights) {
    EXPECT_LT(relative_error(gradient.at(id), w.grad()), 1e-3) << to_string(id);
  }

  batch[1].top_tokens.clear();
  EXPECT_THROW(trainer->accumulate(batch, nullptr, some_loss), Error);
}

INSTANTIATE_TEST_SUITE_P(TiedOrNot, TrainerGradient,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::ValuesIn(trainer_devices())));
INSTANTIATE_TEST_SUITE_P(Devices, TrainerOn, ::testing::ValuesIn(trainer_devices()),
                         name_of_device);

TEST_P(TrainerOn, AccumulateSeesTheBitsOfLogprobs) {
  Agreement agreement;
  agreement.model = small_model();
  const std::vector<Trajectory> batch = random_batch(agreement.model, {30, 12, 31, 8, 25, 29, 14});
  for (const bool bf16 : {false, true}) {
    for (const bool recompute : {false, true}) {
      Options options;
      options.bf16 = bf16;
      options.recompute = recompute;
      options.tokens_per_pass = 64;
      const auto trainer = make(agreement, options, random_weights(agreement.model, 2));
      const PerToken logp = trainer->logprobs(batch, nullptr);
      std::size_t seen = 0;
      trainer->accumulate(batch, nullptr, [&](std::size_t i, auto now, auto) {
        EXPECT_TRUE(std::ranges::equal(now, logp[i])) << i;
        ++seen;
        return 0.0;
      });
      EXPECT_EQ(seen, batch.size());
    }
  }
}

TEST_P(TrainerOn, RecomputeLeavesTheSameWeights) {
  Agreement agreement;
  agreement.model = small_model();
  const std::vector<Trajectory> batch = random_batch(agreement.model, {30, 12, 31, 8});
  std::vector<Weights> after;
  for (const bool recompute : {false, true}) {
    Options options;
    options.lr = 1e-2;
    options.recompute = recompute;
    const auto trainer = make(agreement, options, random_weights(agreement.model, 3));
    for (int step = 0; step < 3; ++step) {
      trainer->accumulate(batch, nullptr, some_loss);
      trainer->update();
    }
    after.push_back(take(trainer->weights()));
  }
  for (const auto& [id, w] : after[0]) EXPECT_TRUE(w.equal(after[1].at(id))) << to_string(id);
}

TEST_F(TrainerTest, TheNumberOfThreadsChangesNoBit) {
  Agreement agreement;
  agreement.model = small_model();
  const std::vector<Trajectory> batch =
      random_batch(agreement.model, std::vector<int>(60, 50));  // three passes
  std::vector<Weights> after;
  for (const int count : {1, 3}) {
    set_threads(count);
    const auto trainer = make(agreement, {.lr = 1e-2}, random_weights(agreement.model, 3));
    for (int step = 0; step < 2; ++step) {
      trainer->accumulate(batch, nullptr, some_loss);
      trainer->update();
    }
    after.push_back(take(trainer->weights()));
  }
  set_threads(0);
  for (const auto& [id, w] : after[0]) EXPECT_TRUE(w.equal(after[1].at(id))) << to_string(id);
}

TEST_P(TrainerOn, PackingDoesNotChangeResults) {
  Agreement agreement;
  agreement.model = small_model();
  const std::vector<Trajectory> batch = random_batch(agreement.model, {30, 12, 31, 8, 25, 29, 14});
  const Weights weights = random_weights(agreement.model, 4);
  Options together = reveals_gradient(), apart = reveals_gradient();
  apart.tokens_per_pass = 1;
  const auto a = make(agreement, together, weights), b = make(agreement, apart, weights);
  const PerToken x = a->logprobs(batch, nullptr), y = b->logprobs(batch, nullptr);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    for (std::size_t t = 0; t < x[i].size(); ++t) EXPECT_NEAR(x[i][t], y[i][t], 1e-5);
  }
  a->accumulate(batch, nullptr, some_loss);
  b->accumulate(batch, nullptr, some_loss);
  a->update();
  b->update();
  const Weights ga = minus(weights, take(a->weights())), gb = minus(weights, take(b->weights()));
  for (const auto& [id, g] : ga) EXPECT_LT(relative_error(g, gb.at(id)), 1e-3) << to_string(id);
}

TEST_P(TrainerOn, R83_LogProbsAreThoseOfScaledLogits) {
  // Two temperatures on one sequence: the differences of log-probs between tokens scale by 1/T.
  Agreement agreement;
  agreement.model = small_model();
  const Weights weights = random_weights(agreement.model, 5);
  const auto trainer = make(agreement, reveals_gradient(), weights);
  for (const float temperature : {1.0f, 0.5f}) {
    const std::vector<Trajectory> batch = random_batch(agreement.model, {12}, temperature);
    const PerToken logp = trainer->logprobs(batch, nullptr);
    const Tensor plain = plain_logp(agreement.model, weights, batch[0]);
    for (std::size_t t = 4; t < 12; ++t) {
      EXPECT_NEAR(logp[0][t], plain[static_cast<std::int64_t>(t) - 1].item<float>(), 1e-5);
    }
  }
}

TEST_P(TrainerOn, LearnsASequenceByHeart) {
  Agreement agreement;
  agreement.model = small_model();
  Options options;
  options.lr = 3e-3;
  options.weight_decay = 0.01;
  const auto trainer = make(agreement, options, random_weights(agreement.model, 6));
  const std::vector<Trajectory> batch = random_batch(agreement.model, {20, 17, 24}, 1.0f);
  const TokenLoss nll = [](std::size_t, std::span<const float> logp, std::span<float> dlogp) {
    double loss = 0.0;
    for (std::size_t t = 0; t < logp.size(); ++t) {
      loss -= logp[t];
      dlogp[t] = -1.0f;
    }
    return loss;
  };
  const double first = trainer->accumulate(batch, nullptr, nll);
  trainer->update();
  const Metrics once = trainer->metrics();
  EXPECT_GT(once.at("actor/grad_norm"), 0.0);
  EXPECT_EQ(once.at("actor/grad_norm"), once.at("actor/grad_norm/max"));
  EXPECT_GT(once.at("actor/entropy"), 0.5);
  double last = first;
  for (int step = 0; step < 150; ++step) {
    last = trainer->accumulate(batch, nullptr, nll);
    trainer->update();
  }
  const Metrics all = trainer->metrics();  // of all those updates
  EXPECT_LT(all.at("actor/grad_norm"), all.at("actor/grad_norm/max"));
  EXPECT_LT(all.at("actor/entropy"), once.at("actor/entropy"));
  EXPECT_FALSE(trainer->metrics().contains("actor/grad_norm"));
  EXPECT_LT(last, 0.1 * first);
}

TEST_P(TrainerOn, R26_SavedAndResumedIsTheSameRun) {
  Agreement agreement;
  agreement.model = small_model();
  const std::vector<Trajectory> batch = random_batch(agreement.model, {30, 12, 31});
  const auto folder = std::filesystem::path(::testing::TempDir()) / "trainer_state";
  Options options;
  options.lr = 1e-2;
  options.warmup_updates = 2;
  options.decay = Decay::kCosine;
  options.decay_updates = 6;
  const auto whole = make(agreement, options, random_weights(agreement.model, 8));
  for (int step = 0; step < 5; ++step) {
    if (step == 3) whole->save(folder);
    whole->accumulate(batch, nullptr, some_loss);
    whole->update();
  }
  const auto resumed = make(agreement, options, random_weights(agreement.model, 9));
  resumed->load(folder);
  for (int step = 3; step < 5; ++step) {
    resumed->accumulate(batch, nullptr, some_loss);
    resumed->update();
  }
  const Weights a = take(whole->weights()), b = take(resumed->weights());
  for (const auto& [id, w] : a) EXPECT_TRUE(w.equal(b.at(id))) << to_string(id);
  std::filesystem::remove_all(folder);
}

/// Gives every trajectory a path of its own.

// Torch would end the CUDA trainer's first backward pass by an assertion of its own.
TEST_F(TrainerTest, ACudaTrainerAfterACpusBackwardPassIsRefusedByALine) {
  if (why_unusable(kFirstCuda).empty()) GTEST_SKIP() << "these tests ready torch for CUDA first";
  Agreement agreement;
  agreement.model = small_model();
  const auto message = [&]() -> std::string {
    try {
      Trainer(agreement, {}, {}, kFirstCuda, *comm_);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto here = make(agreement, {}, random_weights(agreement.model, 8));
  here->accumulate(random_batch(agreement.model, {12}), nullptr, some_loss);
  EXPECT_EQ(message().find("device = \"cuda\": a trainer on the CPU has run in this process"), 0u)
      << message();
}

}  // namespace
}  // namespace lockstep::train
