/// What a pass on a CUDA device has counted there, and has yet to tell.
#pragma once

#include <array>
#include <cstdint>
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

}  // namespace lockstep::train
