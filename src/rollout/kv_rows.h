/// Records of K and V, from rows of the cache: the codes are already there, so decoding pays
/// nothing for them. The layouts are those of docs/formats/record.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/row.h"

namespace lockstep::rollout {

/// Writes the record of one token at `out`, layout.bytes() long. `row` is its row in the cache: a
/// kCodes record without exponent, of layout.width elements in blocks of layout.block.
/// Requires an encoding that codes give (kScale, kLsb, kLsbScaleMod4 with or
/// without maps, kCodes), layout.width % 16 ==
/// 0 and no exponents.
/// `wide`: a code is a byte, of E4M3; kCodes8 then.
void record_from_row(const std::byte* row, const RowLayout& layout, bool wide, std::byte* out);

}  // namespace lockstep::rollout
