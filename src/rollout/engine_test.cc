// What a rollout leaves, and that it depends on nothing else in the batch.
#include "rollout/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "kernels/exact/quantize.h"
#include "rollout/engine_rig.h"
#include "rollout/kv_cache.h"
#include "rollout/kv_rows.h"

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
using testing::runs_here;
using testing::small_agreement;
using testing::small_bf16;

/// `preset` everywhere; records as in small_agreement().
Agreement small_preset(const char* preset, Guidance mode) {
  Agreement a = small_agreement(mode);
  a.contract = contracts::preset(preset, a.model.num_layers);
  if (a.contract.k.global == GlobalScale::kStatic) {
    a.contract.kv_exponents.assign(static_cast<std::size_t>(2 * a.model.num_layers), -5);
  }
  return a;
}

/// MXFP4 weights and cache, MXFP8 activations.
Agreement small_w4a8(Guidance mode) {
  Agreement a = small_preset("mx-rceil", mode);
  a.contract.activation = contracts::format("mxfp8", contracts::Tensor::kActivation);
  return a;
}

using EngineOn = fixture::OnDevice;

INSTANTIATE_TEST_SUITE_P(Devices, EngineOn, ::testing::ValuesIn(devices()), name_of_device);

TEST_P(EngineOn, R74_EveryPositionButTheLastHasItsRecords) {
  for (const Guidance mode :
       {Guidance::kLsb, Guidance::kLsbScaleMod4, Guidance::kFullGuided, Guidance::kRolloutScale}) {
    Rig rig(small_agreement(mode));
    const std::vector<Trajectory> out = generate(rig.engine, batch());
    ASSERT_EQ(out.size(), 13u);
    for (const Trajectory& t : out) expect_complete(rig, t);
    EXPECT_EQ(rig.trace.open_spans(), 0u);
  }
}

TEST_P(EngineOn, EveryFormatLeavesItsRecords) {
  int ran = 0;
  for (const Guidance mode : {Guidance::kLsb, Guidance::kLsbScaleMod4, Guidance::kFullForced}) {
    for (const Agreement& a :
         {small_preset("mx-rceil", mode), small_w4a8(mode), small_preset("fp8", mode)}) {
      if (!runs_here(a)) continue;
      ++ran;
      Rig rig(a);
      for (const Trajectory& t : generate(rig.engine, batch())) expect_complete(rig, t);
    }
  }
  EXPECT_GE(ran, 3);  // MXFP4 at least, on every device
}

TEST_P(EngineOn, ResultsComeInTheOrderOfTheRequests) {
  Rig rig(small_agreement());
  std::vector<Request> requests = batch();
  std::reverse(requests.begin(), requests.end());
  const std::vector<Trajectory> out = generate(rig.engine, requests);
  std::size_t next = 0;
  for (const Request& r : requests) {
    for (std::int32_t i = 0; i < r.num_samples; ++i, ++next) {
      EXPECT_EQ(out[next].prompt, r.prefix.prompt);
      EXPECT_EQ(out[next].sample, i);
      ASSERT_GT(out[next].tokens.size(), r.prefix.tokens.size());
      EXPECT_TRUE(
          std::equal(r.prefix.tokens.begin(), r.prefix.tokens.end(), out[next].tokens.begin()));
      for (std::size_t t = 0; t < out[next].tokens.size(); ++t) {
        EXPECT_EQ(out[next].response_mask[t], t >= r.prefix.tokens.size() ? 1 : 0);
        EXPECT_EQ(out[next].rollout_logp[t] < 0.0f, t >= r.prefix.tokens.size());
      }
    }
  }
}

// The same sample in other company, in other pages and chunks, after preemption.
TEST_P(EngineOn, R89_ResultsDependOnNothingElseInTheBatch) {
  Agreement noisy = small_agreement();
  for (const auto& [agreement, noise] :
       {std::pair{small_agreement(Guidance::kLsb), 0.0f}, std::pair{small_bf16(), 0.0f},
        std::pair{small_preset("fp8", Guidance::kLsb), 0.0f},
        std::pair{small_w4a8(Guidance::kLsbScaleMod4), 0.0f},
        std::pair{small_agreement(Guidance::kFullGuided), 0.05f}}) {
    Options base;
    base.drift.noise = noise;
    Rig reference(agreement, base);
    const std::vector<Trajectory> expected = generate(reference.engine, batch());

    struct Variant {
      std::int32_t page_tokens, tokens_per_pass, max_sequences;
      std::int64_t cache_tokens;
      bool preempts;
    };
    for (const Variant& v : {Variant{16, 7, 1024, 10000, false},
                             Variant{4, 1000, 1024, 10000, false}, Variant{33, 3, 2, 10000, false},
                             Variant{5, 64, 1024, 90, true}, Variant{8, 16, 5, 80, true}}) {
      SCOPED_TRACE(v.page_tokens);
      Options options = base;
      options.page_tokens = v.page_tokens;
      options.tokens_per_pass = v.tokens_per_pass;
      options.max_sequences = v.max_sequences;
      options.cache_bytes =
          v.cache_tokens / v.page_tokens * cache_layout(agreement, v.page_tokens)[0].k.page_bytes;
      Rig rig(agreement, options);
      const std::vector<Trajectory> out = generate(rig.engine, batch());
      expect_same(reference, expected, rig, out);
      EXPECT_EQ(rig.engine.metrics()["rollout/preemptions"] > 0.0, v.preempts);
    }

    std::vector<Trajectory> alone;
    Rig rig(agreement, base);
    for (const Request& r : batch()) {
      for (Trajectory& t : generate(rig.engine, {r})) alone.push_back(std::move(t));
    }
    expect_same(reference, expected, rig, alone);
  }
}

TEST_P(EngineOn, SamplesThatShareAPromptEqualThoseThatReadItThemselves) {
  Rig shared(small_agreement());
  const std::vector<Trajectory> together = generate(shared.engine, {request(4, 37, 4)});
  EXPECT_EQ(shared.engine.metrics()["rollout/prompt_tokens"], 37.0);
  for (std::int32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(together[static_cast<std::size_t>(i)].path[0].id, together[0].path[0].id);
    Rig rig(small_agreement());
    Request r = request(4, 37, 1);
    r.prefix.sample = i;
    const std::vector<Trajectory> alone = generate(rig.engine, {r});
    expect_same(shared, {together[static_cast<std::size_t>(i)]}, rig, alone);
  }
}

// Keys may need more than values: either is BF16 while the other is FP4.
TEST_P(EngineOn, R54_KAndVAreQuantizedApart) {
  for (const bool k_only : {true, false}) {
    Agreement a = small_agreement();
    (k_only ? a.contract.v : a.contract.k) = Quantizer{};
    a.guide.sites = {Site::kW13In, k_only ? Site::kK : Site::kV};
    a.guide.audit_every = 0;
    Rig rig(a);
    const std::vector<Trajectory> out = generate(rig.engine, batch());
    for (const Trajectory& t : out) expect_complete(rig, t);
    expect_same(rig, out, rig, rig.engine.rescore(out));
  }
}

// The records of a prompt that G samples share are kept once.
TEST_P(EngineOn, BytesPerTokenAreThoseOfTheFormula) {
  Agreement a = small_agreement();
  a.guide.audit_every = 0;
  Rig rig(a);
  const std::vector<Trajectory> out = generate(rig.engine, {request(4, 37, 4)});
  std::int64_t tokens = 37;
  for (const Trajectory& t : out) tokens += static_cast<std::int64_t>(t.tokens.size()) - 1 - 37;
  EXPECT_EQ(rig.trace.bytes(), tokens * a.bytes_per_token());
}

TEST_P(EngineOn, RescoringAtUnchangedWeightsFindsTheSameLogProbsAndRecords) {
  for (Agreement agreement : {small_agreement(Guidance::kLsbScaleMod4), small_bf16()}) {
    agreement.guide.audit_every = 0;  // which tokens are audited follows from the span
    Options options;
    options.tokens_per_pass = 19;
    Rig rig(agreement, options);
    const std::vector<Trajectory> out = generate(rig.engine, batch());
    const std::vector<Trajectory> again = rig.engine.rescore(out);
    expect_same(rig, out, rig, again);
    for (std::size_t i = 0; i < out.size(); ++i) {
      expect_complete(rig, again[i]);
      ASSERT_EQ(again[i].path.size(), 1u);
      for (const Span& span : out[i].path) EXPECT_NE(span.id, again[i].path[0].id);
    }
    rig.update(2);
    const std::vector<Trajectory> moved = rig.engine.rescore(std::span(out).first(1));
    EXPECT_NE(moved[0].rollout_logp, out[0].rollout_logp);
    EXPECT_EQ(moved[0].path[0].version, WeightVersion{2});
  }
}

/// A dump's numbers are those that the records were taken from, and leave all else as it was.
TEST_P(EngineOn, Bf16RecordsAreWhatTheCodesCameFrom) {
  const Agreement agreement = small_agreement(Guidance::kFullForced);
  Rig plain(agreement);
  Rig rig(agreement, {.tokens_per_pass = 13, .record_bf16 = true});
  const std::vector<Trajectory> expected = generate(plain.engine, batch());
  const std::vector<Trajectory> out = generate(rig.engine, batch());
  std::int64_t compared = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    expect_same(expected[i], out[i]);
    const MemoryTrace::Records records = rig.trace.records(out[i]);
    for (const auto& [key, row] : records) {
      const auto& [position, place, encoding] = key;
      if (encoding != Encoding::kBf16) continue;
      const Place at = place;
      if (!agreement.guide.follows(at)) continue;
      const auto codes = records.find({position, at, Encoding::kCodes});
      ASSERT_TRUE(codes != records.end());
      const RowLayout layout = agreement.layout(at, Encoding::kCodes);
      std::vector<Bf16> x(row.size() / 2);
      std::memcpy(x.data(), row.data(), row.size());
      const std::int64_t width = std::ssize(x);
      std::vector<std::uint8_t> packed(static_cast<std::size_t>(width / 2)),
          scales(static_cast<std::size_t>(width / 16)),
          record(static_cast<std::size_t>(layout.bytes()));
      float global = 0;
      kernels::quantize({.x = {x.data(), {1, width}, {width, 1}},
                         .rule = agreement.rule(at.site),
                         .exponent = -6,
                         .out = {.codes = {packed.data(), {1, width / 2}, {width / 2, 1}},
                                 .scales = {scales.data(), {1, width / 16}, {width / 16, 1}},
                                 .global = {&global, {1}, {1}}},
                         .layout = layout,
                         .records = {record.data(), {1, layout.bytes()}, {layout.bytes(), 1}}});
      ASSERT_EQ(codes->second.size(), record.size());
      EXPECT_EQ(std::memcmp(codes->second.data(), record.data(), record.size()), 0)
          << position << " " << at.layer.value;
      ++compared;
    }
    if (i == 1) break;  // enough
  }
  EXPECT_GT(compared, 100);
}

TEST_P(EngineOn, KeepsTheLikeliestTokensOfEveryDraw) {
  Rig rig(small_agreement());
  constexpr std::int32_t kTop = 5;
  std::size_t found = 0, drawn = 0;
  std::vector<Request> requests = batch();
  for (Request& r : requests) r.prefix.sampling.top_logprobs = kTop;
  for (const Trajectory& t : generate(rig.engine, requests)) {
    ASSERT_EQ(t.top_count(), static_cast<std::size_t>(kTop));
    ASSERT_EQ(t.top_logp.size(), t.tokens.size() * kTop);
    for (std::size_t p = 0; p < t.tokens.size(); ++p) {
      const auto tokens = std::span(t.top_tokens).subspan(p * kTop, kTop);
      const auto logp = std::span(t.top_logp).subspan(p * kTop, kTop);
      if (t.response_mask[p] == 0) {
        EXPECT_TRUE(std::all_of(logp.begin(), logp.end(), [](float x) { return x == 0; }));
        continue;
      }
      EXPECT_TRUE(std::is_sorted(logp.rbegin(), logp.rend()));
      EXPECT_GE(logp[0], t.rollout_logp[p]);
      ++drawn;
      for (std::size_t i = 0; i < kTop; ++i) {
        if (tokens[i] != t.tokens[p]) continue;
        EXPECT_EQ(logp[i], t.rollout_logp[p]);
        ++found;
      }
    }
  }
  EXPECT_GT(found, drawn / 4);
  Request greedy = request(1, 3, 1);
  greedy.prefix.sampling.top_logprobs = 100000;
  EXPECT_NE(refusal([&] { rig.engine.submit(greedy); }).find("the vocabulary has"),
            std::string::npos);
}

TEST_P(EngineOn, ScoresGivenTokensWithoutAMaskFromTheSecondOn) {
  Rig rig(small_bf16(), {}, false);
  Trajectory t = {.prompt = PromptId{1}, .tokens = random_tokens(20, 2)};
  const std::vector<Trajectory> out = rig.engine.rescore(std::span(&t, 1));
  EXPECT_EQ(out[0].rollout_logp[0], 0.0f);
  for (std::size_t i = 1; i < 20; ++i) EXPECT_LT(out[0].rollout_logp[i], 0.0f);
  t.tokens.resize(1);
  EXPECT_EQ(rig.engine.rescore(std::span(&t, 1))[0].tokens.size(), 1u);
}

TEST_P(EngineOn, AuditTokensKeepTheCodesThatTheOtherRecordsCameFrom) {
  for (const Agreement& a : {small_agreement(Guidance::kLsb), small_w4a8(Guidance::kLsb),
                             small_preset("fp8", Guidance::kLsb)}) {
    Rig rig(a);
    const std::vector<Trajectory> out = generate(rig.engine, batch());
    int compared = 0;
    for (const Trajectory& t : out) {
      const MemoryTrace::Records records = rig.trace.records(t);
      for (const auto& [key, full] : records) {
        const auto& [position, place, encoding] = key;
        const auto compact = records.find({position, place, Encoding::kLsb});
        const bool full_codes = encoding == Encoding::kCodes || encoding == Encoding::kCodes8;
        if (!full_codes || compact == records.end()) continue;
        RowLayout layout = rig.agreement.layout(place, Encoding::kLsb);
        const auto exponents = static_cast<std::size_t>(layout.exponents);
        layout.exponents = 0;
        std::vector<std::byte> derived(static_cast<std::size_t>(layout.bytes()));
        record_from_row(full.data(), layout, encoding == Encoding::kCodes8, derived.data());
        derived.insert(derived.end(), full.end() - static_cast<std::ptrdiff_t>(exponents),
                       full.end());
        EXPECT_TRUE(derived == compact->second);
        ++compared;
      }
    }
    EXPECT_GT(compared, 100);
  }
}

// A stale or unwritten buffer would repeat one row, or name one expert twice.
TEST_P(EngineOn, R71_R78_RecordsDifferFromTokenToToken) {
  Options options;
  options.tokens_per_pass = 7;
  Rig rig(small_agreement(), options);
  const std::vector<Trajectory> out = generate(rig.engine, {request(9, 50, 1)});
  std::map<Place, std::set<std::string>> rows;
  const std::vector<Token>& tokens = out[0].tokens;
  for (const auto& [key, row] : rig.trace.records(out[0])) {
    const auto& [position, place, encoding] = key;
    if (encoding == Encoding::kCodes) continue;
    rows[place].emplace(reinterpret_cast<const char*>(row.data()), row.size());
    if (place.site == Site::kRouter) {
      EXPECT_NE(row[0], row[1]);
    }
  }
  for (const auto& [place, distinct] : rows) {
    if (place.site == Site::kRouter) {
      EXPECT_GT(distinct.size(), 4u);
    } else {
      EXPECT_GT(distinct.size(), tokens.size() - 4) << place.layer.value;
    }
  }
}

TEST_P(EngineOn, StopsAtStopTokensBudgetsAndTheContextsEnd) {
  Agreement a = small_agreement();
  a.model.stop_tokens = {5, 6, 7, 8, 9};
  Rig rig(a);
  const std::vector<Trajectory> out =
      generate(rig.engine, {request(1, 4, 8, 60), request(2, 90, 2, 60), request(3, 4, 2, 1)});
  int stopped = 0;
  for (const Trajectory& t : out) {
    const bool stop = t.tokens.back() >= 5 && t.tokens.back() <= 9;
    EXPECT_EQ(t.finish, stop ? Finish::kStop : Finish::kLength);
    stopped += stop ? 1 : 0;
    const std::size_t prompt = t.prompt.value == 2 ? 90 : 4;
    for (std::size_t i = prompt; i + 1 < t.tokens.size(); ++i) {
      EXPECT_FALSE(t.tokens[i] >= 5 && t.tokens[i] <= 9);
    }
    EXPECT_LE(t.tokens.size(), 96u);
    if (t.prompt.value == 2 && !stop) {
      EXPECT_EQ(t.tokens.size(), 96u);
    }
    if (t.prompt.value == 3) {
      EXPECT_EQ(t.tokens.size(), 5u);
      EXPECT_EQ(t.path.size(), 1u);  // the one token that was sampled was never read
    }
    expect_complete(rig, t);
  }
  EXPECT_GT(stopped, 3);
}

// R75: what a length limit cuts is cut from tokens and records alike.
TEST_P(EngineOn, R75_AShorterBudgetIsAPrefixOfALongerOne) {
  Rig longer(small_agreement()), shorter(small_agreement());
  const Trajectory a = generate(longer.engine, {request(4, 20, 1, 24)})[0];
  const Trajectory b = generate(shorter.engine, {request(4, 20, 1, 7)})[0];
  ASSERT_EQ(b.tokens.size(), 27u);
  EXPECT_TRUE(std::equal(b.tokens.begin(), b.tokens.end(), a.tokens.begin()));
  const MemoryTrace::Records all = longer.trace.records(a), part = shorter.trace.records(b);
  EXPECT_EQ(std::get<0>(part.rbegin()->first), 25);
  for (const auto& [key, row] : part) EXPECT_TRUE(all.at(key) == row);
}

// R76: tokens before a weight update keep the records and the version that made them.
// R64: nothing that older weights left is used for a new request, nor a prompt half read.
// A next turn reads what is new, and gives the boundary token, which no pass had read, its record.
// Old weights' K and V cannot be had again: what depends on them is recorded anew and masked.
TEST_P(EngineOn, GreedyIsTopKOneAndForEvaluation) {
  Rig rig(small_bf16(), {}, false);
  Request r = request(4, 12, 3);
  r.prefix.sampling.top_k = 1;
  r.prefix.sampling.top_logprobs = 0;
  const std::vector<Trajectory> out = generate(rig.engine, {r});
  EXPECT_EQ(out[0].tokens, out[1].tokens);
  EXPECT_EQ(out[0].tokens, out[2].tokens);
  Rig recording(small_bf16());
  EXPECT_NE(refusal([&] { recording.engine.submit(r); }).find("evaluation"), std::string::npos);
}

TEST_P(EngineOn, R95_MetricsCountWhatHappened) {
  Rig rig(small_agreement());
  const std::vector<Trajectory> out = generate(rig.engine, batch());
  double tokens = 0;
  for (const Trajectory& t : out) {
    for (const std::uint8_t mask : t.response_mask) tokens += mask;
  }
  Metrics m = rig.engine.metrics();
  EXPECT_EQ(m["rollout/tokens"], tokens);
  EXPECT_EQ(m["rollout/prompt_tokens"], 5.0 + 37 + 1 + 16 + 50);
  EXPECT_EQ(m["rollout/preemptions"], 0.0);
  EXPECT_GT(m["rollout/shared_pages"], 0.0);
  EXPECT_GT(m["rollout/cache_use"], 0.0);
  EXPECT_GT(m["rollout/tokens_per_s"], 0.0);
  EXPECT_TRUE(m.contains("fp4/scale/sat_frac"));
  EXPECT_EQ(rig.engine.metrics()["rollout/tokens"], 0.0);
}

/// Weights as they are, from memory.
class Fixed final : public WeightSource {
 public:
  explicit Fixed(std::vector<fixture::OwnedWeight> weights) : weights_(std::move(weights)) {}
  void each(const std::function<void(const Weight&)>& visit) const override {
    for (const fixture::OwnedWeight& w : weights_) visit(w.weight());
  }

 private:
  std::vector<fixture::OwnedWeight> weights_;
};

TEST(Engine, R26_CalibrationTakesTheLargestOfItsBatch) {
  Agreement bf16 = small_bf16();
  const Fixed weights(fixture::random_weights(bf16, 1));
  const auto of = [&](const std::vector<std::vector<Token>>& batch) {
    return calibrate_kv(bf16.model, weights, batch);
  };
  std::vector<std::vector<Token>> all;
  std::vector<std::int8_t> largest;
  for (std::uint64_t i = 0; i < 6; ++i) {
    all.push_back(random_tokens(4, i));
    const std::vector<std::int8_t> one = of({all.back()});
    largest.resize(one.size(), INT8_MIN);
    for (std::size_t j = 0; j < one.size(); ++j) largest[j] = std::max(largest[j], one[j]);
  }
  EXPECT_EQ(of(all), largest);
  std::reverse(all.begin(), all.end());
  EXPECT_EQ(of(all), largest);
}

TEST(Engine, CalibratedExponentsLeaveTwoBinadesOfHeadroom) {
  Agreement bf16 = small_bf16();
  const Fixed weights(fixture::random_weights(bf16, 1));
  const std::vector<std::vector<Token>> calibration = {random_tokens(40, 1), random_tokens(9, 2)};
  const std::vector<std::int8_t> n = calibrate_kv(bf16.model, weights, calibration);
  ASSERT_EQ(n.size(), 6u);
  // Norms of one bring K, after its own norm, to sqrt(C) at most: n = E - 9 or a step above.
  for (std::size_t i = 0; i < n.size(); i += 2) {
    EXPECT_GE(n[i], -9);
    EXPECT_LE(n[i], -6);
  }
  Agreement a = small_agreement();
  a.contract.kv_exponents = n;
  Rig rig(a);
  std::vector<Trajectory> scored;
  for (const auto& tokens : calibration) {
    scored.push_back({.prompt = PromptId{3}, .tokens = tokens});
  }
  EXPECT_NE(refusal([&] { rig.engine.rescore(scored); }).find("prompt 3, sample 0 is under way"),
            std::string::npos);
  scored[1].sample = 1;
  rig.engine.rescore(scored);
  EXPECT_EQ(rig.engine.metrics()["fp4/scale/sat_frac"], 0.0);
  EXPECT_NE(refusal([&] { calibrate_kv(bf16.model, weights, {}); }), "");
}

}  // namespace
}  // namespace lockstep::rollout
