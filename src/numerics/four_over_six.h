/// Four over six: the largest element of a block becomes 6 or 4, whichever loses less. Near the top
/// of the grid the step is 2; a block scaled to end at 4 gives that step up.
#pragma once

#include "numerics/e2m1.h"
#include "numerics/scale.h"

namespace lockstep {

/// s8 of a block whose largest element is to become 4; see block_scale.
constexpr E4m3 block_scale_of_four(float amax, std::int32_t n) {
  return to_e4m3(amax * power_of_two(-n) / 4.0f);
}

/// What an element loses under a scale: code * scale - x as a magnitude.
constexpr float lost(float a, float scale) {
  const float difference = e2m1_magnitude(e2m1_quotient(a, scale)) * scale - a;
  return difference < 0.0f ? -difference : difference;
}

/// Whether a block loses less under `four` than under `six`; a tie is no. `magnitude_at(i)` gives
/// |x| of element i.
///
/// The comparison is exact for BF16 elements: one that is 0 under both scales loses the same and
/// drops out, and what the others lose are whole multiples of one unit, below 2^14 of it. So the
/// order in which they are added does not matter either.
template <typename Magnitude>
constexpr bool four_loses_less(FourOverSix metric, std::int32_t block, float six, float four,
                               Magnitude&& magnitude_at) {
  double more = 0.0;
  for (std::int32_t i = 0; i < block; ++i) {
    const float a = magnitude_at(i);
    const auto at_six = static_cast<double>(lost(a, six));
    const auto at_four = static_cast<double>(lost(a, four));
    more += metric == FourOverSix::kMae ? at_four - at_six : at_four * at_four - at_six * at_six;
  }
  return more < 0.0;
}

/// Whether a block's codes and scale say that its largest element became 4: none of them is 6. The
/// map bit of a record; the residue of a scale means another scale for each answer. At scales below
/// 2^-6, whose steps are coarse, a block mapped to 6 may hold no 6: the bit then says what its
/// codes say.
constexpr bool is_mapped_to_four(const std::uint8_t* codes, std::int32_t block,
                                 std::uint8_t scale) {
  bool six = false;
  for (std::int32_t i = 0; i < block / 2; ++i) {
    six = six || (codes[i] & 0x07u) == 0x07u || (codes[i] & 0x70u) == 0x70u;
  }
  return scale != 0 && !six;
}

/// y of scale_of_residue for a block that was mapped to 4.
constexpr float scale_quotient_of_four(float amax, std::int32_t n) {
  return amax * power_of_two(-n) / 4.0f;
}

}  // namespace lockstep
