#include "rollout/kv_rows.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/philox.h"

namespace lockstep::rollout {
namespace {

std::vector<std::byte> random_bytes(std::int32_t count) {
  std::vector<std::byte> bytes;
  for (std::int32_t i = 0; i < count; ++i) {
    bytes.push_back(
        static_cast<std::byte>(philox(1, philox_counter(0, static_cast<std::uint32_t>(i), 0))[0]));
  }
  return bytes;
}

std::vector<std::byte> record(const std::vector<std::byte>& row, RowLayout layout,
                              bool wide = false) {
  std::vector<std::byte> out(static_cast<std::size_t>(layout.bytes()) + 1, std::byte{0xA5});
  record_from_row(row.data(), layout, wide, out.data());
  EXPECT_EQ(out.back(), std::byte{0xA5}) << "wrote past the record";
  out.pop_back();
  return out;
}

// R47: what is read back depends on no number of heads or block width.
TEST(KvRows, R47_EveryEncodingHoldsTheCodesOfTheRow) {
  for (const std::int32_t width : {16, 48, 64, 96, 128, 1024}) {
    for (const std::int32_t block : {16, 32}) {
      if (width % block != 0) continue;
      const RowLayout full = {Encoding::kCodes, width, block, 0};
      const std::vector<std::byte> row = random_bytes(full.bytes());
      EXPECT_EQ(record(row, full), row);
      const std::vector<std::byte> lsb = record(row, {Encoding::kLsb, width, block, 0});
      const std::vector<std::byte> mod4 = record(row, {Encoding::kLsbScaleMod4, width, block, 0});
      const std::vector<std::byte> scale = record(row, {Encoding::kScale, width, block, 0});
      const auto planes = static_cast<std::size_t>(width / 8);
      const auto codes = static_cast<std::size_t>(width / 2);
      for (std::size_t i = 0; i < static_cast<std::size_t>(width); ++i) {
        const unsigned pair = std::to_integer<unsigned>(row[i / 2]);
        const unsigned code = i % 2 == 0 ? pair & 15u : pair >> 4;
        ASSERT_EQ(std::to_integer<unsigned>(lsb[i / 8]) >> i % 8 & 1u, code & 1u) << i;
        ASSERT_EQ(std::to_integer<unsigned>(mod4[i / 8]) >> i % 8 & 1u, code & 1u) << i;
      }
      for (std::size_t j = 0; j < static_cast<std::size_t>(width / block); ++j) {
        ASSERT_EQ(lsb[planes + j], row[codes + j]);
        ASSERT_EQ(scale[j], row[codes + j]);
        ASSERT_EQ(std::to_integer<unsigned>(mod4[planes + j / 4]) >> 2 * (j % 4) & 3u,
                  std::to_integer<unsigned>(row[codes + j]) & 3u);
      }
    }
  }
}

TEST(KvRows, CodesOfFp8AreBytesWithoutScales) {
  const std::vector<std::byte> row = random_bytes(48);
  EXPECT_EQ(record(row, {Encoding::kCodes8, 48, 0, 0}, true), row);
  for (const Encoding encoding : {Encoding::kLsb, Encoding::kLsbScaleMod4}) {
    const std::vector<std::byte> bits = record(row, {encoding, 48, 0, 0}, true);
    ASSERT_EQ(bits.size(), 6u);
    for (std::size_t i = 0; i < 48; ++i) {
      EXPECT_EQ(std::to_integer<unsigned>(bits[i / 8]) >> i % 8 & 1u,
                std::to_integer<unsigned>(row[i]) & 1u);
    }
  }
}

TEST(KvRows, PaddingOfResiduesIsZero) {
  const std::vector<std::byte> row(64 / 2 + 4 + 2, std::byte{0xff});
  const std::vector<std::byte> three = record(row, {Encoding::kLsbScaleMod4, 48, 16, 0});
  EXPECT_EQ(three.back(), std::byte{0x3f});
}

}  // namespace
}  // namespace lockstep::rollout
