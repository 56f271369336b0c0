// The order of codes in a tile of the exact product's weights.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

/// Words t = 0 .. 3 of block `quad`, columns 4 t .. 4 t + 3 of both outputs, become word `quad` of
/// all four blocks. By all lanes; `quad` is the lane of four.
__device__ inline uint4 tile_words(const uint2 (&codes)[2], int quad) {
  std::uint32_t words[4] = {
      __byte_perm(codes[0].x, codes[1].x, 0x5410), __byte_perm(codes[0].x, codes[1].x, 0x7632),
      __byte_perm(codes[0].y, codes[1].y, 0x5410), __byte_perm(codes[0].y, codes[1].y, 0x7632)};
  const bool odd = (quad & 1) != 0, upper = (quad & 2) != 0;
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const std::uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? words[k] : words[k + 1], 1);
    words[k] = odd ? got : words[k];
    words[k + 1] = odd ? words[k + 1] : got;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const std::uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[k] : words[k + 2], 2);
    words[k] = upper ? got : words[k];
    words[k + 2] = upper ? words[k + 2] : got;
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace lockstep::kernels
