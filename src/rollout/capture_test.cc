// The bytes of routes and plain numbers, as docs/formats/record.md shows them.
#include "rollout/capture.h"

#include <gtest/gtest.h>

#include "numerics/bf16.h"
#include "record/testing.h"
#include "rollout/testing.h"

namespace lockstep::rollout {
namespace {

using Bytes = std::vector<std::uint8_t>;

/// What a rollout of that many experts leaves of one token of the first layer.
class Captured {
 public:
  explicit Captured(std::int32_t num_experts) {
    agreement_.model.num_experts = num_experts;
    agreement_.model.experts_per_token = 2;
    agreement_.model.hidden = 2;
    pass_.tokens = {5};
    pass_.positions = {0};
    pass_.keys = {{SpanId{1}, 0}};
    trace_.open({.id = SpanId{1}, .count = 1}, ContractId{});
  }

  Bytes experts(std::vector<std::int32_t> chosen) {
    Capture capture(agreement_, &trace_);
    capture.begin(pass_);
    capture.routes(pass_, Layer{0}, {chosen.data(), {1, 2}, {2, 1}});
    return only_row();
  }
  Bytes numbers(std::vector<Bf16> x) {
    Capture capture(agreement_, &trace_, true);
    capture.begin(pass_);
    capture.numbers(pass_, Layer{0}, Site::kW13In, {x.data(), {1, 2}, {2, 1}});
    return only_row();
  }

 private:
  Bytes only_row() const {
    Bytes row;
    EXPECT_EQ(trace_.rows().size(), 1u);
    for (const std::byte byte : trace_.rows().begin()->second) {
      row.push_back(std::to_integer<std::uint8_t>(byte));
    }
    return row;
  }

  Agreement agreement_ = testing::small_bf16();
  Pass pass_;
  testing::MemoryTrace trace_;
};

TEST(RecordFormat, TheDocumentsRoutesAndNumbersAreWhatARolloutLeaves) {
  auto rows = lockstep::testing::rows_in("docs/formats/record.md");
  EXPECT_EQ(rows["experts8"], Captured(64).experts({3, 9}));
  EXPECT_EQ(rows["experts16"], Captured(512).experts({3, 300}));
  EXPECT_EQ(Captured(256).experts({255, 0}), (Bytes{255, 0}));  // the last that a byte holds
  EXPECT_EQ(Captured(257).experts({256, 0}), (Bytes{0, 1, 0, 0}));
  EXPECT_EQ(rows["bf16"], Captured(64).numbers({to_bf16(1.0f), to_bf16(-2.5f)}));
}

}  // namespace
}  // namespace lockstep::rollout
