#include "base/text.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Text, PiecesInARow) {
  EXPECT_EQ(cat({"lr is ", 0.1, ", not ", 3, ' ', true}), "lr is 0.1, not 3 true");
  EXPECT_EQ(cat({0.1f}), "0.1");
  EXPECT_EQ(cat({}), "");
}

TEST(Text, NearestNamesTheTypo) {
  EXPECT_EQ(nearest("max_tokns", {"min_tokens", "max_tokens", "seed"}), "max_tokens");
  EXPECT_EQ(nearest("zzzzzzzz", {"seed", "steps"}), "");
}

}  // namespace
}  // namespace lockstep
