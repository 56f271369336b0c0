#include "rollout/kv_rows.h"

#include <cassert>
#include <cstring>

#include "kernels/exact/record_row.h"

namespace lockstep::rollout {

void record_from_row(const std::byte* row, const RowLayout& layout, bool wide, std::byte* out) {
  assert(layout.width % 16 == 0 && layout.exponents == 0 && "a row of the cache");
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row);
  std::memset(out, 0, static_cast<std::size_t>(layout.bytes()));
  kernels::write_record({.codes = codes,
                         .scales = codes + (wide ? layout.width : layout.width / 2),
                         .cols = layout.width,
                         .wide = wide},
                        0, layout, reinterpret_cast<std::uint8_t*>(out));
}

}  // namespace lockstep::rollout
