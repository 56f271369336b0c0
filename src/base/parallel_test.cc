#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace lockstep {
namespace {

TEST(Parallel, CoversEachIndexOnce) {
  for (const std::int64_t n : {0, 1, 7, 1000}) {
    std::vector<std::atomic<int>> hits(static_cast<std::size_t>(n));
    parallel_for(n, 3, [&](std::int64_t first, std::int64_t end) {
      for (; first < end; ++first) ++hits[static_cast<std::size_t>(first)];
    });
    for (const auto& hit : hits) EXPECT_EQ(hit, 1);
  }
}

TEST(Parallel, AnExceptionReachesTheCaller) {
  EXPECT_THROW(parallel_for(100, 1, [](std::int64_t, std::int64_t) { throw 1; }), int);
}

}  // namespace
}  // namespace lockstep
