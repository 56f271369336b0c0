#pragma once

#include <cstddef>
#include <span>

#include "device/view.h"
#include "numerics/quantizer.h"
#include "numerics/row.h"

namespace lockstep::kernels {

/// What audit() adds to its counts, in this order. The metrics fp4/{act,kv}/* are quotients of
/// them.
enum AuditCount : int {
  kAuditRows,
  kAuditCodes,  // elements of these rows
  kAuditBlocks,
  kAuditFlips,        // at the trainer's own scale and nearest, the value differs: value_flip_frac
  kAuditCodeFlips,    // ... the code differs: flip_frac
  kAuditAdjacent,     // ... by one step of the grid: adjacent_frac, of the code flips
  kAuditScaleFlips,   // blocks whose own scale differs from the recorded one: scale_flip_frac
  kAuditStillDiffer,  // the operand after guidance differs from the rollout's value: residual_frac
  kAuditBeyond,       // x lies scale / 4 or more from all that rounds to the code: beyond_frac
  kNumAuditCounts,
};

struct AuditArgs {
  TensorView<const Bf16, 2> x{};        // [rows, cols] the trainer's values
  TensorView<const Bf16, 2> operand{};  // [rows, cols] what guide() made of them
  Quantizer rule{};
  RowLayout layout{};  // kCodes or kCodes8; a record covers layout.width / cols rows
  TensorView<const std::uint8_t, 2> records{};  // [records, layout.bytes()]
  TensorView<const std::uint8_t, 1> present{};  // [records] 0: not an audit token; empty: all are
  std::int8_t exponent = 0;                     // as in GuideArgs
  TensorView<std::int64_t, 1> counts{};         // [kNumAuditCounts], added to
};

/// Compares what the trainer uses, and what it would use unguided, with the full codes that audit
/// tokens keep. `beyond` is a lower bound on the share of elements that drifted out of the radius
/// within which guidance is exact: the rollout's x is not recorded, only the interval it lay in.
/// Damaged records and rows that are not finite are left out. Throws Error naming the argument.
void audit(const AuditArgs& args, Stream stream = {});

/// Up to kMostAudits on one device, in one launch.
inline constexpr std::size_t kMostAudits = 16;
void audit(std::span<const AuditArgs> all, Stream stream = {});

}  // namespace lockstep::kernels
