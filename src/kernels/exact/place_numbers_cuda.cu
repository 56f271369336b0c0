/// A warp a unit. Lane 4 g + q has of rows g and g + 8 eight numbers of every 32; their words are
/// operands of products of bits as they are (crc_bits_cuda.h).
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/crc_bits_cuda.h"
#include "kernels/exact/gf2.h"
#include "kernels/exact/place_numbers_rows.h"
#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kNumberThreads = 256;
constexpr int kSegments = kNumberCols / 32;

/// The last item whose units begin at or before it.
__device__ inline std::int32_t item_of(const NumbersItem* items, std::int32_t count,
                                       std::int64_t unit) {
  std::int32_t first = 0, end = count;
  while (end - first > 1) {
    const std::int32_t middle = (first + end) / 2;
    (items[middle].units_before <= unit ? first : end) = middle;
  }
  return first;
}

__device__ inline void look_at(const NumbersItem& item, std::int64_t at, const float4 (&x)[2]) {
  const float values[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
  for (int k = 7; k >= 0; --k) {
    if (!is_finite(to_bf16(values[k]))) {
      atomicMin(item.bad, static_cast<unsigned long long>(at + k));
    }
  }
}

__global__ void __launch_bounds__(kNumberThreads, 2)
    place_numbers_kernel(const NumbersItem* items, std::int32_t count, std::int64_t units,
                         const NumbersTables* tables) {
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane / 4, quad = lane % 4;
  const std::int64_t step = std::int64_t{gridDim.x} * (kNumberThreads / 32);
  for (std::int64_t u = std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x; u < units;
       u += step) {
    const NumbersItem item = items[item_of(items, count, u)];
    const std::int64_t all = (item.numbers + kNumbersOfUnit - 1) / kNumbersOfUnit;
    const std::int64_t behind = all - 1 - (u - item.units_before);
    // The item's number that is the unit's first; below 0 there is nothing.
    const std::int64_t first = item.numbers - (behind + 1) * kNumbersOfUnit;
    std::int32_t counts[4][4] = {};
#pragma unroll 2
    for (int s = 0; s < kSegments; ++s) {
      float4 x[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::int64_t at = first + (g + 8 * h) * kNumberCols + 32 * s + 8 * quad;
        const auto* from = reinterpret_cast<const float4*>(item.from + at);
        x[h][0] = at >= 0 ? __ldcs(from) : float4{};
        x[h][1] = at >= 0 ? __ldcs(from + 1) : float4{};
      }
      uint4 words[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        words[h] = {to_bf16_pair(x[h][0].x, x[h][0].y), to_bf16_pair(x[h][0].z, x[h][0].w),
                    to_bf16_pair(x[h][1].x, x[h][1].y), to_bf16_pair(x[h][1].z, x[h][1].w)};
        const std::int64_t at = first + (g + 8 * h) * kNumberCols + 32 * s + 8 * quad;
        if (at < 0) continue;
        *reinterpret_cast<uint4*>(item.to + at) = words[h];
        if (!are_finite(words[h])) {
          look_at(item, at, x[h]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 first_bits =
            __ldg(reinterpret_cast<const uint4*>(tables->bits[half][s][0][lane]));
        const uint4 second_bits =
            __ldg(reinterpret_cast<const uint4*>(tables->bits[half][s][1][lane]));
        const std::uint32_t a[4] = {
            half == 0 ? words[0].x : words[0].z, half == 0 ? words[1].x : words[1].z,
            half == 0 ? words[0].y : words[0].w, half == 0 ? words[1].y : words[1].w};
        count_common(counts[0], a, first_bits.x, second_bits.x);
        count_common(counts[1], a, first_bits.y, second_bits.y);
        count_common(counts[2], a, first_bits.z, second_bits.z);
        count_common(counts[3], a, first_bits.w, second_bits.w);
      }
    }
    std::uint32_t of_rows[4] = {0, 0, 0, 0};
    parities(counts, of_rows[0], of_rows[1]);
    // Lanes of quads 0 and 1 have a row each.
    std::uint32_t sum = of_lane(of_rows);
    sum = gf2::times(sum, tables->of_rows[g + 8 * (quad & 1)]);
    sum = __reduce_xor_sync(0xFFFFFFFFu, sum);
    sum =
        gf2::times(gf2::times(sum, tables->of_units[behind % 256]), tables->of_many[behind / 256]);
    if (lane == 0) atomicXor(item.sum, sum);
  }
}

__global__ void numbers_tables_kernel(NumbersTables* tables) {
  const auto at = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  constexpr std::int32_t kBits = kSegments * 2 * 2 * 32;
  if (at < kBits) {
    // Word `word` of the lane's four, of segment s.
    const int lane = at % 32, word = at / 32 % 4, s = at / 128;
    const int quad = lane % 4, g = lane / 4;
    const int behind = 2 * kNumberCols - (64 * s + 16 * quad + 4 * word + 4);
    std::uint32_t power = gf2::power(32u + 8u * static_cast<std::uint32_t>(behind));
    std::uint32_t words[4] = {0, 0, 0, 0};
    for (int k = 31; k >= 0; --k, power = gf2::times_x(power)) {
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] |= (power >> (8 * t + g) & 1u) << k;
    }
    for (int t = 0; t < 4; ++t) tables->bits[word / 2][s][word % 2][lane][t] = words[t];
    return;
  }
  constexpr std::uint64_t kRowBits = 16ull * kNumberCols;
  std::int32_t i = at - kBits;
  if (i < kNumberRows) {
    tables->of_rows[i] = gf2::power(kRowBits * static_cast<std::uint64_t>(kNumberRows - 1 - i));
    return;
  }
  i -= kNumberRows;
  if (i < 256) {
    tables->of_units[i] = gf2::power(kRowBits * kNumberRows * static_cast<std::uint64_t>(i));
    return;
  }
  i -= 256;
  if (i < 4096) {
    tables->of_many[i] = gf2::power(kRowBits * kNumberRows * 256 * static_cast<std::uint64_t>(i));
  }
}

}  // namespace

void numbers_tables_cuda(NumbersTables* tables, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  constexpr int kAll = kSegments * 128 + kNumberRows + 256 + 4096;
  numbers_tables_kernel<<<table_blocks(kAll), kTableThreads, 0, cuda::stream_of(stream)>>>(tables);
  cuda::require_launch("numbers_tables_kernel");
}

void place_numbers_cuda(const NumbersItem* items, std::int32_t count, std::int64_t units,
                        const NumbersTables* tables, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  const std::int64_t most = 2 * cuda::multiprocessors(device.index);
  place_numbers_kernel<<<static_cast<unsigned int>(std::min(most, units)), kNumberThreads, 0,
                         cuda::stream_of(stream)>>>(items, count, units, tables);
  cuda::require_launch("place_numbers_kernel");
}

}  // namespace lockstep::kernels
