#include "rollout/scheduler.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>
#include <string>

#include "base/error.h"
#include "base/philox.h"
#include "rollout/testing.h"

namespace lockstep::rollout {
namespace {

using testing::MemoryTrace;
using testing::random_tokens;

/// Runs a scheduler without a model: every position that is fed leaves a stamp in its row of the
/// cache, and all rows of a sequence are checked in each pass. A stamp in the wrong place, lost in
/// a swap or overwritten by another sequence is found.
class Simulation {
 public:
  Simulation(std::int64_t frames, std::int64_t host, Options options, TraceSink* trace = nullptr)
      : agreement_(testing::small_agreement()), options_(options) {
    const std::int64_t page = cache_layout(agreement_, options.page_tokens)[0].k.page_bytes;
    options_.cache_bytes = frames * page;
    options_.swap_bytes = host * page;
    cache_ = std::make_unique<KvCache>(agreement_, options_);
    scheduler_ =
        std::make_unique<Scheduler>(agreement_, options_, *cache_, trace, [](Sequence&) {});
  }

  void submit(std::int64_t prompt, std::int32_t tokens, std::int32_t samples, std::int32_t more) {
    Request request;
    request.num_samples = samples;
    request.prefix.prompt = PromptId{prompt};
    request.prefix.tokens = random_tokens(tokens, static_cast<std::uint64_t>(prompt));
    request.prefix.sampling.max_new_tokens = more;
    scheduler_->check(request, false);
    scheduler_->submit(std::move(request), false);
  }

  /// Returns the number of rows that ran.
  std::int64_t pass() {
    const std::vector<Chunk> chunks = scheduler_->plan();
    std::int64_t rows = 0;
    for (const Chunk& chunk : chunks) {
      Sequence& s = *chunk.sequence;
      EXPECT_EQ(chunk.first, s.fed);
      for (std::int32_t p = 0; p < s.fed; ++p) {
        const auto found = stamp(s, p);
        EXPECT_EQ(found, expected(s, p)) << "position " << p;
      }
      for (std::int32_t p = s.fed; p < s.fed + chunk.count; ++p) {
        const std::uint64_t mark = expected(s, p);
        std::memcpy(row(s, p), &mark, sizeof mark);
      }
      rows += chunk.count;
    }
    EXPECT_LE(rows, options_.tokens_per_pass);
    for (const Chunk& chunk : chunks) advance(*chunk.sequence, chunk.count);
    return rows;
  }

  void run() {
    while (!scheduler_->idle()) {
      ASSERT_GT(pass(), 0) << "nothing can go on";
      ASSERT_LT(++passes_, 100000);
    }
  }

  Scheduler& scheduler() { return *scheduler_; }
  KvCache& cache() { return *cache_; }
  std::set<std::pair<std::int64_t, std::int32_t>> finished;
  std::map<std::int64_t, std::int64_t> prompt_rows;  // fed by prompts
  std::int64_t passes_ = 0;

 private:
  std::byte* row(const Sequence& s, std::int32_t p) {
    std::vector<std::int32_t> table;
    for (const Page page : s.pages) table.push_back(cache_->frame(page));
    return cache_->layers()[1].v.row(table, p);
  }
  std::uint64_t stamp(const Sequence& s, std::int32_t p) {
    std::uint64_t mark;
    std::memcpy(&mark, row(s, p), sizeof mark);
    return mark;
  }
  std::uint64_t expected(const Sequence& s, std::int32_t p) const {
    const auto who = static_cast<std::uint64_t>(p < s.prompt ? 0 : s.trajectory.sample + 1);
    return static_cast<std::uint64_t>(s.trajectory.prompt.value) << 40 | who << 20 |
           static_cast<std::uint64_t>(p);
  }
  void advance(Sequence& s, std::int32_t count) {
    s.fed += count;
    if (!s.decodes()) prompt_rows[s.trajectory.prompt.value] += count;
    if (s.remaining() > 0) return;
    if (s.decodes()) return add_token(s);
    s.trajectory.path = {{.id = span_id(0, s.trajectory.prompt, -1, 0), .count = s.prompt}};
    for (Sequence* sample : scheduler_->fork(s)) add_token(*sample);
  }
  void add_token(Sequence& s) {
    s.trajectory.tokens.push_back(2);
    if (s.size() < s.limit) return;
    EXPECT_TRUE(finished.insert({s.trajectory.prompt.value, s.trajectory.sample}).second);
    scheduler_->remove(s);
  }

  Agreement agreement_;
  Options options_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST(Scheduler, ReadsAPromptInChunksOnceForAllItsSamples) {
  Simulation s(64, 0, {.page_tokens = 4, .tokens_per_pass = 7});
  s.submit(1, 22, 3, 5);
  EXPECT_EQ(s.pass(), 7);
  EXPECT_EQ(s.pass(), 7);
  EXPECT_EQ(s.pass(), 7);
  EXPECT_EQ(s.pass(), 1);
  EXPECT_EQ(s.pass(), 3);                 // a row a sample
  EXPECT_EQ(s.cache().used_frames(), 8);  // 5 full pages, and the sixth three times
  s.run();
  EXPECT_EQ(s.prompt_rows[1], 22);
  EXPECT_EQ(s.finished.size(), 3u);
  EXPECT_EQ(s.cache().used_frames(), 0);
}

TEST(Scheduler, DecodingRowsAndPromptsShareAPass) {
  Simulation s(64, 0, {.page_tokens = 4, .tokens_per_pass = 10});
  s.submit(1, 4, 2, 8);
  EXPECT_EQ(s.pass(), 4);
  s.submit(2, 12, 1, 8);
  EXPECT_EQ(s.pass(), 10);  // 2 that decode, 8 of the prompt
  EXPECT_EQ(s.pass(), 6);
  s.run();
}

TEST(Scheduler, DecodesNoMoreThanMaxSequencesSideBySide) {
  Simulation s(64, 0, {.page_tokens = 4, .tokens_per_pass = 100, .max_sequences = 3});
  s.submit(1, 4, 5, 4);
  EXPECT_EQ(s.pass(), 4);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(s.pass(), 3);
  s.run();
  EXPECT_EQ(s.finished.size(), 5u);
}

// Sequences of every length in caches from barely enough to plenty: rows keep their stamps through
// sharing, copying, swapping and reuse, nothing is fed twice, and all ends with empty memory.
TEST(Scheduler, R53_RowsSurviveSharingSwappingAndReuse) {
  std::int64_t preemptions = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const auto random = [&](std::uint32_t what, int first, int last) {
      return first + static_cast<int>(philox(seed, philox_counter(what, 0, 0))[0] %
                                      static_cast<std::uint32_t>(last - first + 1));
    };
    const int page_tokens = random(1, 1, 9);
    const int frames = (40 + page_tokens - 1) / page_tokens + random(2, 0, 12);
    Simulation s(frames, random(3, 0, 60),
                 {.page_tokens = page_tokens,
                  .tokens_per_pass = random(4, 1, 40),
                  .max_sequences = random(5, 1, 20)});
    std::size_t samples = 0;
    for (std::uint32_t prompt = 0; prompt < 6; ++prompt) {
      const int count = random(10 + prompt, 1, 6);
      s.submit(prompt, random(20 + prompt, 1, 25), count, random(30 + prompt, 1, 16));
      samples += static_cast<std::size_t>(count);
    }
    s.run();
    EXPECT_EQ(s.finished.size(), samples);
    EXPECT_EQ(s.cache().used_frames(), 0);
    preemptions += s.scheduler().preemptions;
  }
  EXPECT_GT(preemptions, 20);
}

TEST(Scheduler, ASequenceThatCanNeverFitIsRefusedAtOnce) {
  Simulation s(3, 100, {.page_tokens = 4});
  s.submit(1, 4, 1, 9);  // 12 positions
  try {
    s.submit(2, 4, 1, 10);
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("prompt 2"), std::string::npos) << message;
    EXPECT_NE(message.find("rollout.cache"), std::string::npos) << message;
    EXPECT_NE(message.find(std::to_string(4 * s.cache().page_bytes())), std::string::npos);
    EXPECT_NE(message.find(std::to_string(3 * s.cache().page_bytes())), std::string::npos);
  }
  s.run();
}

TEST(Scheduler, AGroupLargerThanAllMemoryGoesInParts) {
  Simulation s(4, 2, {.page_tokens = 4});
  s.submit(1, 6, 9, 6);
  s.run();
  EXPECT_EQ(s.finished.size(), 9u);
}

TEST(Scheduler, AFullStoreHoldsBackTheNextPromptAndNobodyElse) {
  MemoryTrace trace;
  Simulation s(64, 0, {.page_tokens = 4}, &trace);
  s.submit(1, 8, 2, 4);
  EXPECT_EQ(s.pass(), 8);
  trace.budget = 0;
  s.submit(2, 8, 2, 4);
  EXPECT_EQ(s.pass(), 2);  // those who run go on
  EXPECT_TRUE(s.scheduler().held_back());
  EXPECT_EQ(s.pass(), 2);
  EXPECT_EQ(s.pass(), 2);
  EXPECT_EQ(s.pass(), 0);
  EXPECT_FALSE(s.scheduler().idle());
  trace.budget = 1 << 30;
  EXPECT_EQ(s.pass(), 8);
  s.run();
  EXPECT_EQ(s.finished.size(), 4u);
}

/// Room that comes and goes; records are never written.
class Budget final : public TraceSink {
 public:
  void open(const Span&, ContractId) override {}
  bool admits(std::int64_t bytes) const override {
    asked.push_back(bytes);
    return bytes <= budget;
  }
  void append(std::span<const TokenKey>, Rows<const std::byte>) override {}
  void truncate(SpanId, std::int32_t) override {}
  void seal(SpanId) override {}
  std::int64_t budget = 0;
  mutable std::vector<std::int64_t> asked;
};

TEST(Scheduler, AGroupWithMoreRecordsThanThereIsRoomForGoesInParts) {
  Budget trace;
  Simulation s(64, 0, {.page_tokens = 4}, &trace);
  s.submit(1, 8, 5, 4);
  EXPECT_EQ(s.pass(), 0);  // not even one sample has room
  EXPECT_TRUE(s.scheduler().held_back());
  ASSERT_EQ(trace.asked.size(), 5u);
  const std::int64_t one = trace.asked[4], each = trace.asked[3] - one;
  EXPECT_EQ(trace.asked[0], one + 4 * each);
  trace.budget = one + 2 * each - 1;  // two of them
  EXPECT_EQ(s.pass(), 8);
  EXPECT_FALSE(s.scheduler().held_back());
  EXPECT_EQ(s.pass(), 2);
  s.submit(2, 8, 2, 4);  // who comes beside others waits as a whole
  EXPECT_EQ(s.pass(), 2);
  EXPECT_TRUE(s.scheduler().held_back());
  s.run();
  EXPECT_EQ(s.finished.size(), 7u);
}

TEST(Scheduler, TurnsAreCountedASampleAndEnd) {
  const Trajectory t = {.prompt = PromptId{5}, .tokens = {}};
  std::vector<Span> path = {{.id = span_id(3, PromptId{5}, -1, 0)},
                            {.id = span_id(3, PromptId{5}, 2, 0)},
                            {.id = span_id(3, PromptId{5}, 2, 1)}};
  EXPECT_EQ(next_turn(path, t, -1), 1);
  EXPECT_EQ(next_turn(path, t, 2), 2);
  EXPECT_EQ(next_turn(path, t, 1), 0);
  path.push_back({.id = span_id(3, PromptId{5}, 2, 63)});
  EXPECT_THROW(next_turn(path, t, 2), Error);
}

}  // namespace
}  // namespace lockstep::rollout
