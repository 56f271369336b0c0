#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

namespace lockstep {
namespace {

std::uint32_t crc_of(std::string_view text, std::uint32_t before = 0) {
  return crc32c(std::as_bytes(std::span(text)), before);
}

TEST(Crc32c, KnownAnswers) {  // RFC 3720, B.4, and the check value of the catalogue
  EXPECT_EQ(crc_of("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32)), 0x8a9136aau);
  EXPECT_EQ(crc_of(""), 0u);
}

TEST(Crc32c, ContinuesFromWhatCameBefore) {
  EXPECT_EQ(crc_of("6789", crc_of("12345")), crc_of("123456789"));
}

}  // namespace
}  // namespace lockstep
