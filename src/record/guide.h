#pragma once

#include <cstdint>
#include <optional>

#include "contract/site.h"
#include "numerics/row.h"

namespace lockstep {

/// What becomes of a sample whose records are too old to be followed.
enum class Fallback : std::uint8_t {
  kUnguided,  // the trainer rounds and routes by itself there
  kRescore,   // the engine reads the sample again at its present weights, and leaves new records
};

/// What the rollout records and how the trainer follows it: one value, handed to both, so that
/// nothing is asked for that nobody writes. Evaluation and the reference policy get Guide{}.
struct Guide {
  Guidance mode = Guidance::kOwnScale;
  SiteSet sites;
  LayerSet layers;
  std::optional<LayerSet> kv_layers{};  // of K and V, where they are others
  bool replay_experts = false;          // R3, in every layer
  std::int32_t audit_every = 512;       // one token in so many is recorded in full; 0: none
  std::int32_t max_version_diff = 0;    // records of older weights are not followed
  Fallback fallback = Fallback::kUnguided;

  constexpr const LayerSet& layers_of(Site site) const {
    return kv_layers && (site == Site::kK || site == Site::kV) ? *kv_layers : layers;
  }
  constexpr bool follows(Place place) const {
    return sites.has(place.site) && layers_of(place.site).has(place.layer);
  }
};

}  // namespace lockstep
