/// What several threads do to a store at a time, and several of its own for one.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "store/store.h"
#include "store/testing.h"

namespace lockstep::store {
namespace {

using namespace testing;

TEST(Store, OneWritesWhileOthersReadPrefetchAndGiveUp) {
  Folder folder;
  Store store({.folder = folder.path(), .ram_bytes = 30'000, .segment_bytes = 20'000});
  constexpr std::uint64_t kSpans = 120;
  std::atomic<std::uint64_t> sealed = 0;
  std::atomic<int> wrong = 0;
  std::atomic<int> seen = 0;
  std::atomic<std::uint64_t> reads = 0;
  const auto reader = [&](unsigned seed) {
    std::mt19937 random(seed);
    while (sealed < kSpans) {
      const std::uint64_t s = random() % (sealed + 1);
      if (random() % 4 == 0) store.prefetch(positions({s}, 0, 1));
      const int rows = own_span(store, {s}, 0, 30);
      if (rows < 0) ++wrong;
      seen += rows;
      ++reads;
    }
  };
  std::thread a(reader, 1), b(reader, 2);
  for (std::uint64_t s = 0; s < kSpans; ++s) {
    write_span(store, {s}, 0, 30);
    const std::uint64_t before = reads;
    sealed = s + 1;
    // A fast writer leaves nobody a chance.
    while (sealed < kSpans && reads < before + 4) std::this_thread::yield();
    if (s % 10 == 9) store.release(std::vector<SpanId>{{s - 5}});
  }
  a.join();
  b.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(seen, 0);
  for (std::uint64_t s = 0; s < kSpans; ++s) {
    EXPECT_EQ(own_span(store, {s}, 0, 30), s % 10 == 4 ? 0 : rows_in_span(0, 30)) << s;
  }
}

/// What a pass of several layers brings: two places of each of `layers`.
struct ManyPlaces {
  ManyPlaces(const std::vector<TokenKey>& tokens, int layers) {
    for (int l = 0; l < layers; ++l) {
      for (const auto& [site, layout] : {std::pair(Site::kW13In, kLsb), {Site::kK, kKv}}) {
        const Place place{Layer{l}, site};
        bytes.push_back(rows_of(tokens, place, layout));
        rows.push_back({place, layout, bytes.back()});
      }
    }
  }
  int own(const TraceSource& source, const std::vector<TokenKey>& tokens) const {
    int sum = 0;
    for (const auto& [place, layout, unused] : rows) {
      const int count = own_rows(read(source, tokens, place, layout), tokens, place, layout);
      if (count < 0) return -1;
      sum += count;
    }
    return sum;
  }
  std::vector<Bytes> bytes;
  std::vector<Rows<const std::byte>> rows;
};

// Many rows of a span are shared by threads, few of many spans too. What is refused is told of the
// first span, not of the first thread; the others have all that is theirs; and those that were
// refused can be given again.
TEST(Store, ARefusalIsTheFirstSpansAndSparesTheOthers) {
  constexpr int kSpans = 60, kLayers = 10;
  for (const int count : {1, 120}) {  // below and above what several threads take of a span
    for (int time = 0; time < 5; ++time) {
      Store store({});
      std::vector<TokenKey> tokens;
      std::vector<SpanId> ids;
      for (int s = 0; s < kSpans; ++s) {
        ids.push_back({static_cast<std::uint64_t>(s)});
        store.open({.id = ids.back()}, kContract);
        for (const TokenKey& key : positions(ids.back(), 0, count)) tokens.push_back(key);
      }
      const ManyPlaces all(tokens, kLayers);
      for (const auto& [span, layer] : {std::pair(50, 0), {20, 9}, {21, 0}}) {
        append(store, positions(ids[span], 0, 1), {Layer{layer}, Site::kK}, kKv);
      }
      EXPECT_EQ(thrown([&] { store.append_all(tokens, all.rows); }),
                "record of span 0x0000000000000014, position 0: the span begins at 0 and layer 9, "
                "site 2 is recorded up to 1 already");
      for (const int span : {20, 21, 50}) {
        store.truncate(ids[span], 0);
        const std::vector<TokenKey> again = positions(ids[span], 0, count);
        store.append_all(again, ManyPlaces(again, kLayers).rows);
      }
      store.seal_all(ids);
      EXPECT_EQ(all.own(store, tokens), 2 * kLayers * kSpans * count);
      const Metrics metrics = store.metrics();
      const double bytes = kLayers * (kLsb.bytes() + kKv.bytes()) * kSpans * count;
      EXPECT_GE(metrics.at("perf/trace/ram_bytes"), bytes);
      EXPECT_LE(metrics.at("perf/trace/ram_bytes"), bytes + bytes / 8);
      EXPECT_EQ(metrics.at("fp4/trace/rows_written"), 3 + 3 * 2 * kLayers * count);
      EXPECT_EQ(metrics.at("fp4/guide/bytes_per_token"), bytes / (kSpans * count));
    }
  }
}

// Given twice, a place would be written by two threads at a time: it is refused before any row is
// kept, however many rows there are.
TEST(Store, APlaceThatIsTwiceInOneAppendIsRefused) {
  constexpr int kLayers = 10;
  for (const int count : {1, 4000}) {
    Store store({});
    store.open({.id = {7}}, kContract);
    const std::vector<TokenKey> tokens = positions({7}, 0, count);
    ManyPlaces all(tokens, kLayers);
    std::vector<Rows<const std::byte>> twice = all.rows;
    twice.push_back(all.rows[6]);
    EXPECT_EQ(thrown([&] { store.append_all(tokens, twice); }),
              "records: layer 3, site 0 is twice among the places of one append; give each once");
    EXPECT_EQ(store.metrics().at("fp4/trace/rows_written"), 0);
    store.append_all(tokens, all.rows);
    store.seal({7});
    EXPECT_EQ(all.own(store, tokens), 2 * kLayers * count);
  }
}

// A span that is given up while its rows come takes nothing from the others, nor any memory.
TEST(Store, SpansAreGivenUpWhileRowsCome) {
  constexpr int kSpans = 40, kLayers = 6, kCount = 60;
  Store store({});
  std::atomic<int> round = -1;
  constexpr int kRounds = 30;
  const auto id = [](int of, int s) { return SpanId{static_cast<std::uint64_t>(of * kSpans + s)}; };
  std::thread other([&] {
    std::mt19937 random(1);
    for (int now = round; now < kRounds; now = round) {
      if (now >= 0) {
        store.release(std::vector<SpanId>{id(now, static_cast<int>(random() % (kSpans / 2)) * 2)});
      }
      static_cast<void>(store.admits(1));
      std::this_thread::yield();
    }
  });
  for (int now = 0; now < kRounds; ++now) {
    std::vector<TokenKey> tokens, kept;
    std::vector<SpanId> ids;
    for (int s = 0; s < kSpans; ++s) {
      const std::vector<TokenKey> mine = positions(id(now, s), 0, kCount);
      store.open({.id = id(now, s)}, kContract);
      tokens.insert(tokens.end(), mine.begin(), mine.end());
      if (s % 2 == 0) continue;  // those with even numbers may be given up
      kept.insert(kept.end(), mine.begin(), mine.end());
      ids.push_back(id(now, s));
    }
    const ManyPlaces all(tokens, kLayers);
    round = now;
    // One that is gone before its rows come refuses all of them.
    const bool refused = !thrown([&] { store.append_all(tokens, all.rows); }).empty();
    store.seal_all(ids);
    EXPECT_EQ(all.own(store, kept), refused ? 0 : 2 * kLayers * kSpans / 2 * kCount);
  }
  round = kRounds;
  other.join();
  std::vector<SpanId> all;
  for (int i = 0; i < kRounds * kSpans; ++i) all.push_back({static_cast<std::uint64_t>(i)});
  store.release(all);
  EXPECT_TRUE(store.admits(Options{}.ram_bytes));
  EXPECT_EQ(store.metrics().at("perf/trace/ram_bytes"), 0);
}

/// While one lives, so many threads work.
struct Threads {
  explicit Threads(int count) { set_threads(count); }
  ~Threads() { set_threads(0); }
};

std::vector<SpanId> open_many(Store& store, std::uint64_t count) {
  std::vector<SpanId> ids;
  for (std::uint64_t s = 0; s < count; ++s) {
    ids.push_back({s + 1});
    store.open({.id = ids.back()}, kContract);
  }
  return ids;
}

/// Of K in so many layers.
void append_layers(TraceSink& sink, std::span<const TokenKey> tokens, std::int32_t layers) {
  std::vector<Bytes> bytes;
  std::vector<Rows<const std::byte>> places;
  for (std::int32_t l = 0; l < layers; ++l) {
    const Place place = {Layer{l}, Site::kK};
    bytes.push_back(rows_of(tokens, place, kKv));
    places.push_back({place, kKv, {}});
  }
  for (std::size_t l = 0; l < places.size(); ++l) places[l].bytes = bytes[l];
  sink.append_all(tokens, places);
}

class AllThreads : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Tiers, AllThreads, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Disk" : "Ram"; });

TEST_P(AllThreads, AppendAndSeal) {
  const Threads threads(4);
  constexpr std::int32_t kLayers = 20;
  const Folder folder;
  Options options;
  if (GetParam()) options = {.folder = folder.path(), .ram_bytes = 0, .segment_bytes = 4000};
  Store store(options);
  const std::vector<SpanId> ids = open_many(store, 400);
  const auto of_all = [&](int first, int end) {
    std::vector<TokenKey> tokens;
    for (const SpanId id : ids) {
      for (int p = first; p < end; ++p) tokens.push_back({id, p});
    }
    return tokens;
  };
  for (int step = 0; step < 3; ++step) append_layers(store, of_all(step, step + 1), kLayers);
  append_layers(store, of_all(3, 300), kLayers);  // enough for several threads a span
  // One span's tokens that do not follow each other, and another's between them.
  const std::vector<TokenKey> apart = {{ids[0], 300}, {ids[1], 300}, {ids[0], 305}, {ids[1], 301}};
  append_layers(store, apart, kLayers);
  store.seal_all(ids);
  if (GetParam()) {
    ASSERT_TRUE(store.flush());
  }
  EXPECT_EQ(std::ssize(store.spans()), std::ssize(ids));
  for (const SpanId id : {ids[0], ids[1], ids[57], ids[399]}) {
    for (const std::int32_t layer : {0, 7, 8, 19}) {
      const Place place = {Layer{layer}, Site::kK};
      const auto tokens = positions(id, 0, 310);
      const int rows = id == ids[0] || id == ids[1] ? 302 : 300;
      EXPECT_EQ(own_rows(read(store, tokens, place, kKv), tokens, place, kKv), rows);
    }
  }
  EXPECT_EQ(store.metrics().at("fp4/trace/rows_written"), kLayers * (300.0 * 400 + 4));
}

TEST(Store, TheFirstOfSeveralFailuresIsTold) {
  const Threads threads(4);
  for (int attempt = 0; attempt < 20; ++attempt) {
    Store store({});
    const std::vector<SpanId> ids = open_many(store, 300);
    std::vector<TokenKey> tokens;
    for (const SpanId id : ids) tokens.push_back({id, 0});
    append_layers(store, tokens, 30);
    for (const std::size_t again : {7u, 130u, 299u}) {
      append(store, positions(ids[again], 1, 2), {Layer{3}, Site::kK}, kKv);
    }
    for (TokenKey& token : tokens) token.position = 1;
    EXPECT_EQ(thrown([&] { append_layers(store, tokens, 30); }),
              "record of span 0x0000000000000008, position 1: the span begins at 0 and layer 3, "
              "site 2 is recorded up to 2 already");
    for (const SpanId id : ids) store.truncate(id, 1);
    append_layers(store, tokens, 30);
    store.seal_all(ids);
    for (const std::size_t i : {0u, 7u, 299u}) {
      const Place place = {Layer{3}, Site::kK};
      const auto both = positions(ids[i], 0, 2);
      EXPECT_EQ(own_rows(read(store, both, place, kKv), both, place, kKv), 2);
    }
  }
}

TEST(Store, NothingIsSealedWhereOneIsNotOpen) {
  constexpr SpanId kA{0x0001000000000040}, kB{0x0001000000000041};
  Store store({});
  store.open({.id = kA}, kContract);
  EXPECT_EQ(thrown([&] {
              store.seal_all(std::array{kA, kB});
            }),
            "sealing span 0x0001000000000041: not opened");
  append(store, positions(kA, 0, 1), kK, kKv);
  store.seal_all(std::array{kA});
  EXPECT_EQ(own_rows(read(store, positions(kA, 0, 1), kK, kKv), positions(kA, 0, 1), kK, kKv), 1);
}

}  // namespace
}  // namespace lockstep::store
