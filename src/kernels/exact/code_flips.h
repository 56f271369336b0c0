/// How far codes that arrive are from those that they will replace.
#pragma once

#include <array>
#include <cstdint>

#include "device/view.h"
#include "kernels/exact/w4a4.h"

namespace lockstep::kernels {

/// What count_flips() adds to its counts, in this order.
enum FlipCount : int {
  kCodeFlips,      // E2M1 codes that name another place of the grid; -0 is 0
  kAdjacentFlips,  // ... one step away
  kScaleFlips,
  kValueFlips,  // BF16 numbers; -0 is 0
  kNumFlipCounts,
};

// `counts` [kNumFlipCounts] lies with the views, on one device, and is added to. Throws Error
// where shapes disagree.

/// Codes of E2M1 and scales against those of an expert.
void count_flips(const PackedView<const std::uint8_t>& now, const W4a4Weights& before,
                 std::int32_t expert, std::int64_t* counts, Stream stream = {});
/// And against such as lie in rows.
void count_flips(const PackedView<const std::uint8_t>& now,
                 const PackedView<const std::uint8_t>& before, std::int64_t* counts,
                 Stream stream = {});
void count_flips(TensorView<const Bf16, 2> now, TensorView<const Bf16, 2> before,
                 std::int64_t* counts, Stream stream = {});

/// A code's place on the signed grid.
constexpr int grid_place(std::uint32_t code) {
  const auto magnitude = static_cast<int>(code & 7u);
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

constexpr bool is_value_flip(std::uint32_t before, std::uint32_t now) {
  return before != now && ((before | now) & 0x7FFFu) != 0;
}

}  // namespace lockstep::kernels
