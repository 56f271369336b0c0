#include "record/fresh.h"

#include <algorithm>

namespace lockstep {

FreshTrace::FreshTrace(const TraceSource& all, std::span<const Trajectory> batch,
                       WeightVersion oldest)
    : all_(all) {
  for (const Trajectory& trajectory : batch) {
    for (const Span& span : trajectory.path) {
      if (span.version < oldest) stale_.push_back(span.id);
    }
  }
  std::sort(stale_.begin(), stale_.end());
  stale_.erase(std::unique(stale_.begin(), stale_.end()), stale_.end());
}

std::size_t FreshTrace::read(std::span<const TokenKey> tokens, ContractId contract,
                             Rows<std::byte> rows, std::span<std::uint8_t> present) const {
  std::size_t found = all_.read(tokens, contract, rows, present);
  if (stale_.empty()) return found;
  const std::size_t width = tokens.empty() ? 0 : rows.bytes.size() / tokens.size();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (!std::binary_search(stale_.begin(), stale_.end(), tokens[i].span)) continue;
    found -= present[i] != 0 ? 1 : 0;
    present[i] = 0;
    std::ranges::fill(rows.bytes.subspan(i * width, width), std::byte{0});
  }
  return found;
}

std::size_t RoutesTrace::read(std::span<const TokenKey> tokens, ContractId contract,
                              Rows<std::byte> rows, std::span<std::uint8_t> present) const {
  if (rows.place.site == Site::kRouter) return all_.read(tokens, contract, rows, present);
  std::ranges::fill(present, std::uint8_t{0});
  std::ranges::fill(rows.bytes, std::byte{0});
  return 0;
}

bool is_stale(const Trajectory& trajectory, WeightVersion oldest) {
  return std::any_of(trajectory.path.begin(), trajectory.path.end(),
                     [&](const Span& span) { return span.version < oldest; });
}

}  // namespace lockstep
