/// What a pass on a CUDA device brings there, and what it has counted there and has yet to tell.
#pragma once

#include <c10/core/Event.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "ops/torch.h"
#include "train/sites.h"

namespace lockstep::train {

struct Sites::Later {
  /// Audit tokens' rows of a place, before rounding and, where there is any, after.
  struct Audit {
    Place place;
    std::int64_t cols = 0;
    at::Tensor before, after;
  };

  at::Tensor counts;                   // int64 [kNumSites, kNumGuideCounts]
  std::array<std::int64_t, 4> cols{};  // of the site's rows
  at::Tensor mismatched;               // int64 [1] rows that their router would route elsewhere
  std::int64_t followed = 0;
  std::int64_t layers = 0;  // whose routes were followed
  at::Tensor audited;       // int64, rows of the pass
  std::vector<Audit> audits;
};

/// A place's records on the device.
struct Sites::There {
  RowLayout layout;
  at::Tensor rows;            // uint8 [rows, layout.bytes()], or int64 [rows, K] experts
  at::Tensor present;         // uint8 [rows]
  std::int64_t followed = 0;  // how many are present
  std::optional<c10::Event> arrived{};

  /// Makes the current stream wait for them.
  void await() const;
};

/// A thread that brings them in the order of a forward pass, by a stream of its own.
struct Sites::Ahead {
  std::map<Place, std::promise<There>> promised;
  std::atomic<bool> stopped = false;
  std::thread thread;
};

}  // namespace lockstep::train
