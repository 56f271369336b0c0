/// Weights rounded to BF16 where they are read, in one launch: bytes and checksums of rounding them
/// one by one.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/exact/crc32c.h"
#include "kernels/exact/place_numbers.h"
#include "kernels/exact/weight_numbers.h"

namespace lockstep::kernels {
namespace {

class PlaceNumbersOn : public testing::TestWithParam<Device> {
  void SetUp() override {
    if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "one by one there";
  }
};

std::vector<float> made_up(std::int64_t count, std::uint32_t state) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<std::int32_t>(state)) * 1e-9f;
  }
  return values;
}

TEST_P(PlaceNumbersOn, GivesTheBytesAndTheirChecksums) {
  const Device device = GetParam();
  // Less than a row of a unit, units that are whole and not, more than 256 of them.
  const std::vector<std::int64_t> counts = {8, 64, 248, 264, 4096, 4104, 2048, 12'288, 1 << 21, 40};
  std::vector<Buffer> masters, to, rounded;
  const Buffer sums = to_device(std::vector<std::uint32_t>(counts.size()), device);
  const Buffer bad = to_device(std::vector<std::uint64_t>(counts.size(), ~0ull), device);
  std::vector<PlacedNumbers> weights;
  NumberPlacer placer(device, {});
  Crc32cList list(device);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    masters.push_back(to_device(made_up(counts[i], static_cast<std::uint32_t>(i)), device));
    to.emplace_back(device, 2 * counts[i]);
    rounded.emplace_back(device, 2 * counts[i]);
    const TensorView<const float, 2> master = {
        masters[i].as<float>(), {1, counts[i]}, {counts[i], 1}, device};
    EXPECT_TRUE(placer.takes(master, to[i].as<Bf16>()));
    weights.push_back(
        {master, to[i].as<Bf16>(), bad.as<std::uint64_t>() + i, sums.as<std::uint32_t>() + i});
    round_weight(master, {rounded[i].as<Bf16>(), {1, counts[i]}, {counts[i], 1}, device},
                 bad.as<std::uint64_t>() + i);
    list.add({{rounded[i].as<std::uint8_t>(), {1, 2 * counts[i]}, {2 * counts[i], 1}, device}});
  }
  placer.place(weights);
  std::vector<std::uint32_t> crcs = to_host<std::uint32_t>(sums);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    crcs[i] = crc_of_sum(crcs[i], 2 * counts[i]);
    EXPECT_EQ(to_host<std::uint8_t>(to[i]), to_host<std::uint8_t>(rounded[i])) << counts[i];
  }
  EXPECT_EQ(crcs, list.run());
  EXPECT_EQ(to_host<std::uint64_t>(bad), std::vector<std::uint64_t>(counts.size(), ~0ull));
}

TEST_P(PlaceNumbersOn, FindsWhatIsNotFinite) {
  const Device device = GetParam();
  std::vector<float> values = made_up(10'000, 5);
  values[7003] = INFINITY;
  values[7001] = 3.4e38f;  // beyond BF16
  values[9000] = NAN;
  const Buffer there = to_device(values, device), to(device, 20'000);
  const Buffer bad = to_device(std::vector<std::uint64_t>{~0ull}, device);
  const Buffer sum = to_device(std::vector<std::uint32_t>{0}, device);
  const PlacedNumbers weight = {{there.as<float>(), {10, 1000}, {1000, 1}, device},
                                to.as<Bf16>(),
                                bad.as<std::uint64_t>(),
                                sum.as<std::uint32_t>()};
  NumberPlacer placer(device, {});
  placer.place({&weight, 1});
  EXPECT_EQ(to_host<std::uint64_t>(bad)[0], 7001u);
}

INSTANTIATE_TEST_SUITE_P(Devices, PlaceNumbersOn, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::kernels
