#include "kernels/dense/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/dense/check.h"

namespace lockstep::kernels {
namespace {

struct Items {
  std::vector<std::int32_t> offsets, row_of, slot_of;
  friend bool operator==(const Items&, const Items&) = default;
};

/// By a stable sort.
Items expected(const std::vector<std::int32_t>& experts, std::int32_t slots, std::int32_t count) {
  Items items;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    items.slot_of.push_back(static_cast<std::int32_t>(i));
  }
  const auto of = [&](std::int32_t i) { return experts[static_cast<std::size_t>(i)]; };
  std::stable_sort(items.slot_of.begin(), items.slot_of.end(),
                   [&](std::int32_t a, std::int32_t b) { return of(a) < of(b); });
  for (const std::int32_t i : items.slot_of) items.row_of.push_back(i / slots);
  for (std::int32_t e = 0; e <= count; ++e) {
    items.offsets.push_back(static_cast<std::int32_t>(
        std::count_if(experts.begin(), experts.end(), [&](std::int32_t x) { return x < e; })));
  }
  return items;
}

class DispatchOn : public testing::TestWithParam<Device> {};

INSTANTIATE_TEST_SUITE_P(Devices, DispatchOn, testing::ValuesIn(devices()), name_of_device);

TEST_P(DispatchOn, SortsItemsByExpertAndKeepsTheirOrder) {
  const Device device = GetParam();
  std::mt19937 random(4);
  for (const std::int32_t count : {1, 2, 6, 31, 128, 512, 3000}) {
    for (const std::int32_t rows : {1, 3, 16, 64, 129, 2048, 2061}) {
      const std::int32_t slots = std::min(count, 8);
      std::vector<std::int32_t> experts;
      for (std::int32_t i = 0; i < rows * slots; ++i) {
        // Some are chosen by nearly all, some by none.
        const auto limit = static_cast<std::uint32_t>(count);
        experts.push_back(static_cast<std::int32_t>(random() % (1 + random() % limit)));
      }
      const Buffer from = to_device(experts, device);
      const Buffer offsets(device, (count + 1) * 4), row_of(device, rows * slots * 4),
          slot_of(device, rows * slots * 4);
      const auto span = [](const Buffer& b) {
        return std::span(b.as<std::int32_t>(), static_cast<std::size_t>(b.bytes() / 4));
      };
      const Buffer room(device, dispatch_room(rows * slots, count) * 4);
      for (const bool roomy : {false, true}) {
        dispatch({.experts = rows_of(from.as<const std::int32_t>(), rows, slots, device),
                  .num_experts = count,
                  .offsets = span(offsets),
                  .row_of = span(row_of),
                  .slot_of = span(slot_of),
                  .room = roomy ? span(room) : std::span<std::int32_t>()},
                 {});
        const Items got = {to_host<std::int32_t>(offsets), to_host<std::int32_t>(row_of),
                           to_host<std::int32_t>(slot_of)};
        ASSERT_TRUE(got == expected(experts, slots, count)) << rows << " rows, " << count;
      }
    }
  }
}

TEST(Dispatch, SaysWhatDoesNotFit) {
  std::vector<std::int32_t> numbers(9);
  const auto wrong = [&](std::size_t offsets, std::size_t items) {
    dispatch({.experts = rows_of<const std::int32_t>(numbers.data(), 2, 2),
              .num_experts = 3,
              .offsets = std::span(numbers).first(offsets),
              .row_of = std::span(numbers).first(items),
              .slot_of = std::span(numbers).first(4)},
             {});
  };
  EXPECT_THROW(wrong(3, 4), Error);
  EXPECT_THROW(wrong(4, 3), Error);
}

}  // namespace
}  // namespace lockstep::kernels
