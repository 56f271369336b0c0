#include "rollout/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>

#include "base/error.h"
#include "rollout/kv_cache.h"
#include "rollout/kv_rows.h"
#include "rollout/testing.h"

namespace lockstep::rollout {
namespace {

using testing::MemoryTrace;
using testing::random_tokens;
using testing::small_agreement;
using testing::small_bf16;

/// An engine with weights and a sink.
struct Rig {
  explicit Rig(const Agreement& a, Options options = {}, bool records = true)
      : agreement(a),
        comm(Comm::single()),
        engine(a, options, Device{}, records ? &trace : nullptr, *comm) {
    update(1);
  }
  void update(std::int64_t version) {
    fixture::load(engine.weights(),
                  fixture::random_weights(agreement, static_cast<std::uint32_t>(version)),
                  agreement.contract, version);
  }

  Agreement agreement;
  std::unique_ptr<Comm> comm;
  MemoryTrace trace;
  Engine engine;
};

Request request(std::int64_t prompt, std::int32_t tokens, std::int32_t samples,
                std::int32_t more = 24) {
  Request r;
  r.prefix.prompt = PromptId{prompt};
  r.prefix.tokens = random_tokens(tokens, static_cast<std::uint64_t>(prompt));
  r.prefix.sampling = {.temperature = 0.8f, .max_new_tokens = more};
  r.num_samples = samples;
  r.seed = 11;
  return r;
}

/// Prompts of mixed lengths, one longer than a page and one of a whole number of pages.
std::vector<Request> batch() {
  return {request(3, 5, 3), request(4, 37, 2), request(7, 1, 4), request(8, 16, 3, 9),
          request(9, 50, 1)};
}

void expect_same(const Trajectory& a, const Trajectory& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.response_mask, b.response_mask);
  EXPECT_EQ(a.rollout_logp, b.rollout_logp);  // bit for bit: no tolerance
  EXPECT_EQ(a.finish, b.finish);
}

/// Tokens, log-probs and records: all that a rollout leaves.
void expect_same(const Rig& a, const std::vector<Trajectory>& of_a, const Rig& b,
                 const std::vector<Trajectory>& of_b) {
  ASSERT_EQ(of_a.size(), of_b.size());
  for (std::size_t i = 0; i < of_a.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(of_a[i], of_b[i]);
    EXPECT_TRUE(a.trace.records(of_a[i]) == b.trace.records(of_b[i]));
  }
}

/// Positions 0 .. T-2 of every trajectory have the records that the agreement asks for, and the
/// last token has none.
void expect_complete(const Rig& rig, const Trajectory& t) {
  const Agreement& a = rig.agreement;
  std::int32_t covered = 0;
  for (const Span& span : t.path) {
    EXPECT_EQ(span.first, covered);
    EXPECT_GT(span.count, 0);
    EXPECT_EQ(span.prefix_hash,
              hash_tokens(std::span(t.tokens).first(static_cast<std::size_t>(span.first))));
    covered += span.count;
  }
  EXPECT_EQ(covered + 1, static_cast<std::int32_t>(t.tokens.size()));
  const MemoryTrace::Records records = rig.trace.records(t);
  std::size_t expected = 0;
  for (const TokenKey& key : keys(t)) {
    for (std::int32_t l = 0; l < a.model.num_layers; ++l) {
      for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV, Site::kRouter}) {
        const Place place = {Layer{l}, site};
        const Encoding kept = a.encoding(place);
        if (kept != Encoding::kNone) {
          ++expected;
          EXPECT_TRUE(records.contains({key.position, place, kept})) << key.position;
        }
        const bool full = site != Site::kRouter && a.rule(site).element == Element::kE2m1 &&
                          audited(a.seed, key, a.guide.audit_every) && kept != Encoding::kCodes &&
                          (site != Site::kW2In || a.guide.follows(place));
        if (full) {
          ++expected;
          EXPECT_TRUE(records.contains({key.position, place, Encoding::kCodes})) << key.position;
        }
      }
    }
  }
  EXPECT_EQ(records.size(), expected);
}

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Engine, R74_EveryPositionButTheLastHasItsRecords) {
  for (const Guidance mode :
       {Guidance::kLsb, Guidance::kLsbScaleMod4, Guidance::kFullGuided, Guidance::kRolloutScale}) {
    Rig rig(small_agreement(mode));
    const std::vector<Trajectory> out = generate(rig.engine, batch());
    ASSERT_EQ(out.size(), 13u);
    for (const Trajectory& t : out) expect_complete(rig, t);
    EXPECT_EQ(rig.trace.open_spans(), 0u);
  }
}

TEST(Engine, ResultsComeInTheOrderOfTheRequests) {
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
TEST(Engine, R89_ResultsDependOnNothingElseInTheBatch) {
  Agreement noisy = small_agreement();
  for (const auto& [agreement, noise] :
       {std::pair{small_agreement(Guidance::kLsb), 0.0f}, std::pair{small_bf16(), 0.0f},
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

TEST(Engine, SamplesThatShareAPromptEqualThoseThatReadItThemselves) {
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

// The records of a prompt that G samples share are kept once.
TEST(Engine, BytesPerTokenAreThoseOfTheFormula) {
  Agreement a = small_agreement();
  a.guide.audit_every = 0;
  Rig rig(a);
  const std::vector<Trajectory> out = generate(rig.engine, {request(4, 37, 4)});
  std::int64_t tokens = 37;
  for (const Trajectory& t : out) tokens += static_cast<std::int64_t>(t.tokens.size()) - 1 - 37;
  EXPECT_EQ(rig.trace.bytes(), tokens * a.bytes_per_token());
}

TEST(Engine, RescoringAtUnchangedWeightsFindsTheSameLogProbsAndRecords) {
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

TEST(Engine, ScoresGivenTokensWithoutAMaskFromTheSecondOn) {
  Rig rig(small_bf16(), {}, false);
  Trajectory t = {.prompt = PromptId{1}, .tokens = random_tokens(20, 2)};
  const std::vector<Trajectory> out = rig.engine.rescore(std::span(&t, 1));
  EXPECT_EQ(out[0].rollout_logp[0], 0.0f);
  for (std::size_t i = 1; i < 20; ++i) EXPECT_LT(out[0].rollout_logp[i], 0.0f);
  t.tokens.resize(1);
  EXPECT_EQ(rig.engine.rescore(std::span(&t, 1))[0].tokens.size(), 1u);
}

TEST(Engine, AuditTokensKeepTheCodesThatTheOtherRecordsCameFrom) {
  Rig rig(small_agreement(Guidance::kLsb));
  const std::vector<Trajectory> out = generate(rig.engine, batch());
  int compared = 0;
  for (const Trajectory& t : out) {
    const MemoryTrace::Records records = rig.trace.records(t);
    for (const auto& [key, full] : records) {
      const auto& [position, place, encoding] = key;
      const auto compact = records.find({position, place, Encoding::kLsb});
      if (encoding != Encoding::kCodes || compact == records.end()) continue;
      RowLayout layout = rig.agreement.layout(place, Encoding::kLsb);
      const auto exponents = static_cast<std::size_t>(layout.exponents);
      layout.exponents = 0;
      std::vector<std::byte> derived(static_cast<std::size_t>(layout.bytes()));
      record_from_row(full.data(), layout, derived.data());
      derived.insert(derived.end(), full.end() - static_cast<std::ptrdiff_t>(exponents),
                     full.end());
      EXPECT_TRUE(derived == compact->second);
      ++compared;
    }
  }
  EXPECT_GT(compared, 100);
}

// A stale or unwritten buffer would repeat one row, or name one expert twice.
TEST(Engine, R71_R78_RecordsDifferFromTokenToToken) {
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

TEST(Engine, StopsAtStopTokensBudgetsAndTheContextsEnd) {
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
TEST(Engine, R75_AShorterBudgetIsAPrefixOfALongerOne) {
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
TEST(Engine, R76_AWeightUpdateSendsRunningSamplesIntoNewSpans) {
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

// R64: nothing that older weights left is used for a new request, nor a prompt half read.
TEST(Engine, R64_NewRequestsSeeNothingOfOlderWeights) {
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

TEST(Engine, EvaluationsShareThePrefixesOfEarlierPrompts) {
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

// A next turn reads what is new, and gives the boundary token, which no pass had read, its record.
TEST(Engine, R74_ANextTurnFillsTheBoundaryRow) {
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

TEST(Engine, AnAbortedSampleGoesOnAsIfNothingHadHappened) {
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

// Old weights' K and V cannot be had again: what depends on them is recorded anew and masked.
TEST(Engine, ATrajectoryOfOlderWeightsIsReadAnewAndMasked) {
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

TEST(Engine, AFullStoreHoldsBackAdmissionAndLosesNothing) {
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

TEST(Engine, AdmissionNeverPromisesMoreThanTheStoreHas) {
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

TEST(Engine, GreedyIsTopKOneAndForEvaluation) {
  Rig rig(small_bf16(), {}, false);
  Request r = request(4, 12, 3);
  r.prefix.sampling.top_k = 1;
  const std::vector<Trajectory> out = generate(rig.engine, {r});
  EXPECT_EQ(out[0].tokens, out[1].tokens);
  EXPECT_EQ(out[0].tokens, out[2].tokens);
  Rig recording(small_bf16());
  EXPECT_NE(refusal([&] { recording.engine.submit(r); }).find("evaluation"), std::string::npos);
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
  a.contract.kv_exponents.pop_back();
  EXPECT_TRUE(has(make(a, {}), "kv_exponents"));
  EXPECT_TRUE(has(make(small_agreement(), {.cache_bytes = 1}), "cache_bytes is 1"));
  EXPECT_TRUE(has(make(small_agreement(), {.page_tokens = 0}), "page_tokens"));
  EXPECT_TRUE(has(make(small_agreement(), {.tokens_per_pass = 0}), "tokens_per_pass"));

  Engine empty(small_agreement(), {}, Device{}, nullptr, *comm);
  EXPECT_TRUE(has(refusal([&] { empty.step(); }), "no weights"));
  EXPECT_TRUE(has(refusal([&] { empty.weights().begin(WeightVersion{1}, contracts::bf16().id()); }),
                  "contract"));
}

TEST(Engine, NonFiniteNumbersStopItBeforeItSamples) {
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

TEST(Engine, R95_MetricsCountWhatHappened) {
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
