#include "model/values.h"

#include <gtest/gtest.h>

#include <numeric>

#include "base/error.h"
#include "device/testing.h"
#include "numerics/bf16.h"

namespace lockstep {
namespace {

class Values : public testing::TestWithParam<Device> {};

INSTANTIATE_TEST_SUITE_P(Devices, Values, testing::ValuesIn(devices()), name_of_device);

const WeightId kHead{.role = WeightId::Role::kHead};

TEST_P(Values, AreReadWithAndWithoutGapsBetweenRows) {
  std::vector<float> numbers(60);
  std::iota(numbers.begin(), numbers.end(), -7.0f);
  const Buffer there = to_device(numbers, GetParam());
  for (const std::int64_t cols : {6, 4}) {
    std::vector<float> expected;
    for (std::size_t row = 0; row < 10; ++row) {
      for (std::size_t col = 0; col < static_cast<std::size_t>(cols); ++col) {
        expected.push_back(numbers[row * 6 + col]);
      }
    }
    const TensorView<const float, 2> view = {there.as<float>(), {10, cols}, {6, 1}, GetParam()};
    EXPECT_EQ(f32_of({kHead, view}), expected) << cols;
    EXPECT_EQ(rows_of({kHead, view}), 10);
  }
  const TensorView<const float, 2> none = {there.as<float>(), {0, 6}, {6, 1}, GetParam()};
  EXPECT_TRUE(f32_of({kHead, none}).empty());
}

TEST_P(Values, OfBf16AreItsOwn) {
  const std::vector<Bf16> numbers = {to_bf16(1.5f), to_bf16(-0.0f), to_bf16(3.0e38f),
                                     to_bf16(-2.0f)};
  const Buffer there = to_device(numbers, GetParam());
  const TensorView<const Bf16, 2> view = {there.as<Bf16>(), {2, 2}, {2, 1}, GetParam()};
  EXPECT_EQ(f32_of({kHead, view}), (std::vector<float>{1.5f, -0.0f, to_float(numbers[2]), -2.0f}));
}

TEST(ValuesOfCodes, AreRefusedByName) {
  try {
    f32_of({kHead, PackedView<const std::uint8_t>{}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("comes as codes"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lockstep
