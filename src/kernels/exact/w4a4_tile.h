/// What the backends of w4a4() share: a tile is a few rows of activations times 16 outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/exact/isa.h"
#include "kernels/exact/w4a4.h"
#include "numerics/exponent.h"

namespace lockstep::kernels {

/// A block of activations beside its codes. `start` is -12 * the sum of the codes: backends that
/// multiply unsigned by signed bytes read weights as code + 12.
struct BlockInfo {
  std::int32_t start = 0;
  std::int32_t scale = 0;  // s8 * 2^9; with a residual 4 * that, and -s8 * 2^9 for the residual
};

inline constexpr std::int64_t kExponentAt = 0;  // of an expert's header, int32 in the host's order
inline constexpr std::int64_t kMantissaAt = 4;  // float, less 1: zero under a power of two

inline constexpr std::int32_t kTileOut = 16;
inline constexpr std::int32_t kMaxTileRows = 8;

/// The operands of one tile. Activations are unpacked to half units, one int8 an element, and lie
/// block by block: for each block the parts of the tile's rows follow each other. With a residual
/// row r has two parts, 2r and 2r + 1, whose products go to one sum.
struct Tile {
  const std::uint8_t* weights = nullptr;  // one tile of W4a4Weights
  std::int32_t blocks = 0;
  std::int32_t rows = 0;                // at most kMaxTileRows
  const std::int8_t* a = nullptr;       // [blocks, rows * parts, 16]
  const BlockInfo* info = nullptr;      // [blocks, rows * parts]
  const std::int32_t* shift = nullptr;  // [rows] the exponent that the sum is scaled by
  float* const* out = nullptr;          // [rows] each row's output 0
  std::int32_t column = 0;              // the tile's first output
  std::int32_t width = kTileOut;        // outputs to be written
};

/// One row of codes on its way into a tile.
struct PartialRow {
  const std::uint8_t* codes = nullptr;   // [blocks * 8]
  const std::uint8_t* scales = nullptr;  // [blocks]
  std::int64_t blocks = 0;
  std::int32_t factor = 1;  // of the scales: 1, or 4, 8 or 16 and -1 with a residual
  std::int8_t* a = nullptr;
  BlockInfo* info = nullptr;
  std::int64_t stride = 1;  // parts from one block to the next
};

struct TileBackend {
  void (*unpack)(const PartialRow& row);
  void (*multiply)(const Tile& tile, std::int32_t parts);  // 1, or 2 with a residual
};

TileBackend w4a4_portable();  // the definition
TileBackend w4a4_backend(Isa isa);

/// 2^k as two factors that FP32 holds, k in [-260, 240]: x * first is exact for every integer x
/// unless it overflows as x * 2^k does, so that x * first * second rounds once.
struct PowerPair {
  float first = 1.0f;
  float second = 1.0f;
};
constexpr PowerPair power_pair(std::int32_t k) {
  const std::int32_t first = k < -126 ? -126 : k > 127 ? 127 : k;
  const std::int32_t second = k - first;
  if (second >= -126) return {power_of_two(first), power_of_two(second)};
  return {power_of_two(first), float_of(0x00800000u >> (-126 - second))};
}

/// The backend for a CUDA device: the arguments have been checked, `items` is not 0. The first
/// takes global scales for the powers of two that they are.
void w4a4_cuda(const W4a4Args& args, std::int64_t items, Stream stream);
void w4a4_scaled_cuda(const W4a4Args& args, std::int64_t items, Stream stream);
void w4a4_fill_cuda(const W4a4Weights& weights, std::int32_t expert, std::int32_t first_row,
                    const PackedView<const std::uint8_t>& rows, const Quantizer& rule,
                    Stream stream);

}  // namespace lockstep::kernels
