// What a trainer on a CUDA device shares with the one on a CPU, which is its definition within a
// tolerance. Without such a device these have no rows.
#include <cmath>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/memory.h"
#include "kernels/exact/audit.h"
#include "train/trainer.h"
#include "train/trainer_fixture.h"

namespace lockstep::train {
namespace {

Agreement guided(Guidance mode) {
  Agreement agreement;
  agreement.model = small_model();
  agreement.contract = contracts::lockstep(agreement.model.num_layers);
  agreement.contract.kv_exponents.assign(4, -9);
  agreement.guide = {.mode = mode,
                     .sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV},
                     .layers = LayerSet::range(1, 2),
                     .replay_experts = true,
                     .audit_every = 4};
  return agreement;
}

std::vector<Trajectory> batch_with_paths(const ModelConfig& model) {
  std::vector<Trajectory> batch = random_batch(model, {30, 12, 31, 8, 25});
  for (std::size_t i = 0; i < batch.size(); ++i) {
    batch[i].path = {{.id = SpanId{i + 1},
                      .first = 0,
                      .count = static_cast<std::int32_t>(batch[i].tokens.size()) - 1}};
  }
  return batch;
}

/// What one update by the plain gradient leaves.
struct Outcome {
  PerToken logp;
  Weights gradient;
  Metrics metrics;
};

class TrainerOnDevice : public TrainerTest, public ::testing::WithParamInterface<Device> {
 protected:
  Outcome outcome(Device device, const Agreement& agreement, const Qat& qat, bool bf16 = true,
                  std::int64_t read_ahead_bytes = Options().read_ahead_bytes) {
    device_ = device;
    const std::vector<Trajectory> batch = batch_with_paths(agreement.model);
    const RandomTrace trace(6);
    Options options = reveals_gradient();
    options.bf16 = bf16;
    options.tokens_per_pass = 50;
    options.read_ahead_bytes = read_ahead_bytes;
    const Weights weights = random_weights(agreement.model, 3);
    const auto trainer = make(agreement, options, weights, qat);
    Outcome outcome;
    outcome.logp = trainer->logprobs(batch, &trace);
    trainer->accumulate(batch, &trace, some_loss);
    trainer->update();
    outcome.metrics = trainer->metrics();
    outcome.gradient = minus(weights, take(trainer->weights()));
    return outcome;
  }
};

double mean_gap(const PerToken& a, const PerToken& b) {
  double sum = 0.0;
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t t = 0; t < a[i].size(); ++t, ++count) sum += std::abs(a[i][t] - b[i][t]);
  }
  return sum / static_cast<double>(count);
}

double error_of_all(const Weights& a, const Weights& b) {
  double difference = 0.0, all = 0.0;
  for (const auto& [id, g] : b) {
    difference += (a.at(id) - g).square().sum().item<double>();
    all += g.square().sum().item<double>();
  }
  return std::sqrt(difference / all);
}

TEST_P(TrainerOnDevice, AgreesWithTheCpuInBf16) {
  const Agreement agreement = guided(Guidance::kLsb);
  const Outcome cpu = outcome({}, agreement, {}), here = outcome(GetParam(), agreement, {});
  EXPECT_LT(mean_gap(here.logp, cpu.logp), 0.01);
  for (const auto& [id, g] : cpu.gradient) {
    EXPECT_LT(relative_error(here.gradient.at(id), g), 0.03) << to_string(id);
  }
}

// Rows and heads that other kernels take than those of the small model.
TEST_P(TrainerOnDevice, AgreesWithTheCpuInWiderRows) {
  Agreement agreement = guided(Guidance::kLsb);
  agreement.model.hidden = 576;
  agreement.model.head_dim = 64;
  agreement.model.num_heads = 2;
  agreement.model.num_kv_heads = 1;
  const Outcome cpu = outcome({}, agreement, {}), here = outcome(GetParam(), agreement, {});
  EXPECT_LT(mean_gap(here.logp, cpu.logp), 0.01);
  for (const auto& [id, g] : cpu.gradient) {
    EXPECT_LT(relative_error(here.gradient.at(id), g), 0.03) << to_string(id);
  }
}

// Numbers of the two differ in the last bit of BF16, some of them cross a boundary of FP4, and few
// layers of few numbers do not average that out. The measure is how far the CPU is from itself in
// FP32.
TEST_P(TrainerOnDevice, RoundsToFp4AsTheCpu) {
  const Qat qat = {.weights = true, .activations = true, .k = true, .v = true};
  for (const Guidance mode : {Guidance::kOwnScale, Guidance::kLsb, Guidance::kFullForced}) {
    const Agreement agreement = guided(mode);
    const Outcome cpu = outcome({}, agreement, qat), here = outcome(GetParam(), agreement, qat);
    const Outcome f32 = outcome({}, agreement, qat, false);
    const double gap = mean_gap(here.logp, cpu.logp), own_gap = mean_gap(f32.logp, cpu.logp);
    const double error = error_of_all(here.gradient, cpu.gradient);
    const double own_error = error_of_all(f32.gradient, cpu.gradient);
    std::printf("mode %d: gap %.4f of %.4f, gradient %.4f of %.4f\n", static_cast<int>(mode), gap,
                own_gap, error, own_error);
    EXPECT_LT(gap, 1.5 * own_gap) << static_cast<int>(mode);
    EXPECT_LT(error, 1.5 * own_error) << static_cast<int>(mode);
    EXPECT_LT(error, 0.3) << static_cast<int>(mode);
    for (const auto& [name, value] : cpu.metrics) {
      ASSERT_TRUE(here.metrics.contains(name)) << name;
      EXPECT_NEAR(here.metrics.at(name), value, 0.05 * std::abs(value) + 0.02) << name;
    }
    EXPECT_EQ(here.metrics.size(), cpu.metrics.size());
  }
}

/// More places are audited than one launch takes.
TEST_P(TrainerOnDevice, AuditsAsTheCpuInManyLayers) {
  constexpr std::int32_t kLayers = 12;
  Agreement agreement = guided(Guidance::kLsb);
  agreement.model.num_layers = kLayers;
  agreement.contract = contracts::lockstep(kLayers);
  agreement.contract.kv_exponents.assign(2 * kLayers, -9);
  static_assert(3 * kLayers > 2 * kernels::kMostAudits);
  for (const bool rounds : {true, false}) {
    const Qat qat = {.weights = true, .activations = rounds, .k = rounds, .v = rounds};
    const Outcome cpu = outcome({}, agreement, qat), here = outcome(GetParam(), agreement, qat);
    EXPECT_TRUE(cpu.metrics.contains("fp4/act/flip_frac/layer_11"));
    EXPECT_TRUE(cpu.metrics.contains("fp4/kv/flip_frac/layer_0"));
    EXPECT_EQ(here.metrics.size(), cpu.metrics.size());
    for (const auto& [name, value] : cpu.metrics) {
      ASSERT_TRUE(here.metrics.contains(name)) << name;
      if (!name.starts_with("fp4/act/") && !name.starts_with("fp4/kv/")) continue;
      EXPECT_NEAR(here.metrics.at(name), value, 0.1) << name;
    }
  }
}

/// The arms `of` and `mxfp4_of`: half of what the codes lost goes back at both inputs of the
/// experts.
TEST_P(TrainerOnDevice, CompensatesAsTheCpu) {
  const Qat qat = {.weights = true,
                   .activations = true,
                   .residual_alpha = 0.5f,
                   .residual_sites = {Site::kW13In, Site::kW2In}};
  Qat without = qat;
  without.residual_alpha = 0.0f;
  for (const char* preset : {"lockstep", "mx-rceil"}) {
    Agreement agreement = guided(Guidance::kOwnScale);
    agreement.model.expert_width = 32;  // a block of MXFP4
    agreement.contract = contracts::preset(preset, agreement.model.num_layers);
    agreement.contract.k = agreement.contract.v = {};
    agreement.guide = {};
    agreement.guide.replay_experts = true;
    const Outcome cpu = outcome({}, agreement, qat), here = outcome(GetParam(), agreement, qat);
    const Outcome f32 = outcome({}, agreement, qat, false);
    const Outcome plain = outcome({}, agreement, without);
    const double gap = mean_gap(here.logp, cpu.logp), own_gap = mean_gap(f32.logp, cpu.logp);
    std::printf("%s: gap %.5f of %.5f; without a residual %.5f\n", preset, gap, own_gap,
                mean_gap(plain.logp, cpu.logp));
    EXPECT_LT(gap, 1.5 * own_gap) << preset;
    EXPECT_LT(gap, 0.5 * mean_gap(plain.logp, cpu.logp)) << preset;
    EXPECT_LT(error_of_all(here.gradient, cpu.gradient),
              1.5 * error_of_all(f32.gradient, cpu.gradient))
        << preset;
  }
}

TEST_P(TrainerOnDevice, TwoRunsLeaveTheSameBits) {
  const Qat qat = {.weights = true, .activations = true, .k = true, .v = true};
  const Outcome a = outcome(GetParam(), guided(Guidance::kLsb), qat);
  const Outcome b = outcome(GetParam(), guided(Guidance::kLsb), qat);
  EXPECT_EQ(a.logp, b.logp);
  for (const auto& [id, g] : a.gradient) EXPECT_TRUE(g.equal(b.gradient.at(id))) << to_string(id);
  EXPECT_EQ(a.metrics, b.metrics);
}

TEST_P(TrainerOnDevice, HowFarItReadsAheadChangesNothing) {
  const Qat qat = {.weights = true, .activations = true, .k = true, .v = true};
  const Outcome far = outcome(GetParam(), guided(Guidance::kFullGuided), qat);
  for (const std::int64_t bytes : {0, 3000}) {
    const Outcome near = outcome(GetParam(), guided(Guidance::kFullGuided), qat, true, bytes);
    EXPECT_EQ(near.logp, far.logp) << bytes;
    EXPECT_EQ(near.metrics, far.metrics) << bytes;
  }
}

/// Remembers what is asked for.
class Asked final : public TraceSource {
 public:
  explicit Asked(const TraceSource& from) : from_(from) {}
  std::size_t read(std::span<const TokenKey> tokens, ContractId contract, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override {
    {
      const std::lock_guard lock(mutex_);
      places.emplace(rows.place.site, rows.layout.encoding);
    }
    return from_.read(tokens, contract, rows, present);
  }
  void prefetch(std::span<const TokenKey> tokens) const override { from_.prefetch(tokens); }

  mutable std::set<std::pair<Site, Encoding>> places;

 private:
  const TraceSource& from_;
  mutable std::mutex mutex_;
};

// What nobody records would count as absent.
TEST_P(TrainerOnDevice, AsksForNoCodesOfRoutes) {
  const Qat qat = {.weights = true, .activations = true, .k = true, .v = true};
  const Agreement agreement = guided(Guidance::kLsb);
  const std::vector<Trajectory> batch = batch_with_paths(agreement.model);
  std::vector<std::set<std::pair<Site, Encoding>>> asked;
  for (const Device device : {Device{}, GetParam()}) {
    device_ = device;
    const RandomTrace trace(6);
    const Asked records(trace);
    const auto trainer = make(agreement, {}, random_weights(agreement.model, 3), qat);
    trainer->logprobs(batch, &records);
    trainer->accumulate(batch, &records, some_loss);
    EXPECT_TRUE(records.places.contains({Site::kW13In, Encoding::kCodes}));
    EXPECT_FALSE(records.places.contains({Site::kRouter, Encoding::kCodes}));
    asked.push_back(records.places);
  }
  EXPECT_EQ(asked[0], asked[1]);
}

TEST_P(TrainerOnDevice, WhatTorchKeepsGoesBackAndComesAgain) {
  const Device device = GetParam();
  const Agreement agreement = guided(Guidance::kLsb);
  const Outcome before = outcome(device, agreement, {});
  bool back = false;
  // What is free is the whole GPU's: another process may take some between two looks.
  for (int attempt = 0; attempt < 20 && !back; ++attempt) {
    { const Tensor large = at::empty({64 << 20}, at::TensorOptions(ops::torch_device(device))); }
    const std::int64_t kept = device_memory(device).for_others;
    ops::empty_cache(device);
    back = device_memory(device).for_others > kept + (128 << 20);
  }
  EXPECT_TRUE(back);
  EXPECT_EQ(outcome(device, agreement, {}).logp, before.logp);
}

TEST_P(TrainerOnDevice, TakesNoMoreThanItMay) {
  const Device device = device_ = GetParam();
  const Agreement agreement = guided(Guidance::kLsb);
  const Weights weights = random_weights(agreement.model, 3);
  const std::vector<Trajectory> batch = batch_with_paths(agreement.model);
  const RandomTrace trace(6);
  const PerToken free = make(agreement, {}, weights)->logprobs(batch, &trace);
  const auto tensor = [&](std::int64_t bytes) {
    return at::empty({bytes}, at::TensorOptions(ops::torch_device(device)).dtype(at::kByte));
  };
  {
    const auto trainer = make(agreement, {.memory_bytes = 256 << 20}, weights);
    EXPECT_EQ(trainer->logprobs(batch, &trace), free);
    trainer->accumulate(batch, &trace, some_loss);
    trainer->update();
    const std::int64_t left = trainer->may_take();
    EXPECT_GE(left, 0);
    EXPECT_LT(left, 256 << 20);  // its weights take some
    const Tensor some = tensor(64 << 20);
    EXPECT_LE(trainer->may_take(), left);
    ops::empty_cache(device);
    try {
      tensor(300 << 20);
      ADD_FAILURE() << "more than trainer.memory";
    } catch (const std::exception& error) {  // in torch's words
      const std::string what = error.what();
      EXPECT_NE(what.find("CUDA out of memory"), std::string::npos) << what;
      EXPECT_NE(what.find(" allowed; "), std::string::npos) << what;
    }
  }
  EXPECT_EQ(make(agreement, {}, weights)->may_take(), -1);  // and the next one has no limit
  tensor(300 << 20);
  try {
    make(agreement, {.memory_bytes = 4096}, weights);
    ADD_FAILURE() << "less than its weights";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_TRUE(what.starts_with("trainer.memory is 4096 bytes, and weights, ")) << what;
  }
}

TEST_P(TrainerOnDevice, StatesGoFromDeviceToDevice) {
  Agreement agreement;
  agreement.model = small_model();
  const std::vector<Trajectory> batch = random_batch(agreement.model, {30, 12});
  const auto folder = std::filesystem::path(::testing::TempDir()) / "trainer_state_devices";
  device_ = GetParam();
  const auto there = make(agreement, {.lr = 1e-2}, random_weights(agreement.model, 8));
  there->accumulate(batch, nullptr, some_loss);
  there->update();
  there->save(folder);
  device_ = {};
  const auto here = make(agreement, {.lr = 1e-2}, random_weights(agreement.model, 9));
  here->load(folder);
  const Weights a = take(there->weights()), b = take(here->weights());
  for (const auto& [id, w] : a) EXPECT_TRUE(w.equal(b.at(id))) << to_string(id);
  std::filesystem::remove_all(folder);
}

TEST_P(TrainerOnDevice, AWeightThatIsNotFiniteIsNamed) {
  const Device device = GetParam();
  Agreement agreement;
  agreement.model = small_model();
  agreement.contract = contracts::lockstep(agreement.model.num_layers);
  Trainer trainer(agreement, {.weights = true}, {}, device, *comm_);
  const Weights weights = random_weights(agreement.model, 8);
  const WeightId bad = {.role = WeightId::Role::kDown, .layer = {1}, .expert = {2}};
  WeightSink& sink = trainer.initial_weights();
  sink.begin(WeightVersion{0}, ContractId{0});
  for (const WeightId& id : weight_ids(agreement.model)) {
    // Numbers of the device itself are not looked at one by one on their way in.
    const Tensor& w = weights.at(id);
    const float* numbers = w.const_data_ptr<float>();
    std::vector<float> values(numbers, numbers + w.numel());
    if (id == bad) values[static_cast<std::size_t>(3 * w.size(1) + 5)] = NAN;
    const Buffer there = to_device(values, device);
    sink.put({id, TensorView<const float, 2>{
                      there.as<float>(), {w.size(0), w.size(1)}, {w.size(1), 1}, device}});
    synchronize(device, ops::stream_on(device));  // `there` ends
  }
  try {
    sink.commit();
    ADD_FAILURE() << "a NaN went in";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), to_string(bad) + ": [3, 5] is not finite");
  }
}

TEST_P(TrainerOnDevice, AGradientThatIsNotFiniteIsRefused) {
  device_ = GetParam();
  Agreement agreement;
  agreement.model = small_model();
  const auto trainer = make(agreement, {}, random_weights(agreement.model, 8));
  trainer->accumulate(random_batch(agreement.model, {30}), nullptr,
                      [](std::size_t, auto logp, auto dlogp) {
                        for (std::size_t t = 0; t < logp.size(); ++t) dlogp[t] = NAN;
                        return 0.0;
                      });
  EXPECT_THROW(trainer->update(), Error);
}

/// The experts' own product, and dialects that no record guides: about as far from the CPU as that
/// is from itself where it multiplies the values in FP32. docs/tolerances.md has what was seen.
TEST_P(TrainerOnDevice, MultipliesCodesAsTheCpu) {
  const Qat fake = {.weights = true, .activations = true};
  Qat real = fake;
  real.real_product = true;
  for (const char* preset : {"lockstep", "mx-rceil", "te", "macro"}) {
    Agreement agreement;
    agreement.model = small_model();
    agreement.model.expert_width = 32;  // a block of MXFP4
    const bool macro = std::string(preset) == "macro";
    agreement.contract = contracts::preset(macro ? "mx-rceil" : preset, 2);
    if (macro) {
      agreement.contract.weight.macro_block = agreement.contract.activation.macro_block = 128;
    }
    agreement.contract.k = agreement.contract.v = {};
    const Qat& qat = macro ? fake : real;
    const Outcome cpu = outcome({}, agreement, qat), here = outcome(GetParam(), agreement, qat);
    const Outcome f32 = outcome({}, agreement, fake, false);
    const double gap = mean_gap(here.logp, cpu.logp), own_gap = mean_gap(f32.logp, cpu.logp);
    const double error = error_of_all(here.gradient, cpu.gradient);
    const double own_error = error_of_all(f32.gradient, cpu.gradient);
    std::printf("%s: gap %.4f of %.4f, gradient %.4f of %.4f\n", preset, gap, own_gap, error,
                own_error);
    EXPECT_LT(gap, 1.5 * own_gap) << preset;
    EXPECT_LT(error, 2.0 * own_error) << preset;
  }
}

/// The CPU against itself would show nothing.
std::vector<Device> cuda_devices() {
  std::vector<Device> all = trainer_devices();
  std::erase_if(all, [](const Device& device) { return device.kind == Device::Kind::kCpu; });
  return all;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TrainerOnDevice);
INSTANTIATE_TEST_SUITE_P(All, TrainerOnDevice, ::testing::ValuesIn(cuda_devices()), name_of_device);

}  // namespace
}  // namespace lockstep::train
