/// Records of K and V, from rows of the cache: the codes are already there, so decoding pays
/// nothing for them. The layouts are those of docs/formats/record.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/view.h"
#include "numerics/row.h"

namespace lockstep::rollout {

/// Writes the record of one token at `out`, layout.bytes() long. `row` is its row in the cache: a
/// kCodes record without exponent, of layout.width elements in blocks of layout.block.
/// Requires an encoding that codes give (kScale, kLsb, kLsbScaleMod4 with or
/// without maps, kCodes), layout.width % 16 ==
/// 0 and no exponents.
/// `wide`: a code is a byte, of E4M3; kCodes8 then.
void record_from_row(const std::byte* row, const RowLayout& layout, bool wide, std::byte* out);

/// Where a token's rows lie in the cache.
struct PageSlot {
  const std::byte* page = nullptr;
  std::int64_t slot = 0;  // its row among a page's
};

/// The records of some tokens at one place.
struct KvRows {
  std::int64_t offset = 0;     // of the place's rows within a page
  std::int64_t row_bytes = 0;  // from one slot to the next
  RowLayout layout{};
  bool wide = false;
  std::int64_t first = 0, count = 0;  // tokens, among the slots
  std::int64_t to = 0;                // where their records begin, a token's layout.bytes() each
};

/// record_from_row() of each token, into what lies at `out`. All of it lies where the pages do, or
/// in pinned memory; work on a CUDA device is not waited for. `most_bytes`: of the largest of them,
/// fewer than 2 GiB.
void records_from_pages(std::span<const PageSlot> slots, std::span<const KvRows> all,
                        std::int64_t most_bytes, std::byte* out, Device device, Stream stream);

/// Behind it; defined where there is a CUDA compiler.
void records_from_pages_cuda(std::span<const PageSlot> slots, std::span<const KvRows> all,
                             std::int64_t most_bytes, std::byte* out, Device device, Stream stream);

}  // namespace lockstep::rollout
