#include "base/philox.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Philox, KnownAnswersOfRandom123) {
  EXPECT_EQ(philox(0, {0, 0, 0, 0}), (PhiloxWords{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, {~0u, ~0u, ~0u, ~0u}),
            (PhiloxWords{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
            (PhiloxWords{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UnitIsInItsInterval) {
  EXPECT_EQ(unit(0, 0), 0.0);
  EXPECT_LT(unit(~0u, ~0u), 1.0);
}

}  // namespace
}  // namespace lockstep
