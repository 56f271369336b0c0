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

/// Powers of x for one shape of experts: [2, 16] of what follows a lane's last word, two words or
/// one from the end of a row of codes where so many rows follow it in its tile; [2, 16] the same of
/// scales, without the words where a row's end in part of one; then for each tile two: what
/// follows its codes, and its scales.
struct CrcTiles {
  const CrcExpert* experts = nullptr;
  std::int64_t count = 0;
  const std::uint32_t* powers = nullptr;
  std::int64_t tile_bytes = 0;
  std::int32_t out = 0;
  std::int32_t blocks = 0;
};

void crc_rows_cuda(const CrcUnit* units, std::int64_t count, std::uint32_t* sums, Device device,
                   Stream stream);
void crc_tiles_cuda(const CrcTiles& tiles, std::uint32_t* sums, Device device, Stream stream);

}  // namespace lockstep::kernels
