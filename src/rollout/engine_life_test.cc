// What happens between requests: new weights, next turns, full stores, aborts, refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "rollout/engine_rig.h"
#include "rollout/kv_cache.h"

namespace lockstep::rollout {
namespace {

using testing::expect_complete;
using testing::expect_same;
using testing::MemoryTrace;
using testing::random_tokens;
using testing::refusal;
using testing::request;
using testing::Rig;
using testing::small_agreement;
using testing::small_bf16;

using EngineLifeOn = fixture::OnDevice;

INSTANTIATE_TEST_SUITE_P(Devices, EngineLifeOn, ::testing::ValuesIn(devices()), name_of_device);

TEST_P(EngineLifeOn, R76_AWeightUpdateSendsRunningSamplesIntoNewSpans) {
  for (const std::int64_t cache_tokens : {10000, 90}) {  // the second with parked samples
    Options options;
    options.page_tokens = 8;
    options.cache_bytes = cache_tokens / 8 * cache_layout(small_agreement(), 8)[0].k.page_bytes;
    Rig reference(small_agreement(), options), rig(small_agreement(), options);
    const std::vector<Trajectory> expected =
        generate(reference.engine, {request(4, 30, 4, 24), request(5, 12, 4, 24)});
    rig.engine.submit(request(4, 30, 4, 24));
    rig.engine.submit(request(5, 12, 4, 24));
    std::vector<Trajectory> out;
    for (int i = 0; i < 9; ++i) {
      for (Trajectory& t : rig.engine.step()) out.push_back(std::move(t));
    }
    rig.update(2);
    while (!rig.engine.idle()) {
      for (Trajectory& t : rig.engine.step()) out.push_back(std::move(t));
    }
    ASSERT_EQ(out.size(), 8u);
    int crossed = 0;
    for (const Trajectory& t : out) {
      expect_complete(rig, t);
      const auto& original = *std::find_if(expected.begin(), expected.end(), [&](const auto& e) {
        return e.prompt == t.prompt && e.sample == t.sample;
      });
      const MemoryTrace::Records before = reference.trace.records(original);
      std::int32_t old = 0;  // positions read with the old weights
      for (const Span& span : t.path) {
        if (span.version == WeightVersion{1}) old = span.first + span.count;
      }
      if (old > 0 && t.path.back().version == WeightVersion{2}) ++crossed;
      for (const auto& [key, row] : rig.trace.records(t)) {
        const auto& [position, place, encoding] = key;
        if (position >= old || encoding == Encoding::kCodes) continue;
        EXPECT_TRUE(before.at(key) == row);
      }
      for (std::int32_t i = 0; i <= old && old > 0; ++i) {
        EXPECT_EQ(t.tokens[static_cast<std::size_t>(i)],
                  original.tokens[static_cast<std::size_t>(i)]);
      }
    }
    EXPECT_GT(crossed, 0);
    EXPECT_EQ(rig.trace.open_spans(), 0u);
  }
}

TEST_P(EngineLifeOn, R64_NewRequestsSeeNothingOfOlderWeights) {
  for (const bool records : {true, false}) {
    Options options;
    options.tokens_per_pass = 10;
    Rig fresh(small_agreement(), options, records), rig(small_agreement(), options, records);
    fresh.update(2);
    const std::vector<Trajectory> expected = generate(fresh.engine, {request(4, 37, 2)});

    generate(rig.engine, {request(4, 37, 2)});  // the same prompt, with the old weights
    rig.engine.submit(request(5, 37, 2));
    rig.engine.step();  // a prompt is half read
    rig.update(2);
    std::vector<Trajectory> half;
    while (!rig.engine.idle()) {
      for (Trajectory& t : rig.engine.step()) half.push_back(std::move(t));
    }
    for (const Trajectory& t : half) {
      for (const Span& span : t.path) EXPECT_EQ(span.version, WeightVersion{2});
    }
    rig.engine.metrics();
    const std::vector<Trajectory> out = generate(rig.engine, {request(4, 37, 2)});
    EXPECT_EQ(rig.engine.metrics()["rollout/recalled_tokens"], 0.0);
    for (std::size_t i = 0; i < out.size(); ++i) expect_same(out[i], expected[i]);
  }
}

TEST_P(EngineLifeOn, EvaluationsShareThePrefixesOfEarlierPrompts) {
  Options without;
  without.reuse_prefixes = false;
  Rig reference(small_agreement(), without, false), rig(small_agreement(), {}, false);
  Request longer = request(4, 37, 2);
  longer.prefix.tokens = request(5, 60, 2).prefix.tokens;
  Request shorter = request(6, 60, 2);
  shorter.prefix.tokens = longer.prefix.tokens;
  shorter.prefix.tokens[40] = 3;
  for (Rig* r : {&reference, &rig}) generate(r->engine, {longer});
  rig.engine.metrics();
  const std::vector<Trajectory> a = generate(rig.engine, {shorter}),
                                b = generate(reference.engine, {shorter});
  EXPECT_EQ(rig.engine.metrics()["rollout/recalled_tokens"], 32.0);
  for (std::size_t i = 0; i < a.size(); ++i) expect_same(a[i], b[i]);
}

TEST_P(EngineLifeOn, R74_ANextTurnFillsTheBoundaryRow) {
  std::vector<Trajectory> results;
  for (const bool reuse : {true, false}) {
    Options options;
    options.reuse_prefixes = reuse;
    Agreement agreement = small_agreement();
    agreement.guide.audit_every = 0;
    Rig rig(agreement, options);
    const Trajectory first = generate(rig.engine, {request(4, 37, 2)})[1];
    const std::size_t read = first.tokens.size() - 1;
    Request next;
    next.prefix = first;
    for (const Token token : random_tokens(9, 77)) next.prefix.tokens.push_back(token);
    next.prefix.sampling.max_new_tokens = 8;
    next.seed = 11;
    rig.engine.metrics();
    const Trajectory turn = generate(rig.engine, {next})[0];
    EXPECT_EQ(rig.engine.metrics()["rollout/recalled_tokens"],
              reuse ? static_cast<double>(read / 16 * 16) : 0.0);
    EXPECT_EQ(turn.sample, 1);
    ASSERT_EQ(turn.path.size(), 4u);  // prompt, response, what the user said, response
    EXPECT_EQ(turn.path[2].first, static_cast<std::int32_t>(read));
    expect_complete(rig, turn);
    // All four spans are what one pass over all tokens gives, the masked log-probs too.
    const std::vector<Trajectory> scored = rig.engine.rescore(std::span(&turn, 1));
    expect_same(rig, {turn}, rig, scored);
    results.push_back(turn);
  }
  expect_same(results[0], results[1]);
}

// R87: text that was decoded and encoded again may come back as other tokens; then the records of
// the earlier turns are of another text, and the sample does not go on.
TEST_P(EngineLifeOn, R87_APathIsTakenUpBehindItsOwnTokensAlone) {
  Rig rig(small_agreement());
  const Trajectory first = generate(rig.engine, {request(4, 37, 2)})[1];
  ASSERT_EQ(first.path.size(), 2u);
  Request next;
  next.prefix = first;
  next.prefix.tokens.push_back(3);
  Token& token = next.prefix.tokens[5];  // of the prompt, which the second span hangs on
  token = token == 7 ? 8 : 7;
  EXPECT_NE(refusal([&] { rig.engine.submit(next); })
                .find("sample 1: its path was recorded behind other tokens than those before "
                      "position 37"),
            std::string::npos);
  token = first.tokens[5];
  EXPECT_EQ(refusal([&] { rig.engine.submit(next); }), "");
  rig.engine.abort();
}

TEST_P(EngineLifeOn, AnAbortedSampleGoesOnAsIfNothingHadHappened) {
  Agreement agreement = small_agreement();
  agreement.guide.audit_every = 0;
  Rig reference(agreement), rig(agreement);
  const std::vector<Trajectory> expected = generate(reference.engine, {request(4, 37, 3)});
  rig.engine.submit(request(4, 37, 3));
  rig.engine.submit(request(5, 10, 2));
  std::size_t ended = 0;
  for (int i = 0; i < 6; ++i) ended += rig.engine.step().size();
  rig.engine.submit(request(6, 10, 2));  // will not have begun
  const std::vector<Trajectory> aborted = rig.engine.abort();
  EXPECT_TRUE(rig.engine.idle());
  EXPECT_EQ(rig.trace.open_spans(), 0u);
  ASSERT_EQ(aborted.size() + ended, 7u);
  ASSERT_GT(aborted.size(), 4u);
  for (const Trajectory& t : aborted) {
    EXPECT_EQ(t.finish, Finish::kAborted);
    if (t.prompt.value != 4) continue;
    expect_complete(rig, t);
    Request rest = {.prefix = t, .num_samples = 1, .seed = 11};
    rest.prefix.sampling.max_new_tokens = static_cast<std::int32_t>(37 + 24 - t.tokens.size());
    const std::vector<Trajectory> out = generate(rig.engine, {rest});
    expect_same(reference, {expected[static_cast<std::size_t>(t.sample)]}, rig, out);
  }
  EXPECT_EQ(aborted.back().tokens.size(), 10u);
}

TEST_P(EngineLifeOn, ATrajectoryOfOlderWeightsIsReadAnewAndMasked) {
  Rig rig(small_agreement());
  const Trajectory old = generate(rig.engine, {request(4, 37, 1, 6)})[0];
  rig.update(2);
  rig.engine.metrics();
  Request rest = {.prefix = old, .num_samples = 1, .seed = 11};
  rest.prefix.sampling.max_new_tokens = 5;
  const Trajectory t = generate(rig.engine, {rest})[0];
  expect_complete(rig, t);
  for (const Span& span : t.path) EXPECT_EQ(span.version, WeightVersion{2});
  for (std::size_t i = 0; i < t.tokens.size(); ++i) {
    EXPECT_EQ(t.response_mask[i], i >= old.tokens.size() ? 1 : 0);
  }
  EXPECT_EQ(rig.engine.metrics()["rollout/rewritten_tokens"],
            static_cast<double>(old.tokens.size() - 37));
}

TEST_P(EngineLifeOn, AFullStoreHoldsBackAdmissionAndLosesNothing) {
  Rig rig(small_agreement());
  const std::vector<Trajectory> first = generate(rig.engine, {request(4, 10, 2, 8)});
  rig.trace.budget = rig.trace.bytes();
  const std::string message = refusal([&] { generate(rig.engine, {request(5, 10, 2, 8)}); });
  EXPECT_NE(message.find("no room"), std::string::npos) << message;
  EXPECT_TRUE(rig.engine.idle());
  for (const Trajectory& t : first) expect_complete(rig, t);
  rig.trace.budget = 1 << 30;
  EXPECT_EQ(generate(rig.engine, {request(5, 10, 2, 8)}).size(), 2u);
}

TEST_P(EngineLifeOn, AdmissionNeverPromisesMoreThanTheStoreHas) {
  Agreement agreement = small_agreement();
  Rig rig(agreement);
  rig.trace.budget = 5 * 20 * agreement.bytes_per_token();
  for (std::int64_t prompt = 0; prompt < 6; ++prompt) rig.engine.submit(request(prompt, 6, 2, 8));
  while (!rig.engine.idle() && !rig.engine.held_back()) {
    rig.engine.step();
    ASSERT_LE(rig.trace.bytes(), rig.trace.budget);
  }
  EXPECT_TRUE(rig.engine.held_back());
  EXPECT_GT(rig.trace.bytes(), rig.trace.budget / 2);
}

TEST(Engine, SaysInOneLineWhatIsWrong) {
  Rig rig(small_agreement());
  const auto submit = [&](const std::function<void(Request&)>& change) {
    Request r = request(4, 10, 2);
    change(r);
    return refusal([&] { rig.engine.submit(r); });
  };
  const auto has = [](const std::string& message, const char* part) {
    return message.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(submit([](Request& r) { r.prefix.tokens = random_tokens(96, 1); }),
                  "prompt 4 has 96 tokens, the model's context 96"));
  EXPECT_TRUE(has(submit([](Request& r) { r.prefix.tokens[3] = 50; }), "token 3 is 50"));
  EXPECT_TRUE(has(submit([](Request& r) { r.prefix.tokens.clear(); }), "no tokens"));
  EXPECT_TRUE(has(submit([](Request& r) { r.num_samples = 0; }), "num_samples is 0"));
  EXPECT_TRUE(has(submit([](Request& r) { r.num_samples = 20000; }), "samples 0 to 19999"));
  EXPECT_TRUE(has(submit([](Request& r) { r.prefix.prompt.value = -1; }), "prompt -1"));
  EXPECT_TRUE(
      has(submit([](Request& r) { r.prefix.sampling.temperature = 0.0f; }), "temperature is 0"));
  EXPECT_TRUE(has(submit([](Request& r) { r.prefix.path = {{.id = {}, .first = 1, .count = 2}}; }),
                  "expected at 0"));
  EXPECT_TRUE(rig.engine.idle());

  const std::unique_ptr<Comm> comm = Comm::single();
  const auto make = [&](const Agreement& a, Options options) {
    return refusal([&] { Engine(a, options, Device{}, &rig.trace, *comm); });
  };
  Agreement a = small_bf16();
  a.guide = small_agreement().guide;
  EXPECT_TRUE(has(make(a, {}), "guide.sites has w13_in in layer 1"));
  a = small_agreement();
  a.contract.source = SourceDtype::kF32;
  EXPECT_TRUE(has(make(a, {}), "contract.source is f32"));
  a = small_agreement();
  a.contract.kv_exponents.pop_back();
  EXPECT_TRUE(has(make(a, {}), "kv_exponents"));
  EXPECT_TRUE(has(make(small_agreement(), {.cache_bytes = 1}), "rollout.cache is 1"));
  EXPECT_TRUE(has(make(small_agreement(), {.page_tokens = 0}), "page_tokens"));
  EXPECT_TRUE(has(make(small_agreement(), {.tokens_per_pass = 0}), "tokens_per_pass"));

  Engine empty(small_agreement(), {}, Device{}, nullptr, *comm);
  EXPECT_TRUE(has(refusal([&] { empty.step(); }), "no weights"));
  EXPECT_TRUE(has(refusal([&] { empty.weights().begin(WeightVersion{1}, contracts::bf16().id()); }),
                  "contract"));
}

/// The one static scale that an engine reads beside codes: the cache's.
TEST(Engine, R29_AStaticScaleThatIsMissingIsRefusedWhereItIsReadAndIgnoredWhereNot) {
  const std::unique_ptr<Comm> comm = Comm::single();
  const auto made = [&](const Agreement& a) {
    return refusal([&] { Engine(a, {}, Device{}, nullptr, *comm); });
  };
  Agreement a = small_agreement();
  a.contract.kv_exponents.clear();
  EXPECT_NE(made(a).find("0 kv_exponents"), std::string::npos) << made(a);
  // A BF16 cache reads none, and activations bring their own scales.
  a.contract.k = a.contract.v = {};
  a.guide = {};
  EXPECT_EQ(made(a), "");
}

TEST_P(EngineLifeOn, NonFiniteNumbersStopItBeforeItSamples) {
  Rig rig(small_agreement());
  rig.engine.submit(request(4, 10, 2));
  rig.engine.step();
  rig.engine.step();
  std::vector<fixture::OwnedWeight> weights = fixture::random_weights(rig.agreement, 1);
  for (fixture::OwnedWeight& w : weights) {
    if (w.id.role == WeightId::Role::kHead)
      std::fill(w.plain.begin(), w.plain.end(), to_bf16(3e38f));
    if (w.id.role == WeightId::Role::kFinalNorm) {
      std::fill(w.plain.begin(), w.plain.end(), to_bf16(1e30f));
    }
  }
  fixture::load(rig.engine.weights(), weights, rig.agreement.contract, 2);
  EXPECT_NE(refusal([&] { rig.engine.step(); }).find("not finite"), std::string::npos);
  for (const Trajectory& t : rig.engine.abort()) expect_complete(rig, t);
  EXPECT_EQ(rig.trace.open_spans(), 0u);
}

}  // namespace
}  // namespace lockstep::rollout
