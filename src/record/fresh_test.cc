#include "record/fresh.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

/// Every row is there, and all ones.
class Whole final : public TraceSource {
 public:
  std::size_t read(std::span<const TokenKey> tokens, ContractId, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override {
    std::ranges::fill(rows.bytes, std::byte{1});
    std::ranges::fill(present, std::uint8_t{1});
    return tokens.size();
  }
  void prefetch(std::span<const TokenKey>) const override {}
};

TEST(FreshTrace, OldRowsAreAbsentAndZero) {
  constexpr SpanId kOld{7}, kNew{3};
  const Trajectory trajectory = {.prompt = {1},
                                 .tokens = std::vector<Token>(4),
                                 .path = {{.id = kOld, .first = 0, .count = 2, .version = {4}},
                                          {.id = kNew, .first = 2, .count = 1, .version = {5}}}};
  const std::vector<TokenKey> keys = {{kOld, 0}, {kNew, 2}, {kOld, 1}};
  std::vector<std::byte> bytes(6);
  std::vector<std::uint8_t> present(3);
  const Whole whole;
  const auto read = [&](std::int64_t oldest, std::span<std::byte> into) {
    const FreshTrace fresh(whole, std::span(&trajectory, 1), WeightVersion{oldest});
    return fresh.read(keys, ContractId{1}, {{Layer{0}, Site::kK}, {}, into}, present);
  };
  EXPECT_EQ(read(4, bytes), 3u);
  EXPECT_FALSE(is_stale(trajectory, WeightVersion{4}));
  EXPECT_EQ(read(5, bytes), 1u);
  EXPECT_TRUE(is_stale(trajectory, WeightVersion{5}));
  EXPECT_EQ(present, (std::vector<std::uint8_t>{0, 1, 0}));
  EXPECT_EQ(bytes[0], std::byte{0});
  EXPECT_EQ(bytes[2], std::byte{1});
  EXPECT_EQ(bytes[5], std::byte{0});
  EXPECT_EQ(read(6, {}), 0u);  // presence alone
}

TEST(RoutesTrace, HasRoutesAndNothingElse) {
  const std::vector<TokenKey> keys = {{SpanId{1}, 0}, {SpanId{1}, 1}};
  const Whole whole;
  const RoutesTrace routes(whole);
  for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV, Site::kRouter}) {
    const bool kept = site == Site::kRouter;
    std::vector<std::byte> bytes(4, std::byte{9});
    std::vector<std::uint8_t> present(2, 9);
    EXPECT_EQ(routes.read(keys, ContractId{1}, {{Layer{0}, site}, {}, bytes}, present),
              kept ? 2u : 0u);
    EXPECT_EQ(present, std::vector<std::uint8_t>(2, kept ? 1 : 0));
    EXPECT_EQ(bytes, std::vector<std::byte>(4, std::byte{kept}));
  }
}

}  // namespace
}  // namespace lockstep
