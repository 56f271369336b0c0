/// What a warp of place_weights_kernel() does with its unit, 16 outputs of 64 columns. Lane 4 g + q
/// has block q of outputs g and g + 8. For place_weights_cuda.cu alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/exact/block_sum_cuda.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/crc_bits_cuda.h"
#include "kernels/exact/flips_cuda.h"
#include "kernels/exact/place_weights_rows.h"
#include "kernels/exact/sixteen_cuda.h"
#include "kernels/exact/tile_words_cuda.h"
#include "kernels/exact/w4a4_cuda.h"
#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels::place_device {

inline constexpr int kUnitBytes = kUnitNumbers * 4;
inline constexpr int kOrders = 8;  // steps, more than any two warps are apart
inline constexpr std::int32_t kNotFinite = 1 << 16;

/// What a warp does in a step.
struct Order {
  const float* from = nullptr;  // its first number
  std::byte* to = nullptr;      // where its codes lie
  unsigned long long* flips = nullptr;
  std::int32_t matrix = -1;  // -1: nothing
  std::int32_t unit = 0;     // of the matrix
  std::int32_t slot = 0;     // of the matrix in the step
  std::int32_t cols = 0;
  std::int32_t behind = 0;  // chunks that follow in the row
  std::int32_t sampled = 0;
};

/// What goes by two is of even steps and of odd ones.
struct PlaceShared {
  float4 units[kPlacers][2][kUnitBytes / 16];
  float4 before[kPlacers][w4a4_device::kChunkBytes / 16];
  Order orders[kOrders][kPlacers];
  Pair sums[kPlacers];
  std::uint32_t residues[2][kPlacers][32];
  std::uint32_t amax[2][kPlacers];
  std::int32_t exponents[4][kMostOfStep];  // of four steps in turn, + kNotFinite
  // All warps have told their magnitudes; they may quantize; they have left their residues.
  std::uint64_t told[2], ready[2], summed[2];
  std::uint64_t arrived[kPlacers][2];  // a warp's numbers
};

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline void barrier_init(std::uint64_t* barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

__device__ inline void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   shared_address(barrier))
               : "memory");
}

__device__ inline void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// n / d of small numbers, given 1 / d: what the product is off by is less than a half of that.
__device__ inline std::int32_t quotient(std::int32_t n, float per) {
  return __float2int_rd((static_cast<float>(n) + 0.5f) * per);
}

/// Its numbers begin to arrive, 16 rows of 256 bytes; without any the barrier is passed at once.
__device__ inline void fetch_numbers(const Order& order, float4* to, std::uint64_t* arrived) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (order.matrix < 0) {
    if (lane == 0) barrier_arrive(arrived);
    return;
  }
  const std::uint32_t barrier = shared_address(arrived);
  if (lane == 0) {
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(
            barrier),
        "r"(kUnitBytes)
        : "memory");
  }
  __syncwarp();
  if (lane >= 16) return;
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to) + lane * 256),
      "l"(order.from + std::int64_t{lane} * order.cols), "r"(256), "r"(barrier)
      : "memory");
}

/// And what lies where its codes will; wait_for_before() waits for it.
__device__ inline void fetch_before(const std::byte* from, float4* to) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int i = lane; i < w4a4_device::kChunkBytes / 16; i += 32) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)),
                 "l"(from + 16 * i)
                 : "memory");
  }
}

__device__ inline void wait_for_before() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

/// The order in which a lane reads its four pieces of 16 bytes, so that no bank is met twice: piece
/// k comes as number k ^ this.
__device__ inline int piece_order() {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return (lane >> 1 & 1) | (lane >> 2 & 1) << 1;
}

/// Sixteen numbers of the lane's block, of output g or of g + 8, in its order of pieces.
__device__ inline void read_sixteen(const float4* unit, int half, float (&x)[16]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, order = piece_order();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float4 four = unit[(lane / 4 + 8 * half) * 16 + 4 * (lane % 4) + (k ^ order)];
    x[4 * k] = four.x;
    x[4 * k + 1] = four.y;
    x[4 * k + 2] = four.z;
    x[4 * k + 3] = four.w;
  }
}

/// Codes of pieces in the lane's order to their places.
__device__ inline uint2 in_order(std::uint32_t first, std::uint32_t second) {
  const int order = piece_order();
  const std::uint32_t select = (order & 1) != 0 ? 0x1032u : 0x3210u;
  const std::uint32_t a = __byte_perm(first, 0, select), b = __byte_perm(second, 0, select);
  return (order & 2) != 0 ? uint2{b, a} : uint2{a, b};
}

struct MatrixScale {
  float per_unit, per_scale, unit;
  bool down, finite;
};

/// Codes of x, which read_sixteen() gave, and their scale's byte; as weight_codes_kernel() has it.
__device__ inline uint2 quantize_sixteen(const float (&x)[16], const MatrixScale& by,
                                         std::uint32_t& byte, float& error, float& norm) {
  constexpr std::uint32_t kDown = 0x2B802B80u;  // 2^-40 twice
  Sixteen numbers;
#pragma unroll
  for (int k = 0; k < 8; ++k) numbers.words[k] = to_bf16_pair(x[2 * k], x[2 * k + 1]);
  byte = e4m3_byte(float_of(abs_max_bits(numbers) << 16) * by.per_scale);
  const float worth = e4m3_value(byte);  // of a code of 1, in units of 2^n
  const SixteenScale scale = nvfp4_sixteen(worth * by.unit);
  if (by.down) {
#pragma unroll
    for (int k = 0; k < 8; ++k) numbers.words[k] = multiply_pair(numbers.words[k], kDown);
  }
  // As FP16 the codes are their values times 2^-14.
  const float worth14 = worth * 0x1p14f;
  std::uint32_t codes[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    codes[k] = code_pair(numbers.words[k], scale);
    float low, high;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n}"
        : "=f"(low), "=f"(high)
        : "r"(codes[k] & 0x8E008E00u));
    const float x0 = x[2 * k] * by.per_unit, x1 = x[2 * k + 1] * by.per_unit;
    const float d0 = __fmaf_rn(low, worth14, -x0), d1 = __fmaf_rn(high, worth14, -x1);
    error = __fmaf_rn(d0, d0, __fmaf_rn(d1, d1, error));
    norm = __fmaf_rn(x0, x0, __fmaf_rn(x1, x1, norm));
  }
  byte = by.finite ? byte : 0u;
  const uint2 packed = in_order(pack_eight(codes[0], codes[1], codes[2], codes[3]),
                                pack_eight(codes[4], codes[5], codes[6], codes[7]));
  return by.finite ? packed : uint2{0, 0};
}

/// What this unit adds to its rows' checksums: lane 4 g + q gets of the codes of outputs g (0) and
/// g + 8 (1), of their scales (2, 3).
__device__ inline std::uint32_t residue(const PlaceArgs& p, std::int32_t behind,
                                        const uint2 (&codes)[2], const std::uint32_t (&bytes)[2]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto* table = reinterpret_cast<const uint4*>(p.code_bits) + behind * 64 + lane;
  const uint4 first = __ldg(table), second = __ldg(table + 32);
  const std::uint32_t scale_bits = __ldg(p.scale_bits + behind * 32 + lane);
  const std::uint32_t a[4] = {codes[0].x, codes[1].x, codes[0].y, codes[1].y};
  const std::uint32_t b0[4] = {first.x, first.y, first.z, first.w};
  const std::uint32_t b1[4] = {second.x, second.y, second.z, second.w};
  std::int32_t of_codes[4][4] = {}, of_scales[4][4] = {};
#pragma unroll
  for (int t = 0; t < 4; ++t) count_common(of_codes[t], a, b0[t], b1[t]);
  std::uint32_t words[4];
  parities(of_codes, words[0], words[1]);
#pragma unroll
  for (int t = 0; t < 4; ++t) count_common(of_scales[t], bytes[0], bytes[1], scale_bits >> 8 * t);
  parities(of_scales, words[2], words[3]);
  return of_lane(words);
}

/// A lane's counts, of one layer until they are added to its own.
struct LaneFlips {
  unsigned long long* of = nullptr;
  std::uint32_t codes = 0, adjacent = 0, scales = 0;

  __device__ void add() {
    if (of == nullptr) return;
    const std::uint32_t sums[3] = {__reduce_add_sync(0xFFFFFFFFu, codes),
                                   __reduce_add_sync(0xFFFFFFFFu, adjacent),
                                   __reduce_add_sync(0xFFFFFFFFu, scales)};
    if ((threadIdx.x & 31) == 0) {
      atomicAdd(of + kCodeFlips, static_cast<unsigned long long>(sums[0]));
      atomicAdd(of + kAdjacentFlips, static_cast<unsigned long long>(sums[1]));
      atomicAdd(of + kScaleFlips, static_cast<unsigned long long>(sums[2]));
    }
    codes = adjacent = scales = 0;
  }
};

/// What a sample has of this unit's rows.
__device__ inline void leave_sample(const PlacedMatrix& m, std::int32_t unit, std::int32_t n,
                                    const uint2 (&codes)[2], const std::uint32_t (&bytes)[2]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane / 4, quad = lane % 4;
  const std::int32_t tile = quotient(unit, m.per_chunks), chunk = unit - tile * m.chunks;
  std::byte* const rows = m.sample + 16;
  std::byte* const scales = rows + std::int64_t{m.sample_rows} * m.chunks * 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int32_t row = tile * 16 + 8 * h + g;
    if (row % m.sample_step != 0) continue;
    const std::int64_t block = std::int64_t{row / m.sample_step * m.chunks + chunk} * 4 + quad;
    *reinterpret_cast<uint2*>(rows + 8 * block) = codes[h];
    *reinterpret_cast<std::uint8_t*>(scales + block) = static_cast<std::uint8_t>(bytes[h]);
  }
  if (unit == 0 && lane == 0) *reinterpret_cast<float*>(m.sample) = power_of_two(n);
}

}  // namespace lockstep::kernels::place_device
