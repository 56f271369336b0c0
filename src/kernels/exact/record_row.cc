#include "kernels/exact/record_row.h"

#include <algorithm>
#include <cstring>

#include "numerics/four_over_six.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

/// The lowest bits of sixteen codes, element i's at bit i.
std::uint16_t lsb_plane(const std::uint8_t* codes) {
  std::uint64_t word = 0;
  std::memcpy(&word, codes, sizeof(word));
  word &= 0x1111111111111111u;
  // Bits 4i are drawn together: pairs, then fours, then eights.
  word = (word | word >> 3) & 0x0303030303030303u;
  word = (word | word >> 6) & 0x000F000F000F000Fu;
  word = (word | word >> 12) & 0x000000FF000000FFu;
  return static_cast<std::uint16_t>(word | word >> 24);
}

void write_lsb(const CodedRow& row, std::uint8_t* out) {
  if (row.wide) {
    for (std::int32_t i = 0; i < row.cols; i += 8) {
      unsigned bits = 0;
      for (std::int32_t j = 0; j < 8; ++j) bits |= (row.codes[i + j] & 1u) << j;
      out[i / 8] = static_cast<std::uint8_t>(bits);
    }
    return;
  }
  for (std::int32_t i = 0; i < row.cols; i += 16) {
    const std::uint16_t plane = lsb_plane(row.codes + i / 2);
    out[i / 8] = static_cast<std::uint8_t>(plane);
    out[i / 8 + 1] = static_cast<std::uint8_t>(plane >> 8);
  }
}

/// Residues of slots need not begin at a byte: they are added to what is there.
void write_mod4(const CodedRow& row, std::int32_t first, std::int32_t blocks, std::uint8_t* out) {
  std::int32_t j = 0;
  for (; first % 4 == 0 && j + 4 <= blocks; j += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, row.scales + j, sizeof(word));
    word &= 0x03030303u;
    out[(first + j) / 4] = static_cast<std::uint8_t>(word | word >> 6 | word >> 12 | word >> 18);
  }
  for (; j < blocks; ++j) {
    const std::int32_t at = first + j;
    out[at / 4] = static_cast<std::uint8_t>(out[at / 4] | (row.scales[j] & 3u) << (2 * (at % 4)));
  }
}

/// Added to what is there, as residues are.
void write_maps(const CodedRow& row, std::int32_t first, std::int32_t block, std::uint8_t* out) {
  for (std::int32_t j = 0; j < row.cols / block; ++j) {
    if (!is_mapped_to_four(row.codes + j * block / 2, block, row.scales[j])) continue;
    const std::int32_t at = first + j;
    out[at / 8] = static_cast<std::uint8_t>(out[at / 8] | 1u << (at % 8));
  }
}

}  // namespace

void write_record(const CodedRow& row, std::int32_t slot, const RowLayout& layout,
                  std::uint8_t* record) {
  const std::int32_t blocks = layout.block > 0 ? row.cols / layout.block : 0;
  std::uint8_t* scales = record + layout.element_bytes();
  std::uint8_t* maps = scales + layout.scale_bytes();
  std::uint8_t* exponents = maps + layout.map_bytes();
  switch (layout.encoding) {
    case Encoding::kLsb:
    case Encoding::kLsbScaleMod4:
    case Encoding::kLsbScaleMod4Map: write_lsb(row, record + slot * row.cols / 8); break;
    case Encoding::kCodes:
      std::memcpy(record + slot * row.cols / 2, row.codes, static_cast<std::size_t>(row.cols / 2));
      break;
    case Encoding::kCodes8:
      std::memcpy(record + slot * row.cols, row.codes, static_cast<std::size_t>(row.cols));
      break;
    default: break;
  }
  if (layout.encoding == Encoding::kLsbScaleMod4 || layout.encoding == Encoding::kLsbScaleMod4Map) {
    write_mod4(row, slot * blocks, blocks, scales);
    if (layout.map_bytes() > 0) write_maps(row, slot * blocks, layout.block, maps);
  } else if (layout.scale_bytes() > 0) {
    std::memcpy(scales + slot * blocks, row.scales, static_cast<std::size_t>(blocks));
  }
  if (layout.exponent_bytes() > 0) exponents[slot] = static_cast<std::uint8_t>(row.exponent);
}

bool is_damaged(const Quantizer& rule, const RowLayout& layout, const std::uint8_t* record) {
  const std::uint8_t* scales = record + layout.element_bytes();
  const std::uint8_t* maps = scales + layout.scale_bytes();
  const std::uint8_t* exponents = maps + layout.map_bytes();
  const bool whole =
      layout.encoding != Encoding::kLsbScaleMod4 && layout.encoding != Encoding::kLsbScaleMod4Map;
  const std::uint8_t most = most_scale_byte(rule);
  if (whole && std::any_of(scales, maps, [most](std::uint8_t s) { return s > most; })) return true;
  if (layout.encoding == Encoding::kCodes8 &&
      std::any_of(record, scales, [](std::uint8_t code) { return (code & 0x7Fu) > kE4m3Max; })) {
    return true;
  }
  return std::any_of(exponents, exponents + layout.exponent_bytes(), [](std::uint8_t byte) {
    const auto n = static_cast<std::int8_t>(byte);
    return n < kMinExponent || n > kMaxExponent;
  });
}

}  // namespace lockstep::kernels
