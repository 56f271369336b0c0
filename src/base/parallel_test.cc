#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/error.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

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

TEST(Parallel, InPlaceKeepsTheThread) {
  const InPlace in_place;
  const auto here = std::this_thread::get_id();
  int calls = 0;
  parallel_for(100, 1, [&](std::int64_t first, std::int64_t end) {
    EXPECT_EQ(std::this_thread::get_id(), here);
    EXPECT_EQ(end - first, 100);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
}

#if defined(__x86_64__)
TEST(Parallel, AThreadThatFlushesSubnormalsIsRefused) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8000);
  EXPECT_THROW(parallel_for(1, 1, [](std::int64_t, std::int64_t) {}), Error);
  _mm_setcsr(before);
}
#endif

}  // namespace
}  // namespace lockstep
