#pragma once

#include <cstdint>

#include "numerics/quantizer.h"
#include "numerics/row.h"

namespace lockstep::kernels {

/// One row's codes and scales, linear, and the n of its own global scale.
struct CodedRow {
  const std::uint8_t* codes = nullptr;   // [cols / 2], or [cols] of E4M3
  const std::uint8_t* scales = nullptr;  // [cols / block]; not read where the layout has no block
  std::int32_t cols = 0;
  std::int8_t exponent = 0;
  bool wide = false;  // codes are E4M3's, a byte each
};

/// Writes what `layout` keeps of a row into slot number `slot` of a record whose bytes were zero:
/// quantize() does it while the codes are hot, and what reads codes back from cache pages does it
/// at release. The layout is docs/formats/record.md's. Requires slot * cols + cols <= layout.width
/// and an encoding of codes or scales (not kBf16, kExperts*).
void write_record(const CodedRow& row, std::int32_t slot, const RowLayout& layout,
                  std::uint8_t* record);

/// Whether a record of elements quantized by `rule` holds what no rollout writes: a scale byte or
/// an exponent out of range, an E4M3 code that is no number.
bool is_damaged(const Quantizer& rule, const RowLayout& layout, const std::uint8_t* record);

}  // namespace lockstep::kernels
