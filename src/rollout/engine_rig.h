/// For tests: an engine with weights and a sink, requests for it, and what must hold of its
/// results.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "rollout/door.h"
#include "rollout/engine.h"
#include "rollout/testing.h"

namespace lockstep::rollout::testing {

/// An engine with weights and a sink.
struct Rig {
  explicit Rig(const Agreement& a, Options options = {}, bool records = true)
      : agreement(a),
        comm(Comm::single()),
        engine(a, options, fixture::device_under_test(), records ? &trace : nullptr, *comm) {
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

/// Whether the device under test has what that takes.
inline bool runs_here(const Agreement& a, const Options& options = {}) {
  try {
    require_runs(a, options, fixture::device_under_test());
  } catch (const Error&) {
    return false;
  }
  return true;
}

inline Request request(std::int64_t prompt, std::int32_t tokens, std::int32_t samples,
                       std::int32_t more = 24) {
  Request r;
  r.prefix.prompt = PromptId{prompt};
  r.prefix.tokens = random_tokens(tokens, static_cast<std::uint64_t>(prompt));
  // Some leave their likeliest tokens, the others none.
  r.prefix.sampling = {
      .temperature = 0.8f, .max_new_tokens = more, .top_logprobs = prompt % 2 == 0 ? 0 : 5};
  r.num_samples = samples;
  r.seed = 11;
  return r;
}

/// Prompts of mixed lengths, one longer than a page and one of a whole number of pages.
inline std::vector<Request> batch() {
  return {request(3, 5, 3), request(4, 37, 2), request(7, 1, 4), request(8, 16, 3, 9),
          request(9, 50, 1)};
}

inline void expect_same(const Trajectory& a, const Trajectory& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.response_mask, b.response_mask);
  EXPECT_EQ(a.rollout_logp, b.rollout_logp);             // bit for bit: no tolerance
  if (!a.top_tokens.empty() && !b.top_tokens.empty()) {  // what is scored has none
    EXPECT_EQ(a.top_tokens, b.top_tokens);
    EXPECT_EQ(a.top_logp, b.top_logp);
  }
  EXPECT_EQ(a.finish, b.finish);
}

/// Tokens, log-probs and records: all that a rollout leaves.
inline void expect_same(const Rig& a, const std::vector<Trajectory>& of_a, const Rig& b,
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
inline void expect_complete(const Rig& rig, const Trajectory& t) {
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
        const bool full = site != Site::kRouter && a.rule(site).quantizes() &&
                          audited(a.seed, key, a.guide.audit_every) && kept != Encoding::kCodes &&
                          kept != Encoding::kCodes8 &&
                          (site != Site::kW2In || a.guide.follows(place));
        if (full) {
          ++expected;
          const Encoding codes = a.layout(place, Encoding::kCodes).encoding;
          EXPECT_TRUE(records.contains({key.position, place, codes})) << key.position;
        }
      }
    }
  }
  EXPECT_EQ(records.size(), expected);
}

inline std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace lockstep::rollout::testing
