#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "device/stream.h"
#include "rollout/rows.h"

namespace lockstep::rollout {

/// What the work given for a pass depends on: equal shapes, equal work at equal addresses.
using PassShape = std::array<std::int64_t, 8>;

/// Passes that were given to a CUDA device once, to be given again in one call: the time that the
/// host needs does not grow with the layers then. A shape is noted the second time that it comes,
/// for memory has found its size by then.
class PassGraphs {
 public:
  /// Runs what `give` gives to at.stream.
  void run(const Workplace& at, const PassShape& shape, const std::function<void()>& give);

  /// Since the last call.
  std::int64_t take_replays() { return std::exchange(replays_, 0); }

 private:
  static constexpr std::size_t kMost = 48;  // kept; the one that was used longest ago goes

  struct Entry {
    Graph graph;
    std::int64_t last_use = 0;
  };

  std::map<PassShape, Entry> entries_;
  std::int64_t moves_ = 0;  // of the memory that the graphs know
  std::int64_t clock_ = 0;
  std::int64_t replays_ = 0;
};

}  // namespace lockstep::rollout
