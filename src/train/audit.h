/// The audit slice: tokens whose codes the rollout kept in full, in every arm, so that what
/// guidance does is measured and not assumed.
#pragma once

#include <cstdint>
#include <span>

#include "numerics/quantizer.h"
#include "numerics/row.h"
#include "train/tally.h"

namespace lockstep::train {

struct AuditArgs {
  Quantizer rule;
  RowLayout layout;          // kCodes, or kCodes8
  std::int64_t cols = 0;     // of a row of x; a record covers layout.width / cols of them
  std::int8_t exponent = 0;  // n where the rule's global scale is static
  std::span<const std::uint8_t> records;  // [tokens, layout.bytes()]
  std::span<const std::uint8_t> present;  // [tokens]
  std::span<const Bf16> before;           // [tokens * layout.width] the trainer's values
  std::span<const Bf16> after;            // what it rounded them to; empty: it did not
};

/// Counts the elements whose code, rounded to nearest at the trainer's own scale, is not the
/// rollout's, and those whose value after rounding is not. Absent records count nowhere.
Tally::Audit audit(const AuditArgs& args);

}  // namespace lockstep::train
