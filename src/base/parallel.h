/// The house's threads. One pool for the process, on oneTBB; OpenMP belongs to torch alone.
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep {

/// How many threads work; 0 means one a core. LOCKSTEP_THREADS sets it before the first use.
void set_threads(int count);
int threads();

/// Calls body(first, end) on ranges that cover [0, n), none smaller than `grain` but the last.
/// What body computes must not depend on how the range is cut: threads and cuts vary.
void parallel_for(std::int64_t n, std::int64_t grain,
                  const std::function<void(std::int64_t first, std::int64_t end)>& body);

/// While one lives, parallel_for on this thread runs in place: for work that is spread over the
/// threads already, whose parts must not pick up each other.
class InPlace {
 public:
  InPlace();
  ~InPlace();
  InPlace(const InPlace&) = delete;
  InPlace& operator=(const InPlace&) = delete;

 private:
  bool before_;
};

}  // namespace lockstep
