/// What stands behind audit(): one block, on every device. Inside kernels/exact/ only.
#pragma once

#include <array>

#include "kernels/exact/audit.h"
#include "numerics/guided.h"

namespace lockstep::kernels {

/// Rows of x in a record, and elements that share an n.
struct AuditShape {
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t slots;
  std::int64_t span;
};

using AuditCounts = std::array<std::int64_t, kNumAuditCounts>;

/// One block: the trainer's values against the rollout's codes.
struct AuditBlock {
  const Quantizer& rule;
  const Bf16* x;
  const Bf16* operand;
  const std::uint8_t* codes;
  float own_scale;
  float scale;
  std::int32_t size;
};

/// Whether x lies scale / 4 or more from the interval that rounds to the code. Its ends are
/// midpoints; 6 has no upper end.
constexpr bool is_beyond(float x, float scale, E2m1 code) {
  const std::uint32_t m = bits_of(code) & 7u;
  const float value = e2m1_magnitude(m);
  const float below = m == 0 ? 0.25f : 0.5f * (value - e2m1_magnitude(m - 1));
  const float above = m == 7 ? 0.0f : 0.5f * (e2m1_magnitude(m + 1) - value);
  const float towards = (bits_of(code) & 8u) != 0 ? -x : x;  // as if it were positive
  if (towards <= (value - below - 0.25f) * scale) return true;
  return m != 7 && towards >= (value + above + 0.25f) * scale;
}

/// Does x lie where the code is no end of its bracket any more?
constexpr bool is_beyond(float x, float scale, E4m3 code) {
  const std::uint32_t m = bits_of(code) & 0x7Fu;
  const auto value = [](std::uint32_t magnitude) {
    return to_float(static_cast<E4m3>(static_cast<std::uint8_t>(magnitude)));
  };
  const float towards = (bits_of(code) & 0x80u) != 0 ? -x : x;  // as if it were positive
  if (towards <= (m == 0 ? -value(1) : value(m - 1)) * scale) return true;
  return m != kE4m3Max && towards >= value(m + 1) * scale;
}

/// A code's place on the grid, what it is worth there, and whether x is out of its reach.
struct OnGrid {
  std::int32_t step;
  float value;
};

constexpr OnGrid on_grid(const Quantizer& rule, std::uint8_t code) {
  const std::uint32_t sign = rule.is_wide() ? 0x80u : 8u;
  const auto m = static_cast<std::int32_t>(code & (sign - 1));
  const bool negative = (code & sign) != 0;
  const float value =
      rule.is_wide() ? to_float(static_cast<E4m3>(code)) : to_float(static_cast<E2m1>(code));
  return {negative ? -m : m, value};
}

constexpr std::uint8_t nearest_code(const Quantizer& rule, float x, float scale) {
  if (!rule.is_wide()) return bits_of(to_e2m1_scaled(x, scale));
  return scale > 0.0f ? bits_of(to_e4m3_scaled(x, 1.0f / scale)) : std::uint8_t{0};
}

constexpr void count_audit(const AuditBlock& block, AuditCounts& counts) {
  ++counts[kAuditBlocks];
  counts[kAuditCodes] += block.size;
  counts[kAuditScaleFlips] += block.own_scale != block.scale;
  const bool wide = block.rule.is_wide();
  for (std::int32_t i = 0; i < block.size; ++i) {
    const float x = to_float(block.x[i]);
    const auto code =
        static_cast<std::uint8_t>(wide ? block.codes[i] : block.codes[i / 2] >> i % 2 * 4 & 15);
    const bool zero = !(block.scale > 0.0f);
    const OnGrid theirs = zero ? OnGrid{0, 0.0f} : on_grid(block.rule, code);
    const OnGrid own = on_grid(block.rule, nearest_code(block.rule, x, block.own_scale));
    const float rollout = zero ? 0.0f : theirs.value * block.scale;
    const std::int32_t distance =
        own.step > theirs.step ? own.step - theirs.step : theirs.step - own.step;
    counts[kAuditFlips] += own.value * block.own_scale != rollout;
    counts[kAuditCodeFlips] += distance != 0;
    counts[kAuditAdjacent] += distance == 1;
    counts[kAuditStillDiffer] += to_float(block.operand[i]) != rollout;
    counts[kAuditBeyond] += !zero && (wide ? is_beyond(x, block.scale, static_cast<E4m3>(code))
                                           : is_beyond(x, block.scale, static_cast<E2m1>(code)));
  }
}

/// audit() on a CUDA device, of arguments that it has checked; a shape each.
void audit_cuda(std::span<const AuditArgs> all, std::span<const AuditShape> shapes, Stream stream);

}  // namespace lockstep::kernels
