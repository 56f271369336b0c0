/// What became of the records that a batch should have: what the trainer can follow, what it must
/// leave unguided, and which samples are no good.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/metrics.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "record/trajectory.h"

namespace lockstep {

struct Coverage {
  struct Rows {
    std::int64_t present = 0;
    std::int64_t absent = 0;
  };
  std::array<Rows, 5> sites{};          // by Site, over all layers that record it
  std::vector<std::uint8_t> tainted{};  // [batch] 1: a K or V record is lost, the sample is masked
  std::int64_t tokens = 0;              // that should have records
  std::int64_t unguided_tokens = 0;     // an activation record is lost
  std::int64_t stale_tokens = 0;        // of weights too old to be followed: unguided as well

  std::int64_t tainted_samples() const;

  /// Present rows of a site, or of all guided sites together (routes aside); 1 where none was due.
  double fraction(Site site) const;
  double fraction() const;
};

/// Looks for every record that `agreement` says a batch has. A span more than max_version_diff
/// versions older than `newest` is stale: its rows count as absent and taint nothing, for its
/// tokens fall back to plain rounding on purpose. Reads no row but only whether it is there.
Coverage cover(std::span<const Trajectory> batch, const Agreement& agreement,
               const TraceSource& trace, WeightVersion newest);

/// fp4/guide/{unguided,stale}_tokens. What is covered and what is tainted, the trainer and the
/// diagnostics of rl/ say.
Metrics metrics(const Coverage& coverage);

/// Throws Error, one line, where a site's fraction is below `least`.
void require_coverage(const Coverage& coverage, double least);

}  // namespace lockstep
