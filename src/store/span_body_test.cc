#include "store/span_body.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"
#include "store/testing.h"

namespace lockstep::store {
namespace {

using namespace testing;

/// All rows of a closed column, by what its runs say.
void expect_rows(const Column& column, std::span<const TokenKey> tokens) {
  std::vector<TokenKey> held;
  for (const Run& run : column.runs()) {
    EXPECT_EQ(run.row, std::ssize(held));
    for (std::int32_t i = 0; i < run.count; ++i) held.push_back({SpanId{1}, run.position + i});
  }
  ASSERT_EQ(held, std::vector(tokens.begin(), tokens.end()));
  ASSERT_EQ(column.rows(), std::ssize(held));
  if (held.empty()) return;
  Bytes bytes(static_cast<std::size_t>(column.bytes()));
  column.copy(0, column.rows(), bytes.data());
  EXPECT_EQ(bytes, rows_of(tokens, kW13, kLsb));
}

/// Rows [first, end), one call of put() a piece; the call of number `fails_at` throws.
void extend(Column& column, std::int32_t first, std::int32_t end, int fails_at = -1) {
  const Bytes rows = rows_of(positions(SpanId{1}, first, end), kW13, kLsb);
  int calls = 0;
  column.extend(first, end - first, [&](std::byte* to, std::int32_t at, std::int32_t n) {
    if (calls++ == fails_at) throw Error("no more");
    std::memcpy(to, rows.data() + row_offset(at, kLsb.bytes()), row_offset(n, kLsb.bytes()));
  });
}

struct Failed {
  std::int32_t held = 0;      // rows before
  std::int32_t position = 0;  // of the rows that fail
  int fails_at = 0;
  std::int32_t taken = 0;  // of them
};

// A first piece of 8 rows: five are held in it, and rows that come take two pieces.
constexpr Failed kFailed[] = {{0, 0, 0, 0}, {0, 4, 0, 0}, {5, 5, 0, 0}, {5, 9, 0, 0},
                              {5, 5, 1, 3}, {5, 9, 1, 3}, {8, 8, 0, 0}, {8, 9, 0, 0}};
constexpr std::size_t kStagger = 7;
constexpr std::int32_t kMore = 20;

std::vector<TokenKey> both(std::int32_t held, std::int32_t first, std::int32_t end) {
  std::vector<TokenKey> tokens = positions(SpanId{1}, 0, held);
  for (const TokenKey& key : positions(SpanId{1}, first, end)) tokens.push_back(key);
  return tokens;
}

class ColumnThatFailed : public ::testing::TestWithParam<Failed> {
 protected:
  void SetUp() override {
    const auto [held, position, fails_at, taken] = GetParam();
    for (std::int32_t p = 0; p < held; ++p) extend(column_, p, p + 1);
    EXPECT_THROW(extend(column_, position, position + kMore, fails_at), Error);
    EXPECT_EQ(column_.rows(), held + taken);
    EXPECT_EQ(column_.end(), taken > 0 ? position + taken : held);
  }
  Column column_{kW13, kLsb, kStagger};
};

TEST_P(ColumnThatFailed, TakesTheSameRowsOnceTheyAreCut) {
  const auto [held, position, fails_at, taken] = GetParam();
  column_.truncate(position);
  EXPECT_EQ(column_.rows(), held);
  EXPECT_EQ(column_.end(), held);
  if (held == 0) {
    EXPECT_EQ(column_.capacity_bytes(), 0);
  }
  extend(column_, position, position + kMore);
  column_.close();
  EXPECT_EQ(column_.capacity_bytes(), column_.bytes());
  expect_rows(column_, both(held, position, position + kMore));
}

TEST_P(ColumnThatFailed, EndsWithTheRowsThatCame) {
  const auto [held, position, fails_at, taken] = GetParam();
  column_.close();
  EXPECT_EQ(column_.capacity_bytes(), column_.bytes());
  expect_rows(column_, both(held, position, position + taken));
}

TEST_P(ColumnThatFailed, GoesOnWithLaterRows) {
  const auto [held, position, fails_at, taken] = GetParam();
  extend(column_, position + taken, position + kMore);
  column_.close();
  expect_rows(column_, both(held, position, position + kMore));
}

TEST(Column, AClosedOneHoldsAnEighthMoreAtMost) {
  for (std::int32_t rows = 1; rows < 300; ++rows) {
    Column column(kW13, kLsb, 3);
    for (std::int32_t p = 0; p < rows; ++p) extend(column, p, p + 1);
    column.close();
    EXPECT_LE(column.capacity_bytes(), column.bytes() + column.bytes() / 8) << rows;
    expect_rows(column, both(0, 0, rows));
  }
}

INSTANTIATE_TEST_SUITE_P(Pieces, ColumnThatFailed, ::testing::ValuesIn(kFailed));

}  // namespace
}  // namespace lockstep::store
