#pragma once

#include "contract/site.h"
#include "numerics/row.h"

namespace lockstep {

/// What the rollout records and how the trainer follows it: one value, handed to both, so that
/// nothing is asked for that nobody writes. Evaluation and the reference policy get Guide{}.
struct Guide {
  Guidance mode = Guidance::kOwnScale;
  SiteSet sites;
  LayerSet layers;
  bool replay_experts = false;        // R3, in every layer
  std::int32_t audit_every = 512;     // one token in so many is recorded in full; 0: none
  std::int32_t max_version_diff = 0;  // records of older weights are not followed

  constexpr bool follows(Place place) const {
    return sites.has(place.site) && layers.has(place.layer);
  }
};

}  // namespace lockstep
