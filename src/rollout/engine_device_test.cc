// An engine on a CUDA device beside one on the CPU, and what is only there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "rollout/engine_rig.h"

namespace lockstep::rollout {
namespace {

using testing::batch;
using testing::expect_complete;
using testing::expect_same;
using testing::MemoryTrace;
using testing::random_tokens;
using testing::refusal;
using testing::request;
using testing::Rig;
using testing::small_agreement;
using testing::small_bf16;

using EngineBesideCpu = fixture::OnDevice;

INSTANTIATE_TEST_SUITE_P(Devices, EngineBesideCpu, ::testing::ValuesIn(devices()), name_of_device);

struct Likeness {
  double mean = 0, most = 0;  // of |log p - log p'|
  double codes = 1;           // bytes of records that are equal
};

Likeness compare(const Rig& a, const std::vector<Trajectory>& of_a, const Rig& b,
                 const std::vector<Trajectory>& of_b) {
  Likeness seen;
  double count = 0, bytes = 0, equal = 0;
  for (std::size_t i = 0; i < of_a.size(); ++i) {
    for (std::size_t t = 1; t < of_a[i].tokens.size(); ++t) {
      const double d =
          std::abs(static_cast<double>(of_a[i].rollout_logp[t]) - of_b[i].rollout_logp[t]);
      seen.mean += d;
      seen.most = std::max(seen.most, d);
      ++count;
    }
    const MemoryTrace::Records ours = a.trace.records(of_a[i]), theirs = b.trace.records(of_b[i]);
    EXPECT_EQ(ours.size(), theirs.size());
    for (const auto& [key, row] : ours) {
      const auto found = theirs.find(key);
      if (found == theirs.end() || found->second.size() != row.size()) {
        ADD_FAILURE() << "position " << std::get<0>(key);
        continue;
      }
      for (std::size_t j = 0; j < row.size(); ++j) equal += row[j] == found->second[j];
      bytes += static_cast<double>(row.size());
    }
  }
  seen.mean /= count;
  if (bytes > 0) seen.codes = equal / bytes;
  return seen;
}

// docs/tolerances.md has what was seen.
TEST_P(EngineBesideCpu, ScoresAndCodesAreNearlyThoseOfTheCpu) {
  Agreement w4a16 = small_agreement(Guidance::kFullForced);
  w4a16.contract.activation = {};
  w4a16.guide.sites = {Site::kK, Site::kV};
  const auto run = [&](const char* name, const Agreement& agreement, const Options& options,
                       double mean, double codes) {
    std::vector<Trajectory> given;
    for (std::int64_t i = 0; i < 8; ++i) {
      given.push_back({.prompt = PromptId{i}, .tokens = random_tokens(60, 100 + i)});
    }
    Rig here(agreement, options);
    fixture::device_under_test() = {};
    Rig cpu(agreement, options);
    fixture::device_under_test() = GetParam();
    const Likeness seen = compare(here, here.engine.rescore(given), cpu, cpu.engine.rescore(given));
    std::printf("%s: mean |d log p| %.3g, most %.3g; bytes of records equal %.5f\n", name,
                seen.mean, seen.most, seen.codes);
    if (!on_cuda()) {
      EXPECT_EQ(seen.most, 0.0);
      EXPECT_EQ(seen.codes, 1.0);
    }
    EXPECT_LT(seen.mean, mean) << name;
    EXPECT_GT(seen.codes, codes) << name;
  };
  Options noisy, quads, half;
  noisy.drift.noise = 0.02f;
  quads.residual = Residual::kChannels;
  half.residual = Residual::kDense;
  half.residual_sites = {Site::kW13In, Site::kW2In};
  half.residual_alpha = 0.5f;
  Agreement mx = small_agreement(Guidance::kFullForced);
  mx.contract = contracts::preset("mx-rceil", mx.model.num_layers);
  run("bf16", small_bf16(), {}, 0.01, 0.95);
  run("mxfp4", mx, {}, 0.03, 0.95);
  run("w4a16", w4a16, {}, 0.03, 0.95);
  run("w4a4", small_agreement(Guidance::kFullForced), {}, 0.03, 0.95);
  run("w4a4, noise", small_agreement(Guidance::kFullForced), noisy, 0.03, 0.95);
  run("quads", small_agreement(Guidance::kFullForced), quads, 0.03, 0.95);
  run("of", small_agreement(Guidance::kFullForced), half, 0.03, 0.95);
  run("mxfp4, of", mx, half, 0.03, 0.95);
  // A cache that records say nothing of, for their rules have none.
  Agreement te = w4a16, macro = w4a16;
  te.contract.weight = contracts::preset("te", 1).weight;
  te.contract.activation = contracts::preset("te", 1).activation;
  macro.contract.weight = macro.contract.activation = contracts::preset("mx-rceil", 1).weight;
  macro.contract.weight.macro_block = macro.contract.activation.macro_block = 128;
  Options split;
  split.drift.split_k = true;
  Agreement k_alone = small_agreement(Guidance::kFullForced);
  k_alone.contract.v = {};
  k_alone.guide.sites = {Site::kW13In, Site::kK};
  run("w4a4, V in BF16", k_alone, {}, 0.03, 0.95);
  run("te", te, {}, 0.03, 0.95);
  run("macro blocks", macro, {}, 0.03, 0.95);
  run("macro blocks, of", macro, half, 0.03, 0.95);
  Agreement halves = small_agreement(Guidance::kFullForced);
  halves.model.expert_width = 64;
  run("w4a4, split_k", halves, split, 0.03, 0.95);
}

/// Decoding is given to the device again and again, and that changes no bit: not of a pass that was
/// filled up, nor of one that comes after longer ones.
TEST_P(EngineBesideCpu, PassesThatAreReplayedGiveTheSameBits) {
  Agreement w4a16 = small_agreement();
  w4a16.contract.activation = {};
  w4a16.guide.sites = {Site::kK, Site::kV};
  for (const Agreement& agreement : {small_agreement(), w4a16}) {
    std::vector<Request> requests;
    for (std::int64_t i = 0; i < 3; ++i) requests.push_back(request(2 * i, 9, 7, 60));
    Rig together(agreement), alone(agreement);
    const std::vector<Trajectory> out = generate(together.engine, requests);
    const Metrics seen = together.engine.metrics();
    if (on_cuda()) {
      EXPECT_GT(seen.at("perf/replayed_passes"), 20.0);
    } else {
      EXPECT_EQ(seen.at("perf/replayed_passes"), 0.0);
    }
    std::vector<Trajectory> one_by_one;
    for (const Request& r : requests) {
      for (Trajectory& t : generate(alone.engine, {r})) one_by_one.push_back(std::move(t));
    }
    expect_same(together, out, alone, one_by_one);
    for (const Trajectory& t : out) expect_complete(together, t);
    // What was decoded, read again as many rows at once.
    const std::vector<Trajectory> again = together.engine.rescore(out);
    for (std::size_t i = 0; i < out.size(); ++i) expect_same(out[i], again[i]);
  }
}

/// Between two rollouts the device has the cache's memory, and neither graphs nor tokens know of
/// it.
TEST_P(EngineBesideCpu, GivesItsPagesBackWhileItRests) {
  const Agreement agreement = small_agreement();
  Options options;
  options.cache_bytes = 1ll << 30;
  Rig rested(agreement, options), waking(agreement, options);
  const auto replays = [](Rig& rig) { return rig.engine.metrics().at("perf/replayed_passes"); };
  generate(rested.engine, {request(2, 9, 7, 40)});
  generate(waking.engine, {request(2, 9, 7, 40)});
  EXPECT_EQ(replays(rested), replays(waking));
  bool given_back = false;
  // What is free is the whole GPU's: another process may take some, or leave, between two looks.
  for (int attempt = 0; attempt < 20 && !given_back; ++attempt) {
    generate(rested.engine, {request(4, 9, 7, 40)});
    generate(waking.engine, {request(4, 9, 7, 40)});
    const std::int64_t before = device_memory(GetParam()).for_others;
    rested.engine.rest(0);  // what is there does for both
    EXPECT_EQ(rested.engine.owed(), 0);
    rested.engine.rest(device_memory(GetParam()).total);
    EXPECT_EQ(rested.engine.owed() >= options.cache_bytes, on_cuda());
    given_back = device_memory(GetParam()).for_others - before > options.cache_bytes / 2;
    if (!on_cuda()) break;
  }
  EXPECT_EQ(given_back, on_cuda());
  EXPECT_EQ(replays(rested), replays(waking));
  const std::vector<Trajectory> out = generate(rested.engine, batch());
  EXPECT_EQ(rested.engine.owed(), 0);
  const std::vector<Trajectory> awake = generate(waking.engine, batch());
  expect_same(rested, out, waking, awake);
  EXPECT_EQ(replays(rested), replays(waking));
  // What is under way keeps its pages.
  rested.engine.submit(request(6, 9, 2));
  rested.engine.step();
  rested.engine.rest(device_memory(GetParam()).total);
  EXPECT_EQ(rested.engine.owed(), 0);
  rested.engine.abort();
  rested.engine.rest(device_memory(GetParam()).total);
  expect_same(rested, rested.engine.rescore(out), waking, waking.engine.rescore(awake));
}

/// Who has taken the memory meanwhile is told of, and nothing is lost by it.
TEST_P(EngineBesideCpu, SaysThatItsPagesFindNoRoom) {
  if (!on_cuda()) return;  // they never leave
  const Agreement agreement = small_agreement();
  Options options;
  options.cache_bytes = 8ll << 30;
  Rig rig(agreement, options);
  rig.engine.rest(device_memory(GetParam()).total);
  std::string line;
  rig.engine.submit(request(2, 9, 2));
  {
    const Buffer others(GetParam(), device_memory(GetParam()).free - (2ll << 30));
    line = refusal([&] { rig.engine.step(); });
  }
  EXPECT_NE(line.find("rollout.cache is 8589934592 bytes: "), std::string::npos) << line;
  EXPECT_NE(line.find("lower it, or where another process"), std::string::npos) << line;
  synchronize(GetParam());
  std::vector<Trajectory> out;
  while (!rig.engine.idle()) {
    for (Trajectory& t : rig.engine.step()) out.push_back(std::move(t));
  }
  ASSERT_EQ(out.size(), 2u);
  for (const Trajectory& t : out) expect_complete(rig, t);
}

TEST_P(EngineBesideCpu, RefusesInOneLineWhatTheDeviceHasNoKernelFor) {
  const std::unique_ptr<Comm> comm = Comm::single();
  const auto made = [&](const Agreement& a, const Options& options = {}) {
    return refusal([&] { Engine(a, options, GetParam(), nullptr, *comm); });
  };
  Agreement fp32 = small_agreement(), wide = small_agreement();
  fp32.contract.weight.global_is_power_of_two = false;
  EXPECT_EQ(made(fp32), "");
  Options quads;
  quads.residual = Residual::kChannels;
  wide.model.head_dim = 48;
  if (on_cuda()) {
    EXPECT_NE(made(fp32, quads).find("global scales are FP32"), std::string::npos);
    EXPECT_NE(made(wide).find("head_dim is 48"), std::string::npos) << made(wide);
  }
  for (const std::string& line : {made(fp32, quads), made(wide)}) {
    EXPECT_EQ(line.find("device = \"cpu\"") != std::string::npos, on_cuda()) << line;
  }
}

TEST(EngineDevice, SaysWhyThereIsNone) {
  const std::unique_ptr<Comm> comm = Comm::single();
  const std::string line = refusal([&] {
    Engine(small_bf16(), {}, Device{Device::Kind::kCuda, 99}, nullptr, *comm);
  });
  EXPECT_NE(line.find("device = \"cuda\""), std::string::npos) << line;
}

}  // namespace
}  // namespace lockstep::rollout
