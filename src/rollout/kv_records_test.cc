#include "rollout/kv_records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "device/testing.h"

namespace lockstep::rollout {
namespace {

constexpr std::int32_t kPageTokens = 4;

/// What came, and by how many calls.
class Came final : public TraceSink {
 public:
  using Key = std::tuple<std::uint64_t, std::int32_t, Place, Encoding>;

  void open(const Span&, ContractId) override {}
  bool admits(std::int64_t) const override { return true; }
  void append(std::span<const TokenKey> tokens, Rows<const std::byte> rows) override {
    const auto width = static_cast<std::size_t>(rows.layout.bytes());
    ASSERT_EQ(rows.bytes.size(), tokens.size() * width);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto row = rows.bytes.subspan(i * width, width);
      EXPECT_TRUE(all.emplace(Key{tokens[i].span.value, tokens[i].position, rows.place,
                                  rows.layout.encoding},
                              std::vector<std::byte>(row.begin(), row.end()))
                      .second);
    }
  }
  void append_all(std::span<const TokenKey> tokens,
                  std::span<const Rows<const std::byte>> places) override {
    if (++calls == fails_at) throw Error("no room");
    std::int64_t bytes = 0;
    for (const Rows<const std::byte>& rows : places) bytes += std::ssize(rows.bytes);
    most_bytes = std::max(most_bytes, bytes);
    TraceSink::append_all(tokens, places);
  }
  void truncate(SpanId, std::int32_t) override {}
  void seal(SpanId) override {}

  std::map<Key, std::vector<std::byte>> all;
  int calls = 0;
  int fails_at = 0;             // which call; 0: none
  std::int64_t most_bytes = 0;  // of a call
};

/// Rows of a width that is no multiple of four bytes among them, each encoding, E4M3 codes.
std::vector<KvPlace> all_places(std::int64_t& page_bytes) {
  std::vector<KvPlace> places;
  std::int32_t layer = 0;
  std::int64_t offset = 64;
  const auto add = [&](Encoding encoding, std::int32_t width, std::int32_t block, bool wide,
                       bool audits = false) {
    const std::int64_t row =
        RowLayout{wide ? Encoding::kCodes8 : Encoding::kCodes, width, block, 0}.bytes();
    places.push_back({.place = {Layer{layer++}, Site::kK},
                      .layout = {encoding, width, block, 0},
                      .offset = offset,
                      .row_bytes = row,
                      .wide = wide,
                      .audits = audits});
    offset += (row * kPageTokens + 63) / 64 * 64;
  };
  for (const std::int32_t width : {48, 256}) {
    for (const Encoding encoding :
         {Encoding::kLsb, Encoding::kLsbScaleMod4, Encoding::kLsbScaleMod4Map, Encoding::kScale,
          Encoding::kCodes}) {
      add(encoding, width, 16, false);
    }
  }
  add(Encoding::kLsb, 64, 32, false);
  add(Encoding::kLsbScaleMod4, 64, 32, false);
  add(Encoding::kCodes8, 48, 0, true);
  add(Encoding::kLsb, 48, 0, true);
  add(Encoding::kCodes, 256, 16, false, true);
  page_bytes = offset;
  return places;
}

class KvRecordsOn : public ::testing::TestWithParam<Device> {
 protected:
  /// Spans over pages in no order, the last of them in host memory.
  void SetUp() override {
    std::vector<std::byte> bytes(static_cast<std::size_t>(kPages * page_bytes_));
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] =
          static_cast<std::byte>(philox(3, philox_counter(0, static_cast<std::uint32_t>(i), 0))[0]);
    }
    host_ = bytes;
    pool_ = Buffer(GetParam(), std::ssize(bytes));
    copy_bytes(pool_.as<void>(), GetParam(), bytes.data(), {}, std::ssize(bytes));
    away_ = PinnedBuffer(page_bytes_, GetParam());
    std::copy_n(page(kPages - 1), page_bytes_, away_.as<std::byte>());
    synchronize(GetParam());
    for (const auto& [first, count] : {std::pair(0, 9), {6, 1}, {3, 21}, {8, 4}}) {
      hold(first, count);
    }
  }
  void hold(std::int32_t first, std::int32_t count) {
    HeldSpan held = {.span = {.id = {spans_.size() + 1}, .first = first, .count = count},
                     .pages = {}};
    std::vector<int> numbers;
    for (std::int32_t p = 0; p <= (first + count - 1) / kPageTokens; ++p) {
      numbers.push_back(next_page_++ * 5 % kPages);
      held.pages.push_back(numbers.back() == kPages - 1
                               ? away_.as<std::byte>()
                               : pool_.as<std::byte>() + numbers.back() * page_bytes_);
    }
    spans_.push_back(std::move(held));
    numbers_.push_back(std::move(numbers));
  }
  const std::byte* page(int number) const { return host_.data() + number * page_bytes_; }

  /// Is what came each row of the spans at `places`, and nothing else?
  void expect_all(Came& came, const std::vector<KvPlace>& places,
                  const KvRecords::Audited& audited) const {
    std::size_t wanted = 0;
    for (std::size_t s = 0; s < spans_.size(); ++s) {
      const Span& span = spans_[s].span;
      for (std::int32_t p = span.first; p < span.first + span.count; ++p) {
        for (const KvPlace& place : places) {
          if (place.audits && !audited({span.id, p})) continue;
          ++wanted;
          std::vector<std::byte> row(static_cast<std::size_t>(place.layout.bytes()));
          record_from_row(page(numbers_[s][static_cast<std::size_t>(p / kPageTokens)]) +
                              place.offset + p % kPageTokens * place.row_bytes,
                          place.layout, place.wide, row.data());
          EXPECT_EQ((came.all[{span.id.value, p, place.place, place.layout.encoding}]), row)
              << "position " << p << ", layer " << place.place.layer.value;
        }
      }
    }
    EXPECT_EQ(came.all.size(), wanted);
  }

  static constexpr int kPages = 17;
  std::int64_t page_bytes_ = 0;
  std::vector<KvPlace> places_ = all_places(page_bytes_);
  std::vector<std::byte> host_;
  Buffer pool_;
  PinnedBuffer away_;
  int next_page_ = 0;
  std::vector<HeldSpan> spans_;
  std::vector<std::vector<int>> numbers_;  // of their pages
};

std::int64_t token_bytes(const std::vector<KvPlace>& places) {
  std::int64_t bytes = 0;
  for (const KvPlace& place : places) bytes += place.layout.bytes();
  return bytes;
}

bool every_third(TokenKey key) { return (key.position + key.span.value) % 3 == 0; }

TEST_P(KvRecordsOn, GivesEachTokensRowsInBatchesOfAnySize) {
  for (const auto& [batch_bytes, calls] : {std::pair(1, 50), {4 << 10, 14}, {1 << 20, 2}}) {
    KvRecords records(places_, kPageTokens, every_third, GetParam(), {}, batch_bytes);
    for (int again = 0; again < 2; ++again) {
      Came came;
      records.hand_on(spans_, came);
      EXPECT_LE(came.calls, calls);
      EXPECT_LE(came.most_bytes, std::max<std::int64_t>(batch_bytes, token_bytes(places_)));
      expect_all(came, places_, every_third);
    }
  }
}

TEST_P(KvRecordsOn, AuditsAloneFillBatchesToo) {
  std::vector<KvPlace> audits = places_;
  for (KvPlace& place : audits) place.audits = true;
  const auto all = [](TokenKey) { return true; };
  const std::int64_t each = token_bytes(audits);
  for (const KvRecords::Audited& audited : {KvRecords::Audited(all), {every_third}}) {
    KvRecords records(audits, kPageTokens, audited, GetParam(), {}, 2 * each);
    Came came;
    records.hand_on(spans_, came);
    EXPECT_LE(came.most_bytes, 2 * each);
    EXPECT_GT(came.most_bytes, each);
    expect_all(came, audits, audited);
  }
}

/// So many tokens that several threads ask which are audited, from the middle of a span on too.
TEST_P(KvRecordsOn, AuditsStandWhereTheyAreAmongMany) {
  const std::vector<KvPlace> places = {places_.front(), places_.back()};
  for (const auto& [first, count] : {std::pair(0, 0), {5, 5000}, {2, 1}, {0, 0}, {1, 6000}}) {
    hold(first, count);
  }
  KvRecords records(places, kPageTokens, every_third, GetParam(), {}, 1 << 20);
  Came came;
  records.hand_on(spans_, came);
  expect_all(came, places, every_third);
}

TEST_P(KvRecordsOn, GivesAllAfterASinkRefusedSome) {
  KvRecords records(places_, kPageTokens, every_third, GetParam(), {}, 1);
  for (int fails_at = 1; fails_at < 6; ++fails_at) {  // a batch is under way then
    Came refuses;
    refuses.fails_at = fails_at;
    EXPECT_THROW(records.hand_on(spans_, refuses), Error);
    Came came;
    records.hand_on(spans_, came);
    expect_all(came, places_, every_third);
  }
}

TEST_P(KvRecordsOn, NothingIsAskedForWhereNothingIsRecorded) {
  Came came;
  KvRecords(
      {}, kPageTokens, [](TokenKey) { return true; }, GetParam(), {}, 1 << 20)
      .hand_on(spans_, came);
  EXPECT_EQ(came.calls, 0);
}

TEST_P(KvRecordsOn, AllThreadsAskWhoIsAudited) {
  set_threads(4);
  spans_.clear();
  numbers_.clear();
  for (const auto& [first, count] : {std::pair(5, 3001), {0, 1}, {2, 0}, {40, 1700}}) {
    HeldSpan held = {.span = {.id = {spans_.size() + 1}, .first = first, .count = count},
                     .pages = {}};
    std::vector<int> numbers;
    for (std::int32_t p = 0; p <= (first + count) / kPageTokens; ++p) {
      numbers.push_back(p * 7 % (kPages - 1));
      held.pages.push_back(pool_.as<std::byte>() + numbers.back() * page_bytes_);
    }
    spans_.push_back(std::move(held));
    numbers_.push_back(std::move(numbers));
  }
  std::vector<KvPlace> places(places_.begin(), places_.begin() + 2);
  places[1].audits = true;
  KvRecords records(places, kPageTokens, every_third, GetParam(), {}, 64 << 10);
  Came came;
  records.hand_on(spans_, came);
  expect_all(came, places, every_third);
  set_threads(0);
}

INSTANTIATE_TEST_SUITE_P(Devices, KvRecordsOn, ::testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::rollout
