/// For tests: a sink in memory that checks its callers, and agreements on a small model.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "rollout/forward_fixture.h"

namespace lockstep::rollout::testing {

/// Keeps every row, and fails the test where an engine breaks the sink's rules.
class MemoryTrace final : public TraceSink {
 public:
  using Key = std::tuple<std::uint64_t, std::int32_t, Place, Encoding>;  // span, position

  void open(const Span& span, ContractId) override {
    require_whole();
    forget(span.id, 0);
    spans_[span.id.value] = span;
    sealed_.erase(span.id.value);
  }
  bool admits(std::int64_t more) const override { return bytes() + more <= budget; }
  void append(std::span<const TokenKey> tokens, Rows<const std::byte> rows) override {
    if (++appends == refuses_at || (stays_broken && appends > refuses_at)) {
      refused = rows.place.site;
      throw Error("the sink refuses these rows");
    }
    const auto width = static_cast<std::size_t>(rows.layout.bytes());
    ASSERT_EQ(rows.bytes.size(), tokens.size() * width);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto span = spans_.find(tokens[i].span.value);
      ASSERT_TRUE(span != spans_.end()) << "append to a span that is not open";
      EXPECT_FALSE(sealed_.contains(tokens[i].span.value)) << "append to a sealed span";
      EXPECT_GE(tokens[i].position, span->second.first);
      const auto row = rows.bytes.subspan(i * width, width);
      const bool is_new = rows_
                              .emplace(Key{tokens[i].span.value, tokens[i].position, rows.place,
                                           rows.layout.encoding},
                                       std::vector<std::byte>(row.begin(), row.end()))
                              .second;
      EXPECT_TRUE(is_new) << "position " << tokens[i].position << " is recorded twice";
    }
  }
  void truncate(SpanId span, std::int32_t position) override {
    require_whole();
    forget(span, position);
  }
  void seal(SpanId span) override {
    require_whole();
    sealed_.insert(span.value);
  }

  bool sealed(SpanId span) const { return sealed_.contains(span.value); }
  std::size_t open_spans() const { return spans_.size() - sealed_.size(); }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& [key, row] : rows_) sum += static_cast<std::int64_t>(row.size());
    return sum;
  }
  const std::map<Key, std::vector<std::byte>>& rows() const { return rows_; }

  /// All rows of a trajectory, by position and not by span.
  using Records = std::map<std::tuple<std::int32_t, Place, Encoding>, std::vector<std::byte>>;
  Records records(const Trajectory& t) const {
    Records records;
    for (const Span& span : t.path) {
      EXPECT_TRUE(sealed(span.id));
      const auto end = rows_.lower_bound({span.id.value, span.first + span.count, Place{}, {}});
      for (auto it = rows_.lower_bound({span.id.value, span.first, Place{}, {}}); it != end; ++it) {
        const auto& [id, position, place, encoding] = it->first;
        records[{position, place, encoding}] = it->second;
      }
    }
    return records;
  }

  std::int64_t budget = 1ll << 40;
  std::int64_t appends = 0;
  std::int64_t refuses_at = -1;  // the append that throws
  bool stays_broken = false;     // all calls behind that one throw too
  std::optional<Site> refused{};

 private:
  void require_whole() const {
    if (stays_broken && refused) throw Error("the sink is broken");
  }
  void forget(SpanId span, std::int32_t position) {
    rows_.erase(rows_.lower_bound({span.value, position, Place{}, {}}),
                rows_.lower_bound({span.value + 1, 0, Place{}, {}}));
  }
  std::map<std::uint64_t, Span> spans_;
  std::set<std::uint64_t> sealed_;
  std::map<Key, std::vector<std::byte>> rows_;
};

inline ModelConfig small_model() {
  ModelConfig model = fixture::small_model();
  model.max_positions = 96;
  model.stop_tokens = {1};
  return model;
}

/// NVFP4 everywhere; records of all sites in the last two layers, and routes.
inline Agreement small_agreement(Guidance mode = Guidance::kLsb) {
  Agreement a;
  a.model = small_model();
  a.contract = contracts::lockstep(a.model.num_layers);
  a.contract.kv_exponents.assign(static_cast<std::size_t>(2 * a.model.num_layers), -6);
  a.guide = {.mode = mode,
             .sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV},
             .layers = LayerSet::range(1, a.model.num_layers),
             .replay_experts = true,
             .audit_every = 4};
  a.seed = 17;
  return a;
}

inline Agreement small_bf16() {
  Agreement a;
  a.model = small_model();
  a.contract = contracts::bf16();
  a.guide.replay_experts = true;
  return a;
}

inline std::vector<Token> random_tokens(std::int32_t count, std::uint64_t seed,
                                        std::int32_t vocabulary = 50) {
  std::vector<Token> tokens;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::uint32_t word = philox(seed, philox_counter(1, static_cast<std::uint32_t>(i), 9))[0];
    tokens.push_back(2 + static_cast<Token>(word % static_cast<std::uint32_t>(vocabulary - 2)));
  }
  return tokens;
}

}  // namespace lockstep::rollout::testing
