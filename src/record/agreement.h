#pragma once

#include "contract/contract.h"
#include "model/config.h"
#include "record/guide.h"

namespace lockstep {

/// What rollout and trainer agree on. Both are built from the same one, so that nothing they
/// share is ever given twice.
struct Agreement {
  ModelConfig model;
  Contract contract;
  Guide guide;
  std::uint64_t seed = 0;  // of the run: audit tokens follow from it

  /// What is recorded of every token there; kNone: nothing, as in layers of side networks, whose
  /// numbers are past the model's.
  Encoding encoding(Place place) const;

  /// The layout of a row there under `encoding`: that of every token, kCodes for an audit token
  /// (kCodes8 where the site's elements are E4M3), or kBf16 for a dump.
  RowLayout layout(Place place, Encoding encoding) const;

  /// The rule by which a site is quantized. A block of FP8 longer than the site's rows is a row.
  Quantizer rule(Site site) const;

  /// Bytes that one token leaves, over all places, audit tokens aside: docs/formats/record.md.
  std::int64_t bytes_per_token() const;
};

}  // namespace lockstep
