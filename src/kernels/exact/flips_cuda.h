/// Flips of codes against those before them, eight at a time, for .cu files.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

/// The places of a byte's code on the grid, plus 8; `codes` has one at each byte's lower half.
__device__ inline std::uint32_t places_of(std::uint32_t codes) {
  const std::uint32_t magnitudes = codes & 0x07070707u;
  const std::uint32_t negative = (codes >> 3 & 0x01010101u) * 0xFFu;
  return ((0x08080808u + magnitudes) & ~negative) | ((0x08080808u - magnitudes) & negative);
}

__device__ inline void compare_word(std::uint32_t now, std::uint32_t before, std::uint32_t& flips,
                                    std::uint32_t& adjacent) {
  if (now == before) return;
#pragma unroll
  for (int shift = 0; shift < 8; shift += 4) {
    const std::uint32_t apart = places_of(now >> shift & 0x0F0F0F0Fu) + 0x10101010u -
                                places_of(before >> shift & 0x0F0F0F0Fu);
    flips += 4 - __popc(__vcmpeq4(apart, 0x10101010u)) / 8;
    adjacent += __popc(__vcmpeq4(apart, 0x11111111u) | __vcmpeq4(apart, 0x0F0F0F0Fu)) / 8;
  }
}

}  // namespace lockstep::kernels
