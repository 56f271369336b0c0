#include "store/store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "store/span_body.h"
#include "store/testing.h"

namespace lockstep::store {
namespace {

using namespace testing;

constexpr SpanId kA{0x0001000000000040};
constexpr SpanId kB{0x0001000000000041};

/// Every test that does not care runs in RAM, and on disk with RAM for next to nothing.
class StoreTest : public ::testing::TestWithParam<bool> {
 protected:
  Options options() const {
    if (!GetParam()) return {};
    return {.folder = folder_.path(), .ram_bytes = 0, .segment_bytes = 4000};
  }
  /// On disk: nothing is read from RAM any more.
  void settle(Store& store) const {
    if (GetParam()) {
      ASSERT_TRUE(store.flush());
    }
  }
  Folder folder_;
};

INSTANTIATE_TEST_SUITE_P(Tiers, StoreTest, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Disk" : "Ram"; });

TEST_P(StoreTest, ReadsWhatWasWrittenAsOftenAsAsked) {
  Store store(options());
  write_span(store, kA, 0, 100);
  write_span(store, kB, 100, 150);
  settle(store);
  for (int pass = 0; pass < 3; ++pass) {
    EXPECT_EQ(own_span(store, kA, 0, 100), rows_in_span(0, 100));
    EXPECT_EQ(own_span(store, kB, 100, 150), rows_in_span(100, 150));
  }
  if (GetParam()) {
    const Metrics metrics = store.metrics();
    EXPECT_EQ(metrics.at("perf/trace/ram_bytes"), 0);
    EXPECT_GT(metrics.at("perf/trace/disk_bytes_read"), 0);
  }
}

TEST_P(StoreTest, OnlySealedSpansAreRead) {
  Store store(options());
  store.open({.id = kA}, kContract);
  const auto tokens = positions(kA, 0, 4);
  append(store, tokens, kK, kKv);
  EXPECT_EQ(own_rows(read(store, tokens, kK, kKv), tokens, kK, kKv), 0);
  store.seal(kA);
  settle(store);
  EXPECT_EQ(own_rows(read(store, tokens, kK, kKv), tokens, kK, kKv), 4);
}

TEST_P(StoreTest, DecodeAppendsRowsOfManySpansAtOnce) {
  Store store(options());
  constexpr int kSpans = 40;
  for (int s = 0; s < kSpans; ++s) store.open({.id = {std::uint64_t(s)}, .first = s}, kContract);
  for (int step = 0; step < 70; ++step) {
    std::vector<TokenKey> tokens;
    for (int s = step % 3; s < kSpans; ++s) {  // who takes part changes from pass to pass
      tokens.push_back({{std::uint64_t(s)}, s + step});
    }
    append(store, tokens, kW13, kLsb);
    append(store, tokens, kRouter, kRoutes);
  }
  int rows = 0;
  for (int s = 0; s < kSpans; ++s) store.seal({std::uint64_t(s)});
  settle(store);
  for (int s = 0; s < kSpans; ++s) {
    const auto tokens = positions({std::uint64_t(s)}, s, s + 70);
    rows += own_rows(read(store, tokens, kW13, kLsb), tokens, kW13, kLsb);
  }
  EXPECT_EQ(rows, 70 * (kSpans - 2) + 24 + 47);
}

/// Rows of two places in one call.
void append_both(Store& store, const std::vector<TokenKey>& tokens) {
  const Bytes w13 = rows_of(tokens, kW13, kLsb), k = rows_of(tokens, kK, kKv);
  const Rows<const std::byte> places[] = {{kW13, kLsb, w13}, {kK, kKv, k}};
  store.append_all(tokens, places);
}

// A span's memory comes in pieces: rows meet none of their borders, whatever is cut off between.
TEST_P(StoreTest, RowsLieInManyPiecesAndAreCutAndWrittenAgain) {
  Store store(options());
  std::mt19937 random(7);
  for (std::uint64_t id = 0; id < 12; ++id) {
    store.open({.id = {id}, .first = 5}, kContract);
    int end = 5;
    while (end < 700) {
      const int count = random() % 3 == 0 ? 1 + static_cast<int>(random() % 90) : 1;
      append_both(store, positions({id}, end, end + count));
      end += count;
      if (random() % 20 != 0) continue;
      end -= static_cast<int>(random() % 40) % (end - 4);
      store.truncate({id}, end);
    }
    store.seal({id});
    settle(store);
    for (const auto& [first, last] : {std::pair(5, end), {17, 18}, {333, 402}}) {
      const auto tokens = positions({id}, first, last);
      EXPECT_EQ(own_rows(read(store, tokens, kW13, kLsb), tokens, kW13, kLsb), last - first);
      EXPECT_EQ(own_rows(read(store, tokens, kK, kKv), tokens, kK, kKv), last - first);
    }
    const auto cut = positions({id}, end, end + 5);
    EXPECT_EQ(own_rows(read(store, cut, kW13, kLsb), cut, kW13, kLsb), 0);
  }
}

// What comes at once, of several spans and beside lone rows of others, is copied by all threads.
TEST_P(StoreTest, MuchAtOnceIsKeptAsRowByRow) {
  Store store(options());
  std::vector<TokenKey> tokens;
  for (const auto& [id, first, count] : {std::tuple(1, 0, 3000), {2, 10, 1}, {3, 0, 2500}}) {
    const SpanId span{static_cast<std::uint64_t>(id)};
    store.open({.id = span, .first = first}, kContract);
    append_both(store, positions(span, first, first + 1));
    for (const TokenKey& key : positions(span, first + 1, first + 1 + count)) tokens.push_back(key);
  }
  append_both(store, tokens);
  for (const std::uint64_t id : {1, 2, 3}) store.seal({id});
  settle(store);
  EXPECT_EQ(own_rows(read(store, tokens, kW13, kLsb), tokens, kW13, kLsb), 5501);
  EXPECT_EQ(own_rows(read(store, tokens, kK, kKv), tokens, kK, kKv), 5501);
}

// R80, R71: packing, padding and slices move tokens about; each meets its own row, and what is no
// token meets none.
TEST_P(StoreTest, R80_EachTokenMeetsItsOwnRowWhereverItStands) {
  Store store(options());
  write_span(store, kA, 0, 60);
  write_span(store, kB, 60, 90);
  settle(store);
  std::vector<TokenKey> tokens = positions(kA, 0, 60);
  for (const TokenKey& key : positions(kB, 60, 90)) tokens.push_back(key);
  std::mt19937 random(1);
  for (const std::size_t multiple : {16u, 128u}) {
    std::vector<TokenKey> packed = tokens;
    std::shuffle(packed.begin(), packed.end(), random);
    while (packed.size() % multiple != 0) packed.push_back({SpanId{}, -1});
    for (const std::size_t slice : {0u, 1u}) {  // two context-parallel halves
      const std::size_t half = packed.size() / 2;
      const std::span part = std::span(packed).subspan(slice * half, half);
      const auto pads = std::count(part.begin(), part.end(), TokenKey{SpanId{}, -1});
      EXPECT_EQ(own_rows(read(store, part, kW13, kLsb), part, kW13, kLsb),
                static_cast<int>(half) - pads);
    }
  }
}

// R71: a pass's padded rows have no token, so they are not appended; a row given twice is refused.
TEST_P(StoreTest, R71_APositionIsRecordedOnce) {
  Store store(options());
  store.open({.id = kA}, kContract);
  append(store, positions(kA, 0, 16), kW13, kLsb);
  EXPECT_NE(thrown([&] {
              append(store, positions(kA, 15, 17), kW13, kLsb);
            }).find("position 15: the span begins at 0 and layer 1, site 0 is recorded up to 16"),
            std::string::npos);
  append(store, positions(kA, 16, 20), kW13, kLsb);
  store.seal(kA);
  settle(store);
  const auto tokens = positions(kA, 0, 24);
  const Got got = read(store, tokens, kW13, kLsb);
  EXPECT_EQ(own_rows(got, tokens, kW13, kLsb), 20);
  EXPECT_EQ(got.present[19], 1);
  EXPECT_EQ(got.present[20], 0);
}

// R77, R70: what never ran (a cached prefix, a layer without capture, a side network) is absent
// and counted, not read as code 0; and a record of zeros is present.
TEST_P(StoreTest, R77_AbsentIsNotZero) {
  Store store(options());
  store.open({.id = kA}, kContract);
  const auto late = positions(kA, 32, 40);
  const Bytes zeros(late.size() * 13);
  store.append(late, {kW13, kLsb, zeros});
  store.seal(kA);
  settle(store);
  const auto tokens = positions(kA, 0, 40);
  static_cast<void>(store.metrics());
  const Got got = read(store, tokens, kW13, kLsb);
  EXPECT_EQ(got.count, 8u);
  EXPECT_EQ(std::count(got.present.begin(), got.present.begin() + 32, 0), 32);
  EXPECT_EQ(std::count(got.present.begin() + 32, got.present.end(), 1), 8);
  EXPECT_EQ(store.metrics().at("fp4/trace/rows_absent"), 32);
}

TEST_P(StoreTest, R70_SideNetworksHavePlacesOfTheirOwn) {
  constexpr int kLayers = 48;
  constexpr Place kBackbone{Layer{0}, Site::kRouter};
  constexpr Place kMtp{Layer{kLayers}, Site::kRouter};
  Store store(options());
  store.open({.id = kA}, kContract);
  const auto tokens = positions(kA, 0, 8);
  append(store, tokens, kBackbone, kRoutes);
  store.seal(kA);
  settle(store);
  EXPECT_EQ(own_rows(read(store, tokens, kBackbone, kRoutes), tokens, kBackbone, kRoutes), 8);
  static_cast<void>(store.metrics());
  EXPECT_EQ(own_rows(read(store, tokens, kMtp, kRoutes), tokens, kMtp, kRoutes), 0);
  EXPECT_EQ(store.metrics().at("fp4/trace/rows_absent"), 8);
}

TEST_P(StoreTest, TruncateForgetsRejectedTokens) {
  Store store(options());
  store.open({.id = kA}, kContract);
  append(store, positions(kA, 0, 10), kW13, kLsb, /*salt=*/1);
  const auto audit = positions(kA, 7, 8);
  append(store, audit, kW13, kCodes, 1);
  store.truncate(kA, 6);
  append(store, positions(kA, 6, 12), kW13, kLsb, 2);
  store.seal(kA);
  settle(store);
  const auto kept = positions(kA, 0, 6);
  const auto again = positions(kA, 6, 12);
  EXPECT_EQ(own_rows(read(store, kept, kW13, kLsb), kept, kW13, kLsb, 1), 6);
  EXPECT_EQ(own_rows(read(store, again, kW13, kLsb), again, kW13, kLsb, 2), 6);
  EXPECT_EQ(read(store, audit, kW13, kCodes).count, 0u);
}

TEST_P(StoreTest, ASpanOpenedAgainForgetsItsRows) {
  Store store(options());
  write_span(store, kA, 0, 30, /*salt=*/1);
  settle(store);
  store.open({.id = kA}, kContract);
  EXPECT_EQ(own_span(store, kA, 0, 30, 1), 0);
  store.seal(kA);
  write_span(store, kA, 0, 20, /*salt=*/2);
  settle(store);
  EXPECT_EQ(own_span(store, kA, 0, 30, 2), rows_in_span(0, 20));
}

TEST_P(StoreTest, RetireAndReleaseGiveUpSpansAndTheirFiles) {
  Store store(options());
  for (std::uint64_t s = 0; s < 20; ++s) {
    write_span(store, {s}, 0, 50, 0, WeightVersion{s < 10 ? 1 : 2});
  }
  settle(store);
  store.retire(WeightVersion{2});
  settle(store);
  EXPECT_EQ(own_span(store, {3}, 0, 50), 0);
  EXPECT_EQ(own_span(store, {13}, 0, 50), rows_in_span(0, 50));
  EXPECT_EQ(store.spans().size(), 10u);
  std::vector<SpanId> rest;
  for (std::uint64_t s = 10; s < 20; ++s) rest.push_back({s});
  store.release(rest);
  settle(store);
  EXPECT_EQ(store.spans().size(), 0u);
  EXPECT_EQ(folder_.segments().size(), 0u);
  EXPECT_EQ(store.metrics().at("perf/trace/disk_bytes"), 0);
}

TEST_P(StoreTest, AnOldSpanStillOpenIsGivenUpWhenSealed) {
  Store store(options());
  store.open({.id = kA, .version = {1}}, kContract);
  store.retire(WeightVersion{2});
  append(store, positions(kA, 0, 5), kK, kKv);
  store.seal(kA);
  EXPECT_EQ(store.spans().size(), 0u);
}

// A layout stands with the rows, in RAM and on disk: whoever would read them otherwise is refused,
// and does not get bytes in another order.
TEST_P(StoreTest, R48_ALayoutStandsWithItsRowsAndAnotherIsRefused) {
  constexpr Place kV{Layer{1}, Site::kV};
  constexpr RowLayout kHeld{Encoding::kLsb, 64, 16, 1};
  Store store(options());
  const auto tokens = positions(kA, 0, 10);
  store.open({.id = kA}, kContract);
  append(store, tokens, kV, kHeld);
  store.seal(kA);
  settle(store);
  EXPECT_EQ(read(store, tokens, kV, kHeld).bytes, rows_of(tokens, kV, kHeld));
  for (const RowLayout& other :
       {RowLayout{Encoding::kLsb, 128, 16, 1}, RowLayout{Encoding::kLsb, 64, 32, 1},
        RowLayout{Encoding::kLsb, 64, 16, 0}}) {
    EXPECT_EQ(thrown([&] {
                read(store, tokens, kV, other);
              }).find("records of layer 1, site 3: rows of 64 elements in blocks of 16 are held"),
              0u);
  }
  // Another encoding is another record: absent, not misread.
  EXPECT_EQ(own_rows(read(store, tokens, kV, kCodes), tokens, kV, kCodes), 0);
}

TEST_P(StoreTest, AnotherContractOrLayoutIsRefused) {
  Store store(options());
  write_span(store, kA, 0, 10);
  settle(store);
  const auto tokens = positions(kA, 0, 10);
  EXPECT_EQ(thrown([&] { read(store, tokens, kK, kKv, ContractId{5}); }),
            "span 0x0001000000000040 was recorded under contract 0x1122334455667788, not "
            "0x0000000000000005");
  const RowLayout wider{Encoding::kLsb, 64, 32, 0};
  EXPECT_EQ(thrown([&] { read(store, tokens, kK, wider); }),
            "records of layer 1, site 2: rows of 32 elements in blocks of 16 are held, 64 in "
            "blocks of 32 were asked for");
}

TEST_P(StoreTest, SpansCarryWhatTheyWereOpenedWith) {
  Store store(options());
  write_span(store, kA, 5, 12, 0, WeightVersion{9});
  settle(store);
  ASSERT_EQ(store.spans().size(), 1u);
  const Span span = store.spans()[0];
  EXPECT_EQ(span.first, 5);
  EXPECT_EQ(span.count, 7);
  EXPECT_EQ(span.version, WeightVersion{9});
  EXPECT_EQ(span.prefix_hash, kA.value * 31);
}

TEST(Store, CallersMistakesAreOneLine) {
  Store store({});
  store.open({.id = kA}, kContract);
  const auto tokens = positions(kA, 0, 2);
  const Bytes rows(25);
  EXPECT_EQ(thrown([&] {
              store.append(tokens, {kW13, kLsb, rows});
            }),
            "records: 25 bytes given for 2 rows of 13");
  EXPECT_EQ(thrown([&] { append(store, positions(kB, 0, 1), kW13, kLsb); }),
            "record of span 0x0001000000000041: not opened");
  store.seal(kA);
  EXPECT_EQ(thrown([&] { append(store, tokens, kW13, kLsb); }),
            "record of span 0x0001000000000040: it is sealed already");
  EXPECT_EQ(thrown([&] { store.seal(kA); }),
            "sealing span 0x0001000000000040: it is sealed already");
}

TEST(Store, PresenceAloneIsAskedWithoutBytes) {
  Store store({});
  write_span(store, kA, 0, 10);
  const auto tokens = positions(kA, 5, 15);
  std::vector<std::uint8_t> present(10, 7);
  EXPECT_EQ(store.read(tokens, kContract, {kK, kKv, {}}, present), 5u);
  EXPECT_EQ(present, (std::vector<std::uint8_t>{1, 1, 1, 1, 1, 0, 0, 0, 0, 0}));
}

// R42: a row's offset is computed in 64 bits; no such column need be allocated to see it.
TEST(Store, R42_OffsetsPastTwoGigabytes) {
  EXPECT_EQ(row_offset(798'916, 2688), 2'147'486'208ull);
  static_assert(row_offset(std::int64_t{1} << 33, 2688) == (std::size_t{2688} << 33));
}

TEST(Store, ASecondOneOnAFolderIsRefused) {
  Folder folder;
  Store store({.folder = folder.path(), .ram_bytes = 1 << 20});
  write_span(store, kA, 0, 100);
  ASSERT_TRUE(store.flush());
  ::setenv("LOCKSTEP_WAIT", "0", 1);
  EXPECT_NE(thrown([&] { Store another({.folder = folder.path()}); }).find("another process"),
            std::string::npos);
  ::unsetenv("LOCKSTEP_WAIT");
  EXPECT_EQ(own_span(store, kA, 0, 100), rows_in_span(0, 100));
}

TEST(Store, PrefetchedSpansAreReadFromRam) {
  Folder folder;
  {
    Store store({.folder = folder.path()});
    write_span(store, kA, 0, 100);
    ASSERT_TRUE(store.flush());
  }
  Store store({.folder = folder.path()});
  EXPECT_EQ(store.metrics().at("perf/trace/ram_bytes"), 0);
  const auto tokens = positions(kA, 0, 100);
  store.prefetch(tokens);
  ASSERT_TRUE(store.flush());  // hints come before it
  const Metrics metrics = store.metrics();
  EXPECT_GT(metrics.at("perf/trace/ram_bytes"), 0);
  EXPECT_GT(metrics.at("perf/trace/disk_bytes_read"), 0);
  EXPECT_EQ(own_span(store, kA, 0, 100), rows_in_span(0, 100));
  EXPECT_EQ(store.metrics().at("perf/trace/disk_bytes_read"), 0);
}

TEST(Store, TheOldestSealedSpansGoToDiskAndRamStaysWithinItsBudget) {
  Folder folder;
  Store store({.folder = folder.path(), .ram_bytes = 20'000});
  for (std::uint64_t s = 0; s < 50; ++s) {
    while (!store.admits(2500)) std::this_thread::yield();
    EXPECT_LE(store.metrics().at("perf/trace/ram_bytes"), 20'000);
    write_span(store, {s}, 0, 50);
  }
  EXPECT_GT(store.metrics().at("perf/trace/disk_bytes"), 40 * 1000);
  for (std::uint64_t s = 0; s < 50; ++s) {
    EXPECT_EQ(own_span(store, {s}, 0, 50), rows_in_span(0, 50));
  }
}

// Room is promised in rows; what open spans take beyond them while a row comes at a time must not
// make it another sum. Answers of other lengths before them change nothing.
TEST(Store, ManyOpenSpansTakeLittleMoreThanTheirRows) {
  Store store({});
  write_span(store, {1000}, 0, 2000);
  write_span(store, {1001}, 0, 3);
  store.release(std::vector<SpanId>{{1000}, {1001}});
  EXPECT_TRUE(store.admits(Options{}.ram_bytes));  // their memory is gone
  static_cast<void>(store.metrics());
  constexpr int kSpans = 50;
  for (int s = 0; s < kSpans; ++s) store.open({.id = {std::uint64_t(s)}}, kContract);
  double written = 0, most = 0;
  for (int step = 0; step < 300; ++step) {
    std::vector<TokenKey> tokens;
    for (int s = 0; s < kSpans; ++s) tokens.push_back({{std::uint64_t(s)}, step});
    const Bytes w13(tokens.size() * 13), k(tokens.size() * 6);
    store.append(tokens, {kW13, kLsb, w13});
    store.append(tokens, {kK, kKv, k});
    const Metrics metrics = store.metrics();
    written += metrics.at("fp4/trace/bytes_written");
    const double framing = kSpans * 8 * (13 + 6);
    most = std::max(most, (metrics.at("perf/trace/ram_bytes") - framing) / written);
  }
  EXPECT_LE(most, 1.126);
  EXPECT_GT(written, 280'000);
}

TEST(Store, AFullStoreHoldsBackTheNextSequenceAndDropsNothing) {
  Store store({.ram_bytes = 3000});
  EXPECT_TRUE(store.admits(2500));
  write_span(store, kA, 0, 80);
  EXPECT_FALSE(store.admits(2500));
  EXPECT_NE(store.held().find("of store.ram = 3000 are in use and store.on_disk is off"),
            std::string::npos);
  EXPECT_EQ(store.metrics().at("fp4/trace/admission_holds"), 1);
  EXPECT_EQ(own_span(store, kA, 0, 80), rows_in_span(0, 80));
  store.release(std::vector{kA});
  EXPECT_TRUE(store.admits(2500));
}

TEST(Store, ThereIsRoomOnceMemoryIsFree) {
  constexpr RowLayout kWide{Encoding::kCodes, 1 << 14, 16, 0};
  constexpr int kRows = 4096;
  const Bytes rows(row_offset(kRows, kWide.bytes()));
  constexpr std::int64_t kBudget = 64 << 20;
  Store store({.ram_bytes = kBudget});
  for (int round = 0; round < 4; ++round) {
    store.open({.id = kA}, kContract);
    store.append(positions(kA, 0, kRows), {kW13, kWide, rows});
    store.seal(kA);
    EXPECT_FALSE(store.admits(kBudget));
    store.release({{kA}});
    EXPECT_TRUE(store.admits(kBudget));
    EXPECT_EQ(store.metrics().at("perf/trace/ram_bytes"), 0);
  }
}

TEST(Store, TheDiskBudgetHoldsBackToo) {
  Folder folder;
  Store store({.folder = folder.path(), .ram_bytes = 6000, .disk_bytes = 10'000});
  std::uint64_t s = 0;
  for (; s < 100 && store.admits(2000); ++s) write_span(store, {s}, 0, 60);
  EXPECT_GE(s, 4u);
  EXPECT_LT(s, 20u);
  EXPECT_NE(store.held().find("store.disk = 10000"), std::string::npos) << store.held();
  EXPECT_LE(store.metrics().at("perf/trace/disk_bytes"), 10'000);
  for (std::uint64_t i = 0; i < s; ++i) {
    EXPECT_EQ(own_span(store, {i}, 0, 60), rows_in_span(0, 60));
  }
  store.retire(WeightVersion{2});
  EXPECT_TRUE(store.admits(2000));
}

TEST(Store, ReleasedSpansNeverReachTheDisk) {
  Folder folder;
  Store store({.folder = folder.path(), .ram_bytes = 1 << 20});
  write_span(store, kA, 0, 50);
  store.release(std::vector{kA});
  ASSERT_TRUE(store.flush());
  EXPECT_EQ(store.metrics().at("perf/trace/spilled_bytes"), 0);
  EXPECT_EQ(folder.segments().size(), 0u);
}

// Formula and measure agree; R82: it is bytes, and the step's metrics say how many.
TEST(Store, R82_RowsAreBinaryAndTheirSizeIsReported) {
  Store store({});
  store.open({.id = kA}, kContract);
  const auto tokens = positions(kA, 0, 100);
  append(store, tokens, kW13, kLsb);
  append(store, tokens, kK, kKv);
  append(store, tokens, kRouter, kRoutes);
  store.seal(kA);
  const Metrics metrics = store.metrics();
  EXPECT_EQ(metrics.at("fp4/guide/bytes_per_token"), kLsb.bytes() + kKv.bytes() + kRoutes.bytes());
  EXPECT_EQ(metrics.at("perf/trace/ram_bytes"), metrics.at("fp4/trace/bytes_written"));
}

}  // namespace
}  // namespace lockstep::store
