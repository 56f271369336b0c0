/// What write_record() writes, seen from the record: any byte of it, by itself. So the threads of a
/// CUDA kernel share a record without sharing bytes. Inside kernels/ only.
#pragma once

#include <cstdint>

#include "numerics/four_over_six.h"
#include "numerics/row.h"

namespace lockstep::kernels {

/// The coded rows that a record covers: one slot after the other.
struct CodedSlots {
  const std::uint8_t* codes = nullptr;   // [slots, cols / 2], or [slots, cols] of E4M3
  const std::uint8_t* scales = nullptr;  // [slots, cols / block]
  std::int64_t codes_stride = 0;
  std::int64_t scales_stride = 0;
  std::int32_t cols = 0;
  bool wide = false;
};

/// Byte `at` of the bits of the codes' last bits, residues or map. Requires cols % 8 == 0.
constexpr std::uint8_t lsb_byte(const CodedSlots& rows, std::int32_t at) {
  const std::int32_t slot = at * 8 / rows.cols;
  const std::int32_t first = at * 8 - slot * rows.cols;
  const std::uint8_t* codes = rows.codes + slot * rows.codes_stride;
  std::uint32_t bits = 0;
  for (std::int32_t i = 0; i < 8; ++i) {
    const std::int32_t col = first + i;
    const std::uint32_t code =
        rows.wide ? codes[col] : static_cast<std::uint32_t>(codes[col / 2] >> (col % 2 * 4));
    bits |= (code & 1u) << i;
  }
  return static_cast<std::uint8_t>(bits);
}

constexpr std::uint8_t slot_scale(const CodedSlots& rows, std::int32_t blocks, std::int32_t j) {
  return rows.scales[j / blocks * rows.scales_stride + j % blocks];
}

/// Byte `at` of a record of codes or scales (not kBf16, kExperts*). `exponents` holds the n of each
/// slot's global scale.
constexpr std::uint8_t record_byte(const CodedSlots& rows, const RowLayout& layout,
                                   const std::int8_t* exponents, std::int32_t at) {
  const std::int32_t blocks = layout.block > 0 ? rows.cols / layout.block : 0;
  if (at < layout.element_bytes()) {
    if (layout.encoding == Encoding::kCodes || layout.encoding == Encoding::kCodes8) {
      const std::int32_t row = layout.encoding == Encoding::kCodes ? rows.cols / 2 : rows.cols;
      return rows.codes[at / row * rows.codes_stride + at % row];
    }
    return lsb_byte(rows, at);
  }
  at -= layout.element_bytes();
  if (at < layout.scale_bytes()) {
    if (layout.encoding != Encoding::kLsbScaleMod4 &&
        layout.encoding != Encoding::kLsbScaleMod4Map) {
      return slot_scale(rows, blocks, at);
    }
    std::uint32_t bits = 0;
    for (std::int32_t j = 4 * at; j < 4 * at + 4 && j < layout.blocks(); ++j) {
      bits |= (slot_scale(rows, blocks, j) & 3u) << (2 * (j & 3));
    }
    return static_cast<std::uint8_t>(bits);
  }
  at -= layout.scale_bytes();
  if (at < layout.map_bytes()) {
    std::uint32_t bits = 0;
    for (std::int32_t j = 8 * at; j < 8 * at + 8 && j < layout.blocks(); ++j) {
      const std::uint8_t* codes =
          rows.codes + j / blocks * rows.codes_stride + j % blocks * (layout.block / 2);
      const bool four = is_mapped_to_four(codes, layout.block, slot_scale(rows, blocks, j));
      bits |= static_cast<std::uint32_t>(four) << (j & 7);
    }
    return static_cast<std::uint8_t>(bits);
  }
  return static_cast<std::uint8_t>(exponents[at - layout.map_bytes()]);
}

}  // namespace lockstep::kernels
