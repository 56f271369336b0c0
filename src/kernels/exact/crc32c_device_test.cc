/// CRC32C and flips on every device: every length and alignment, and experts of every shape, held
/// against base/crc32c and against counting one by one.
#include <gtest/gtest.h>

#include <vector>

#include "base/crc32c.h"
#include "base/philox.h"
#include "device/testing.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/crc32c.h"
#include "kernels/exact/gf2.h"
#include "numerics/bf16.h"
#include "numerics/exponent.h"

namespace lockstep::kernels {
namespace {

std::vector<std::uint8_t> random_bytes(std::int64_t count, std::uint64_t seed, int values = 256) {
  std::vector<std::uint8_t> bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto word = philox(seed, philox_counter(static_cast<std::uint64_t>(i), 0, 0))[0];
    bytes.push_back(static_cast<std::uint8_t>(word % static_cast<std::uint32_t>(values)));
  }
  return bytes;
}

std::uint32_t crc_of(std::span<const std::uint8_t> bytes, std::uint32_t crc = 0) {
  return crc32c(std::as_bytes(bytes), crc);
}

TEST(Gf2, PowersOfXMoveACrcBehindWhatFollows) {
  const std::vector<std::uint8_t> bytes = random_bytes(1000, 1);
  for (const std::size_t cut : {0, 1, 4, 500, 999}) {
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      sum ^= gf2::times(gf2::after_byte(0, bytes[i]), gf2::power(8 * (bytes.size() - 1 - i)));
    }
    EXPECT_EQ(gf2::crc_of(sum, bytes.size()), crc_of(bytes)) << cut;
  }
  EXPECT_EQ(gf2::crc_of(0, 0), 0u);
}

class Crc32cOn : public testing::TestWithParam<Device> {};

TEST_P(Crc32cOn, EveryLengthAtEveryAlignment) {
  const Device device = GetParam();
  const std::vector<std::uint8_t> bytes = random_bytes(70'000, 2);
  const Buffer buffer = to_device(bytes, device);
  Crc32cList list(device);
  std::vector<std::uint32_t> expected;
  const auto ask = [&](std::int64_t first, std::int64_t length) {
    EXPECT_EQ(list.add({{buffer.as<std::uint8_t>() + first, {1, length}, {length, 1}, device}}),
              std::ssize(expected));
    expected.push_back(crc_of(std::span(bytes).subspan(static_cast<std::size_t>(first),
                                                       static_cast<std::size_t>(length))));
  };
  for (std::int64_t first = 0; first < 5; ++first) {
    for (std::int64_t length = 0; length < 300; ++length) ask(first, length);
    for (const std::int64_t length : {1023, 4096, 32767, 32768, 32769, 40'000, 65'536, 69'995}) {
      ask(first, length);
    }
  }
  EXPECT_EQ(list.run(), expected);
  EXPECT_EQ(list.run(), expected);  // again, and it may grow
  ask(7, 33'333);
  EXPECT_EQ(list.run(), expected);
}

TEST_P(Crc32cOn, RowsWithGapsAndPartsInOrder) {
  const Device device = GetParam();
  const std::vector<std::uint8_t> bytes = random_bytes(9000, 3);
  const Buffer buffer = to_device(bytes, device);
  const Crc32cList::Rows first = {buffer.as<std::uint8_t>(), {7, 101}, {130, 1}, device};
  const Crc32cList::Rows second = {buffer.as<std::uint8_t>() + 5003, {3, 64}, {64, 1}, device};
  std::uint32_t crc = 0;
  for (std::size_t row = 0; row < 7; ++row)
    crc = crc_of(std::span(bytes).subspan(row * 130, 101), crc);
  crc = crc_of(std::span(bytes).subspan(5003, 192), crc);
  Crc32cList list(device);
  list.add({first, second});
  list.add({first, {}, second});
  list.add({second, first});
  const auto crcs = list.run();
  EXPECT_EQ(crcs[0], crc);
  EXPECT_EQ(crcs[1], crc);
  EXPECT_NE(crcs[2], crc);
}

/// An expert's codes as they arrive.
struct Arrived {
  Arrived(std::int64_t out, std::int64_t cols, std::uint64_t seed)
      : out(out),
        cols(cols),
        codes(random_bytes(out * cols / 2, seed)),
        scales(random_bytes(out * cols / 16, seed + 1, 127)),
        global{power_of_two(static_cast<std::int32_t>(seed % 40) - 20)} {}

  void send(Device device) {
    on_device[0] = to_device(codes, device);
    on_device[1] = to_device(scales, device);
    on_device[2] = to_device(global, device);
  }
  PackedView<const std::uint8_t> view() const {
    const Device device = on_device[0].device();
    return {{on_device[0].as<std::uint8_t>(), {out, cols / 2}, {cols / 2, 1}, device},
            {on_device[1].as<std::uint8_t>(), {out, cols / 16}, {cols / 16, 1}, device},
            {on_device[2].as<float>(), {out}, {0}, device}};
  }
  std::uint32_t crc() const {
    const auto bytes = std::as_bytes(std::span(global));
    return crc32c(bytes, crc_of(scales, crc_of(codes)));
  }

  std::int64_t out, cols;
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> global;
  Buffer on_device[3];
};

TEST_P(Crc32cOn, ExpertsAsTheyArrivedFromWhereTheyLie) {
  const Device device = GetParam();
  Crc32cList list(device);
  std::vector<std::uint32_t> expected;
  std::vector<Buffer> memory;
  for (const std::int32_t out : {1, 15, 16, 17, 40, 64}) {
    for (const std::int32_t cols : {16, 32, 48, 64, 80, 112, 128, 192, 208, 768}) {
      const std::int64_t bytes = 2 * W4a4Weights::expert_bytes(out, cols);
      memory.emplace_back(device, bytes);
      fill_bytes(memory.back().as<void>(), device, 0, bytes);
      const W4a4Weights weights = {memory.back().as<>(), 2, out, cols, device};
      for (const std::int32_t expert : {0, 1}) {
        Arrived arrived(out, cols, static_cast<std::uint64_t>(100 * out + cols + expert));
        arrived.send(device);
        w4a4_fill(weights, expert, 0, arrived.view());
        synchronize(device);
        list.add(weights, expert);
        expected.push_back(arrived.crc());
      }
    }
  }
  EXPECT_EQ(list.run(), expected);
}

TEST_P(Crc32cOn, FlipsAreCountedOneByOne) {
  const Device device = GetParam();
  for (const auto& [out, cols] : {std::pair{40, 208}, {16, 64}, {7, 32}}) {
    Arrived before(out, cols, 5), now(out, cols, 5);
    std::vector<std::int64_t> expected(kNumFlipCounts);
    for (std::size_t i = 0; i < now.codes.size(); i += 3) {
      now.codes[i] = static_cast<std::uint8_t>(now.codes[i] ^ (i % 7) * 17u);
      for (const int shift : {0, 4}) {
        const int steps =
            grid_place(now.codes[i] >> shift & 15u) - grid_place(before.codes[i] >> shift & 15u);
        expected[kCodeFlips] += steps != 0;
        expected[kAdjacentFlips] += steps == 1 || steps == -1;
      }
    }
    for (std::size_t i = 0; i < now.scales.size(); i += 5) {
      now.scales[i] = static_cast<std::uint8_t>((now.scales[i] + 1) % 127);
      ++expected[kScaleFlips];
    }
    before.send(device);
    now.send(device);
    const Buffer memory(device, W4a4Weights::expert_bytes(out, cols));
    fill_bytes(memory.as<void>(), device, 0, memory.bytes());
    const W4a4Weights weights = {memory.as<>(), 1, out, cols, device};
    w4a4_fill(weights, 0, 0, before.view());
    const Buffer counts = to_device(std::vector<std::int64_t>(kNumFlipCounts), device);
    count_flips(now.view(), weights, 0, counts.as<std::int64_t>());
    EXPECT_EQ(to_host<std::int64_t>(counts), expected);
    count_flips(now.view(), before.view(), counts.as<std::int64_t>());
    for (std::int64_t& count : expected) count *= 2;
    EXPECT_EQ(to_host<std::int64_t>(counts), expected);
  }
  const std::vector<Bf16> then = {to_bf16(0.0f), to_bf16(1.0f), to_bf16(-2.0f), to_bf16(3.0f)};
  const std::vector<Bf16> later = {to_bf16(-0.0f), to_bf16(1.0f), to_bf16(2.0f), to_bf16(3.5f)};
  const Buffer a = to_device(then, device), b = to_device(later, device);
  const Buffer counts = to_device(std::vector<std::int64_t>(kNumFlipCounts), device);
  const auto view = [&](const Buffer& buffer) {
    return TensorView<const Bf16, 2>{buffer.as<Bf16>(), {2, 2}, {2, 1}, device};
  };
  count_flips(view(b), view(a), counts.as<std::int64_t>());
  EXPECT_EQ(to_host<std::int64_t>(counts), (std::vector<std::int64_t>{0, 0, 0, 2}));
}

INSTANTIATE_TEST_SUITE_P(Devices, Crc32cOn, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::kernels
