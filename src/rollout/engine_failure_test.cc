// A sink that refuses records: no pass is half written, and the next call goes on as if nothing had
// been.
#include <gtest/gtest.h>

#include <algorithm>

#include "rollout/engine_rig.h"

namespace lockstep::rollout {
namespace {

using testing::expect_same;
using testing::MemoryTrace;
using testing::refusal;
using testing::request;
using testing::Rig;
using testing::small_agreement;

using EngineFailureOn = fixture::OnDevice;

INSTANTIATE_TEST_SUITE_P(Devices, EngineFailureOn, ::testing::ValuesIn(devices()), name_of_device);

std::vector<Request> two_prompts() { return {request(4, 12, 2, 5), request(5, 37, 1, 6)}; }

/// Steps to the end, whatever is thrown, and counts that.
std::vector<Trajectory> go_on(Rig& rig, int& refusals) {
  std::vector<Trajectory> out;
  const auto take = [&](std::vector<Trajectory> more) {
    for (Trajectory& t : more) out.push_back(std::move(t));
  };
  while (!rig.engine.idle()) {
    if (!refusal([&] { take(rig.engine.step()); }).empty()) ++refusals;
  }
  take(rig.engine.abort());  // what had ended when the last step threw
  std::sort(out.begin(), out.end(), [](const Trajectory& a, const Trajectory& b) {
    return std::pair(a.prompt, a.sample) < std::pair(b.prompt, b.sample);
  });
  return out;
}

/// Of the records of a span all are there, or none.
int missing_spans(const Rig& rig, const Trajectory& t, const MemoryTrace::Records& expected) {
  int missing = 0;
  const MemoryTrace::Records all = rig.trace.records(t);
  for (const Span& span : t.path) {
    const auto within = [&](const MemoryTrace::Records& of) {
      return MemoryTrace::Records(of.lower_bound({span.first, {}, {}}),
                                  of.lower_bound({span.first + span.count, {}, {}}));
    };
    const MemoryTrace::Records ours = within(all);
    missing += ours.empty() ? 1 : 0;
    EXPECT_TRUE(ours.empty() || ours == within(expected)) << "span at " << span.first;
  }
  return missing;
}

TEST_P(EngineFailureOn, ARefusedRecordTakesBackItsPassAndNoMore) {
  Options options;
  options.tokens_per_pass = 20;  // the longer prompt is read in two pieces
  Rig reference(small_agreement(), options);
  const std::vector<Trajectory> expected = generate(reference.engine, two_prompts());
  ASSERT_EQ(expected.size(), 3u);
  int whole = 0, given_up = 0;
  for (std::int64_t at = 1; at <= reference.trace.appends; at += 5) {
    SCOPED_TRACE(at);
    Rig rig(small_agreement(), options);
    rig.trace.refuses_at = at;
    for (const Request& r : two_prompts()) rig.engine.submit(r);
    int refusals = 0;
    const std::vector<Trajectory> out = go_on(rig, refusals);
    EXPECT_EQ(refusals, 1);
    EXPECT_EQ(rig.trace.open_spans(), 0u);
    ASSERT_EQ(out.size(), expected.size());
    ASSERT_TRUE(rig.trace.refused);
    const bool at_release = *rig.trace.refused == Site::kK || *rig.trace.refused == Site::kV;
    int missing = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      expect_same(out[i], expected[i]);
      missing += missing_spans(rig, out[i], reference.trace.records(expected[i]));
    }
    EXPECT_EQ(missing > 0, at_release);
    (missing > 0 ? given_up : whole) += 1;
  }
  EXPECT_GT(whole, 3);
  EXPECT_GT(given_up, 0);
}

TEST_P(EngineFailureOn, WhatAFailedPassMetIsNotCounted) {
  Rig rig(small_agreement());
  for (const Request& r : two_prompts()) rig.engine.submit(r);
  rig.trace.refuses_at = 6;
  while (refusal([&] { rig.engine.step(); }).empty()) {
  }
  EXPECT_FALSE(rig.engine.metrics().contains("fp4/scale/sat_frac"));
  rig.engine.step();
  EXPECT_TRUE(rig.engine.metrics().contains("fp4/scale/sat_frac"));
}

/// And what the passes before it met is.
TEST_P(EngineFailureOn, WhatEarlierPassesMetStaysCounted) {
  const auto scales = [](Rig& rig) {
    Metrics found = rig.engine.metrics();
    std::erase_if(found, [](const auto& metric) { return !metric.first.starts_with("fp4/"); });
    return found;
  };
  Rig reference(small_agreement());
  generate(reference.engine, two_prompts());
  const Metrics expected = scales(reference);
  ASSERT_TRUE(expected.contains("fp4/scale/zero_frac"));
  for (const std::int64_t at : {reference.trace.appends / 3, 2 * reference.trace.appends / 3}) {
    Rig rig(small_agreement());
    for (const Request& r : two_prompts()) rig.engine.submit(r);
    rig.trace.refuses_at = at;
    int refusals = 0;
    go_on(rig, refusals);
    EXPECT_EQ(refusals, 1);
    EXPECT_EQ(scales(rig), expected) << at;
  }
}

/// Steps to the end and aborts where that fails, and tells of the first failure.
void step_or_abort(Engine& engine) {
  try {
    while (!engine.idle()) engine.step();
  } catch (const Error&) {
    try {
      engine.abort();
    } catch (const Error&) {  // it too has records to hand over
    }
    throw;
  }
}

TEST_P(EngineFailureOn, AnEngineIsIdleBehindACallThatFailed) {
  const std::vector<Request> three = {request(4, 12, 2, 5), request(5, 37, 1, 6),
                                      request(6, 3, 1, 4)};
  Options options;
  options.max_sequences = 2;  // the last waits
  options.tokens_per_pass = 20;
  options.reuse_prefixes = false;
  Rig reference(small_agreement(), options), rig(small_agreement(), options);
  const std::vector<Trajectory> expected = generate(reference.engine, three);
  const std::int64_t all = reference.trace.appends;
  reference.engine.rescore(expected);
  const std::int64_t scored = reference.trace.appends - all;
  // The sink refuses one append, or all that comes behind it too.
  for (std::int64_t at = 1; at <= 2 * all; at += at < all ? 1 : 6) {
    SCOPED_TRACE(at);
    const std::int64_t n = (at - 1) % all + 1;
    const auto fails = [&](const std::function<void()>& call) {
      rig.trace.refuses_at = rig.trace.appends + n;
      rig.trace.stays_broken = at <= all;
      EXPECT_EQ(refusal(call), "the sink refuses these rows");
      EXPECT_TRUE(rig.engine.idle());
      EXPECT_TRUE(rig.engine.abort().empty());
      rig.trace.stays_broken = false;
      rig.trace.refused.reset();
    };
    fails([&] { generate(rig.engine, three); });
    if (n <= scored && n % 3 == 0) fails([&] { rig.engine.rescore(expected); });
    for (const Request& r : three) rig.engine.submit(r);
    if (n % 3 == 1) fails([&] { step_or_abort(rig.engine); });
    rig.engine.abort();
    if (n % 3 != 2) continue;
    expect_same(rig, generate(rig.engine, three), reference, expected);
  }
  expect_same(rig, generate(rig.engine, three), reference, expected);
}

TEST_P(EngineFailureOn, NewWeightsDoNotBeginBeforeTheLastRecordsAreKept) {
  Rig reference(small_agreement()), rig(small_agreement());
  const std::vector<Trajectory> expected = generate(reference.engine, two_prompts());
  for (const Request& r : two_prompts()) rig.engine.submit(r);
  for (int i = 0; i < 4; ++i) rig.engine.step();
  rig.trace.refuses_at = rig.trace.appends + 1;
  int refusals = 0;
  if (on_cuda()) {
    EXPECT_NE(refusal([&] { rig.update(2); }).find("refuses"), std::string::npos);
    refusals = 1;
  }
  const std::vector<Trajectory> out = go_on(rig, refusals);
  EXPECT_EQ(refusals, 1);
  expect_same(rig, out, reference, expected);
}

}  // namespace
}  // namespace lockstep::rollout
