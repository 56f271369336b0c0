/// What guidance did, counted over the passes of an update.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "base/metrics.h"
#include "contract/site.h"
#include "device/comm.h"

namespace lockstep::train {

struct Tally {
  /// Of one site, in rows, but for `moved` and `elements`.
  struct Guided {
    std::int64_t covered = 0;
    std::int64_t absent = 0;
    std::int64_t moved = 0;     // elements that guidance took elsewhere than rounding would
    std::int64_t elements = 0;  // in the covered rows
  };
  std::array<Guided, 5> guided{};  // by Site

  std::int64_t routes_followed = 0;    // tokens times layers
  std::int64_t routes_absent = 0;      // no record: the trainer's own
  std::int64_t routes_mismatched = 0;  // of those followed, the router would have chosen others

  double entropy = 0.0;  // summed over scored tokens
  std::int64_t scored = 0;

  Guided& of(Site site) { return guided[static_cast<std::size_t>(site)]; }

  Tally& operator+=(const Tally& other);

  /// Fractions of what all ranks counted. Collective.
  Metrics metrics(Comm& comm) const;
};

}  // namespace lockstep::train
