#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "record/agreement.h"
#include "record/trace.h"
#include "record/trajectory.h"

namespace lockstep::instruments {

struct TraceDump {
  const Agreement& agreement;
  std::span<const Trajectory> trajectories{};  // with paths
  const PerToken& logp;                        // theirs
  const TraceSource& trace;  // has w13_in, k and v in BF16 of every token and layer, and routes
  Encoding experts = Encoding::kExperts16;  // of the routes; kNone: they are left out
  std::map<std::string, std::string> metadata{};
};

/// Writes positions 0..T-2 of each trajectory in order. Returns how many rows they are. Throws
/// Error naming the place of a row that the trace does not have.
std::int64_t write_dump(const std::filesystem::path& path, const TraceDump& dump);

}  // namespace lockstep::instruments
