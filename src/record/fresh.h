/// Records of weights that are not too old: what guide.max_version_diff leaves of a batch's.
#pragma once

#include <vector>

#include "record/trace.h"
#include "record/trajectory.h"

namespace lockstep {

/// A source without the spans whose weights are older than `oldest`: their rows are absent, so that
/// whoever reads falls back to its own rounding and routes there. Only the batch's spans are known;
/// `all` must live as long.
class FreshTrace final : public TraceSource {
 public:
  FreshTrace(const TraceSource& all, std::span<const Trajectory> batch, WeightVersion oldest);

  std::size_t read(std::span<const TokenKey> tokens, ContractId contract, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override;
  void prefetch(std::span<const TokenKey> tokens) const override { all_.prefetch(tokens); }

 private:
  const TraceSource& all_;
  std::vector<SpanId> stale_;  // sorted
};

/// A source of routes alone: a pass without guidance that takes the experts that one with it takes.
class RoutesTrace final : public TraceSource {
 public:
  /// `all` must live as long.
  explicit RoutesTrace(const TraceSource& all) : all_(all) {}

  std::size_t read(std::span<const TokenKey> tokens, ContractId contract, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override;
  void prefetch(std::span<const TokenKey> tokens) const override { all_.prefetch(tokens); }

 private:
  const TraceSource& all_;
};

/// Does any record of the trajectory stem from weights older than `oldest`?
bool is_stale(const Trajectory& trajectory, WeightVersion oldest);

}  // namespace lockstep
