#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "numerics/quantizer.h"

namespace lockstep::kernels {

/// K or V of one layer in the pages of a cache. A token's row holds all its KV heads: packed codes
/// [N * C / 2], then block scales [N * C / block], both in linear order; or E4M3 codes [N * C]
/// without scales; or BF16 [N * C]. It is the layout of a kCodes record without exponent, so
/// records are read from pages as they are.
struct PagedKv {
  std::byte* pool = nullptr;
  std::int64_t page_bytes = 0;   // from one page to the next
  std::int64_t offset = 0;       // of this layer's rows within a page
  std::int32_t page_tokens = 0;  // rows in a page
  std::int32_t row_bytes = 0;
  Quantizer rule;            // element kBf16: rows are BF16
  std::int8_t exponent = 0;  // of the cache's global scale, 2^n

  std::byte* row(std::span<const std::int32_t> pages, std::int32_t position) const {
    const auto page =
        static_cast<std::int64_t>(pages[static_cast<std::size_t>(position / page_tokens)]);
    return pool + page * page_bytes + offset +
           static_cast<std::int64_t>(position % page_tokens) * row_bytes;
  }
};

}  // namespace lockstep::kernels
