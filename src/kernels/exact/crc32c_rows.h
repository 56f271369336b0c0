/// What stands behind Crc32cList on a CUDA device. Inside kernels/exact/ only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/view.h"

namespace lockstep::kernels {

/// Bytes that a warp takes.
struct CrcUnit {
  const std::byte* data = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t power = 0;  // x once for every bit of the item that follows
  std::uint32_t item = 0;
  std::uint32_t unused = 0;
};

struct CrcExpert {
  const std::byte* data = nullptr;
  std::uint32_t item = 0;
  std::uint32_t unused = 0;
};

/// Experts of one shape.
struct CrcTiles {
  const CrcExpert* experts = nullptr;
  std::int64_t count = 0;
  const std::uint32_t* bits = nullptr;    // [tile_bit_words()] what bits are worth at their places
  const std::uint32_t* powers = nullptr;  // [out, 2] x once for every bit behind a row
  std::int64_t tile_bytes = 0;
  std::int32_t out = 0;
  std::int32_t chunks = 0;
};

constexpr std::int64_t tile_bit_words(std::int32_t cols) { return (cols + 63) / 64 * 288; }
void tile_tables_cuda(std::uint32_t* bits, std::uint32_t* powers, std::int32_t out,
                      std::int32_t cols, Device device, Stream stream);
/// [out, 2]: of a row's codes, and of its scales, where scales and then a global scale follow.
void row_powers_cuda(std::uint32_t* powers, std::int32_t out, std::int32_t cols, Device device,
                     Stream stream);

void crc_rows_cuda(const CrcUnit* units, std::int64_t count, std::uint32_t* sums, Device device,
                   Stream stream);
void crc_tiles_cuda(const CrcTiles& tiles, std::uint32_t* sums, Device device, Stream stream);

}  // namespace lockstep::kernels
