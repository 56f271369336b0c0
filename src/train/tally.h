/// What guidance did, counted over the passes of an update.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/metrics.h"
#include "contract/site.h"
#include "device/comm.h"
#include "kernels/exact/audit.h"

namespace lockstep::train {

struct Tally {
  /// Of one site, in rows, but for `moved` and `elements`.
  struct Guided {
    std::int64_t covered = 0;
    std::int64_t absent = 0;
    std::int64_t moved = 0;     // elements that guidance took elsewhere than rounding would
    std::int64_t elements = 0;  // in the covered rows
  };

  /// Of the audit tokens of one place: tokens whose codes the rollout kept in full, in every arm,
  /// so that what guidance does is measured and not assumed.
  struct Audit {
    std::array<std::int64_t, kernels::kNumAuditCounts> counts{};
    std::int64_t rounded = 0;  // elements that the trainer rounds; only theirs may still differ
  };

  explicit Tally(std::int32_t num_layers)
      : audits(static_cast<std::size_t>(num_layers) * kAuditSites) {}

  Guided& of(Site site) { return guided[static_cast<std::size_t>(site)]; }
  Audit& of(Place place) {
    return audits[static_cast<std::size_t>(place.layer.value) * kAuditSites +
                  static_cast<std::size_t>(place.site)];
  }

  Tally& operator+=(const Tally& other);

  /// Fractions of what all ranks counted. Collective.
  Metrics metrics(Comm& comm) const;

  static constexpr std::size_t kAuditSites = 4;  // all but kRouter
  std::array<Guided, 4> guided{};                // by Site
  std::vector<Audit> audits;                     // [L, kAuditSites]

  std::int64_t routes_followed = 0;    // tokens times layers
  std::int64_t routes_absent = 0;      // no record: the trainer's own
  std::int64_t routes_mismatched = 0;  // of those followed, the router would have chosen others

  double entropy = 0.0;  // summed over scored tokens
  std::int64_t scored = 0;
};

}  // namespace lockstep::train
