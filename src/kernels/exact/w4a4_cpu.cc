/// The definition of the W4A4 product, tile by tile.
#include <array>

#include "kernels/exact/w4a4_tile.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace lockstep::kernels {
namespace {

constexpr std::int32_t kBlock = 16;

/// The block's weights in half units, output by output, from its 128 bytes.
void unpack(const std::uint8_t* codes, std::int8_t (&w)[kTileOut][kBlock]) {
  for (std::int32_t j = 0; j < kTileOut; ++j) {
    for (std::int32_t k = 0; k < kBlock; ++k) {
      const std::int32_t pair = codes[k / 8 * 64 + j * 4 + k % 4];
      const std::int32_t code = k % 8 < 4 ? pair & 15 : pair >> 4;
      const auto e2m1 = static_cast<E2m1>(static_cast<std::uint8_t>(code));
      w[j][k] = static_cast<std::int8_t>(half_units(e2m1));
    }
  }
}

void unpack_row(const PartialRow& row) {
  for (std::int64_t b = 0; b < row.blocks; ++b) {
    std::int32_t sum = 0;
    std::int8_t* a = row.a + b * row.stride * kBlock;
    for (std::int64_t i = 0; i < kBlock / 2; ++i) {
      const std::uint32_t pair = row.codes[b * (kBlock / 2) + i];
      const std::int32_t low = half_units(static_cast<E2m1>(static_cast<std::uint8_t>(pair & 15)));
      const std::int32_t high = half_units(static_cast<E2m1>(static_cast<std::uint8_t>(pair >> 4)));
      a[2 * i] = static_cast<std::int8_t>(low);
      a[2 * i + 1] = static_cast<std::int8_t>(high);
      sum += low + high;
    }
    row.info[b * row.stride] = {-12 * sum,
                                row.factor * e4m3_units(static_cast<E4m3>(row.scales[b]))};
  }
}

void multiply_tile(const Tile& tile, std::int32_t parts) {
  const std::uint8_t* scales = tile.weights + std::int64_t{tile.blocks} * 128;
  std::array<std::array<std::int64_t, kTileOut>, kMaxTileRows> acc{};
  std::int8_t w[kTileOut][kBlock];
  for (std::int32_t b = 0; b < tile.blocks; ++b) {
    unpack(tile.weights + std::int64_t{b} * 128, w);
    for (std::int32_t part = 0; part < tile.rows * parts; ++part) {
      const std::int64_t block = std::int64_t{b} * tile.rows * parts + part;
      const std::int8_t* a = tile.a + block * kBlock;
      for (std::int32_t j = 0; j < kTileOut; ++j) {
        std::int32_t dot = 0;
        for (std::int32_t k = 0; k < kBlock; ++k) dot += w[j][k] * a[k];
        const std::int64_t s_w = e4m3_units(static_cast<E4m3>(scales[b * kTileOut + j]));
        acc[static_cast<std::size_t>(part / parts)][static_cast<std::size_t>(j)] +=
            s_w * dot * tile.info[block].scale;
      }
    }
  }
  for (std::int32_t r = 0; r < tile.rows; ++r) {
    const PowerPair power = power_pair(tile.shift[r]);
    for (std::int32_t j = 0; j < tile.width; ++j) {
      const auto sum =
          static_cast<float>(acc[static_cast<std::size_t>(r)][static_cast<std::size_t>(j)]);
      tile.out[r][tile.column + j] = sum * power.first * power.second;
    }
  }
}

}  // namespace

TileBackend w4a4_portable() { return {unpack_row, multiply_tile}; }

}  // namespace lockstep::kernels
