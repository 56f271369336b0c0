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
