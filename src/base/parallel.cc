#include "base/parallel.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {
namespace {

int default_threads() {
  const char* asked = std::getenv("LOCKSTEP_THREADS");
  if (asked == nullptr || *asked == '\0') return tbb::info::default_concurrency();
  constexpr int kMost = 1024;
  int count = 0;
  const char* end = asked + std::strlen(asked);
  const auto [at, error] = std::from_chars(asked, end, count);
  if (error != std::errc() || at != end || count < 1 || count > kMost) {
    throw Usage(cat({"LOCKSTEP_THREADS is \"", asked, "\": set it to a number from 1 to ", kMost,
                     ", or unset it for one thread a core"}));
  }
  return count;
}

std::unique_ptr<tbb::task_arena>& arena() {
  static auto instance = std::make_unique<tbb::task_arena>(default_threads());
  return instance;
}

thread_local bool in_place = false;

/// Subnormals count: scales and codes are defined on them.
void check_subnormals() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  if ((_mm_getcsr() & (kFlushToZero | kDenormalsAreZero)) != 0) {
    throw Error(
        "a thread flushes subnormal numbers to zero (MXCSR's FTZ or DAZ is set): "
        "something in this process was built or started with fast math");
  }
#endif
}

}  // namespace

void set_threads(int count) {
  arena() = std::make_unique<tbb::task_arena>(count > 0 ? count : default_threads());
}

int threads() { return arena()->max_concurrency(); }

void parallel_for(std::int64_t n, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  if (n <= grain || in_place || threads() == 1) {
    check_subnormals();
    body(0, n);
    return;
  }
  arena()->execute([&] {
    tbb::parallel_for(tbb::blocked_range<std::int64_t>(0, n, static_cast<std::size_t>(grain)),
                      [&](const tbb::blocked_range<std::int64_t>& range) {
                        check_subnormals();
                        body(range.begin(), range.end());
                      });
  });
}

InPlace::InPlace() : before_(in_place) { in_place = true; }
InPlace::~InPlace() { in_place = before_; }

}  // namespace lockstep
