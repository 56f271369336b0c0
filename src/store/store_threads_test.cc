/// What several threads do to a store at a time, and several of its own for one.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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

}  // namespace
}  // namespace lockstep::store
