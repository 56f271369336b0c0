/// For .cu files alone: what the kernels of linear share.
#pragma once

#include <cstdint>

#include "device/cuda/check.h"
#include "device/view.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {

struct LinearParams {
  const Bf16* x;
  const Bf16* weight;
  float* y;  // or
  Bf16* y_bf16;
  const std::int32_t* offsets;  // [groups + 1], or null: one group of all rows
  const std::int32_t* to;       // or null
  std::int64_t x_stride;
  std::int64_t y_stride;
  std::int64_t group_stride;  // of weights
  std::int32_t rows;
  std::int32_t groups;
  std::int32_t out;
  std::int32_t in;
  bool split_k;
  bool settled;  // the weight may be read before the launch before this one has ended
};

/// Rows of one group that a block works on.
struct Rows {
  int first = 0;
  int count = 0;  // <= the tile's; 0: nothing to do
  int group = 0;
};

/// Which rows are tile `index` of tiles of `size`, group after group. All threads of a warp.
__device__ inline Rows find_rows(const LinearParams& p, int index, int size) {
  if (p.offsets == nullptr) {
    return {index * size, min(size, p.rows - index * size), 0};
  }
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int base = 0; base < p.groups; base += 32) {
    const int group = base + lane;
    const int first = group < p.groups ? p.offsets[group] : 0;
    const int end = group < p.groups ? p.offsets[group + 1] : 0;
    const int tiles = (end - first + size - 1) / size;
    int before = tiles;  // with this group
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, before, static_cast<unsigned>(step));
      if (lane >= step) before += other;
    }
    const unsigned past = __ballot_sync(0xFFFFFFFFu, before > index);
    if (past != 0) {
      const int found = __ffs(static_cast<int>(past)) - 1;
      const int tile = index - (__shfl_sync(0xFFFFFFFFu, before, found) -
                                __shfl_sync(0xFFFFFFFFu, tiles, found));
      const int row = __shfl_sync(0xFFFFFFFFu, first, found) + tile * size;
      return {row, min(size, __shfl_sync(0xFFFFFFFFu, end, found) - row), base + found};
    }
    index -= __shfl_sync(0xFFFFFFFFu, before, 31);
  }
  return {};
}

/// Where outputs of row `row` go, in numbers of y.
__device__ inline std::int64_t place_of(const LinearParams& p, int row, int out) {
  return (p.to == nullptr ? row : p.to[row]) * p.y_stride + out;
}

__device__ inline void put(const LinearParams& p, int row, int out, float value) {
  const std::int64_t at = place_of(p, row, out);
  if (p.y != nullptr) {
    p.y[at] = value;
  } else {
    p.y_bf16[at] = to_bf16(value);
  }
}

__device__ inline float rounded_to_bf16(float x) { return to_float(to_bf16(x)); }

/// No more tiles of `size` rows than these, whatever the groups are.
inline int most_tiles(const LinearParams& p, int size) { return p.rows / size + p.groups; }

/// On Hopper, by wgmma.
void linear_hopper(const LinearParams& p, std::int8_t device, Stream stream);
/// On any device, by the tensor cores' products of a warp.
void linear_of_warps(const LinearParams& p, Stream stream);

}  // namespace lockstep::kernels
