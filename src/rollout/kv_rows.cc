#include "rollout/kv_rows.h"

#include <cassert>
#include <cstring>

namespace lockstep::rollout {
namespace {

/// The low bit of each of 16 codes, element i in bit i.
std::uint16_t low_bits(const std::byte* codes) {
  std::uint64_t x = 0;
  for (int i = 0; i < 8; ++i) x |= std::to_integer<std::uint64_t>(codes[i]) << (8 * i);
  x &= 0x1111111111111111;
  x = (x | x >> 3) & 0x0303030303030303;
  x = (x | x >> 6) & 0x000F000F000F000F;
  x = (x | x >> 12) & 0x000000FF000000FF;
  return static_cast<std::uint16_t>(x | x >> 24);
}

void write_low_bits(const std::byte* codes, std::int32_t width, std::byte* out) {
  for (std::int32_t i = 0; i < width; i += 16) {
    const std::uint16_t bits = low_bits(codes + i / 2);
    out[i / 8] = static_cast<std::byte>(bits & 0xff);
    out[i / 8 + 1] = static_cast<std::byte>(bits >> 8);
  }
}

/// Four residues a byte, the first in the low bits; padding is 0.
void write_residues(const std::byte* scales, std::int32_t blocks, std::byte* out) {
  for (std::int32_t first = 0; first < blocks; first += 4) {
    unsigned packed = 0;
    for (std::int32_t j = first; j < first + 4 && j < blocks; ++j) {
      packed |= (std::to_integer<unsigned>(scales[j]) & 3u) << (2 * (j - first));
    }
    out[first / 4] = static_cast<std::byte>(packed);
  }
}

}  // namespace

void record_from_row(const std::byte* row, const RowLayout& layout, std::byte* out) {
  assert(layout.width % 16 == 0 && layout.exponents == 0 && "a row of the cache");
  const std::int32_t blocks = layout.width / layout.block;
  const std::byte* scales = row + layout.width / 2;
  switch (layout.encoding) {
    case Encoding::kScale: std::memcpy(out, scales, static_cast<std::size_t>(blocks)); break;
    case Encoding::kLsb:
      write_low_bits(row, layout.width, out);
      std::memcpy(out + layout.element_bytes(), scales, static_cast<std::size_t>(blocks));
      break;
    case Encoding::kLsbScaleMod4:
      write_low_bits(row, layout.width, out);
      write_residues(scales, blocks, out + layout.element_bytes());
      break;
    case Encoding::kCodes: std::memcpy(out, row, static_cast<std::size_t>(layout.bytes())); break;
    default: assert(false && "the cache's codes do not give this encoding");
  }
}

}  // namespace lockstep::rollout
