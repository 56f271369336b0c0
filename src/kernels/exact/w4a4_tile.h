/// What the backends of w4a4() share: a tile is a few rows of activations times 16 outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/exact/isa.h"

namespace lockstep::kernels {

/// A block of activations beside its codes. `start` is -12 * the sum of the codes: backends that
/// multiply unsigned by signed bytes read weights as code + 12.
struct BlockInfo {
  std::int32_t start = 0;
  std::int32_t scale = 0;  // s8 * 2^9; with a residual 4 * that, and -s8 * 2^9 for the residual
};

inline constexpr std::int32_t kTileOut = 16;
inline constexpr std::int32_t kMaxTileRows = 8;

/// The operands of one tile. An activation row is unpacked to half units, one int8 an element; with
/// a residual, row r has two parts, 2r and 2r + 1, whose products go to one sum.
struct Tile {
  const std::uint8_t* weights = nullptr;  // one tile of W4a4Weights
  std::int32_t blocks = 0;
  std::int32_t rows = 0;                // at most kMaxTileRows
  const std::int8_t* a = nullptr;       // [rows * parts, blocks * 16]
  const BlockInfo* info = nullptr;      // [rows * parts, blocks]
  const std::int32_t* shift = nullptr;  // [rows] the exponent that the sum is scaled by
  float* const* out = nullptr;          // [rows]
  std::int32_t width = kTileOut;        // outputs to be written
};

/// Parts are 1, or 2 with a residual.
using TileKernel = void (*)(const Tile& tile, std::int32_t parts);

void w4a4_tile_portable(const Tile& tile, std::int32_t parts);  // the definition
TileKernel w4a4_tile(Isa isa);

/// 2^k as two factors that FP32 holds, k in [-254, 240]: x * first is exact for every integer x
/// unless it overflows as x * 2^k does, so that x * first * second rounds once.
struct PowerPair {
  float first = 1.0f;
  float second = 1.0f;
};
PowerPair power_pair(std::int32_t k);

}  // namespace lockstep::kernels
