/// For .cu files alone: the pieces of the exact product that its kernels share.
///
/// Codes are multiplied by integer tensor cores, one block of 16 columns at a time, so that each
/// block's dot is an exact int32; times the weight's scale it still fits int32, times the
/// activation's scale it is added to an int64. Nothing is rounded before the end, so that splits of
/// K over threads, warps and blocks of threads are free to be whatever is fast.
#pragma once

#include <cstdint>

#include "kernels/exact/w4a4_tile.h"
#include "numerics/e4m3.h"
#include "numerics/exponent.h"

namespace lockstep::kernels::w4a4_device {

inline constexpr int kChunk = 64;  // columns whose weights a warp takes at once
inline constexpr int kBlocksInChunk = 4;
inline constexpr int kChunkCodeBytes = 512;  // of 16 outputs
inline constexpr int kChunkBytes = 576;      // with 64 scales

/// Where the selector's bit 3 is set, PRMT spreads the sign of the byte it chose, which is 0 in all
/// tables here: codes of the other sign give 0.
__device__ inline std::uint32_t look_up(std::uint32_t low, std::uint32_t high,
                                        std::uint32_t codes) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(codes));
  return bytes;
}

/// Half units + 64 of four codes, unsigned bytes: 64 + magnitude of those with a sign of 0, 64 -
/// magnitude of the others, whose bit 3 is not set in `flipped`.
inline constexpr std::uint32_t kRaisedLow = 0x43424140u;
inline constexpr std::uint32_t kLoweredLow = 0x3D3E3F40u;
__device__ inline std::uint32_t raised_codes(std::uint32_t raised, std::uint32_t lowered,
                                             std::uint32_t codes, std::uint32_t flipped) {
  return look_up(raised, 0x4C484644u, codes) + look_up(lowered, 0x34383A3Cu, flipped);
}

/// Half units of four codes, signed bytes.
__device__ inline std::uint32_t signed_codes(std::uint32_t codes) {
  const std::uint32_t raised = raised_codes(kRaisedLow, kLoweredLow, codes, codes ^ 0x8888u);
  return ((raised | 0x80808080u) - 0x40404040u) ^ 0x80808080u;
}

/// d = c + a b: 16 outputs by 8 columns over two blocks of 16 codes. first, second: of each block
/// bytes 4 t .. 4 t + 3 of outputs g and g + 8 (lane = 4 g + t), unsigned; b0, b1: the same bytes
/// of column g, signed; d: columns 2 t, 2 t + 1 of outputs g and g + 8.
__device__ inline void multiply_blocks(std::int32_t (&d)[4], const std::uint32_t (&first)[2],
                                       const std::uint32_t (&second)[2], std::uint32_t b0,
                                       std::uint32_t b1, const int4& c) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(first[0]), "r"(first[1]), "r"(second[0]), "r"(second[1]), "r"(b0), "r"(b1), "r"(c.x),
        "r"(c.y), "r"(c.z), "r"(c.w));
}

/// s8 * 2^9 of a byte whose bits stand from bit 20 on: as a float's exponent and mantissa they mean
/// s8 * 2^-120, subnormals included, so that the sum has it behind the bits of 1.5 * 2^21.
__device__ inline std::int32_t scale_units(std::uint32_t bits) {
  constexpr float kAbove = 0x1.8p21f;
  return __float_as_int(__fmaf_rn(__uint_as_float(bits & 0x07F00000u), 0x1p127f, kAbove)) -
         __float_as_int(kAbove);
}

/// threadIdx.x, read here: nothing that follows from it is known before.
__device__ inline int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// The n of a scale 2^n, a subnormal one too.
__device__ inline std::int32_t exponent_of_power(float power) {
  const std::uint32_t bits = float_bits(power);
  return bits < 0x800000u ? -118 - __clz(static_cast<int>(bits)) : exponent_of(power);
}

/// acc as the product's FP32.
__device__ inline float scaled_sum(std::int64_t acc, std::int32_t exponent) {
  const PowerPair power = power_pair(exponent);
  return __ll2float_rn(acc) * power.first * power.second;
}

__device__ inline std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// One arrival a phase, by expect_bytes().
__device__ inline void init_barrier(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
/// After the last init_barrier(), before copies are told of it.
__device__ inline void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Starts a copy of `bytes`, a multiple of 16, which ends the barrier's phase. One lane calls it.
__device__ inline void copy_async(void* shared, const void* global, std::uint32_t bytes,
                                  std::uint64_t* barrier) {
  const std::uint32_t at = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(at)
      : "memory");
}

__device__ inline void wait_for_copy(std::uint64_t* barrier, std::uint32_t parity) {
  const std::uint32_t at = shared_address(barrier);
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
  }
}

/// Adds over the four lanes of a quad; lane t keeps the sum of value[t].
__device__ inline std::int64_t sum_over_quad(const std::int64_t (&value)[4], int t) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const bool odd = (t & 1) != 0;
  const bool high = (t & 2) != 0;
  const std::int64_t first =
      (odd ? value[1] : value[0]) + __shfl_xor_sync(kAll, odd ? value[0] : value[1], 1);
  const std::int64_t second =
      (odd ? value[3] : value[2]) + __shfl_xor_sync(kAll, odd ? value[2] : value[3], 1);
  return (high ? second : first) + __shfl_xor_sync(kAll, high ? first : second, 2);
}

}  // namespace lockstep::kernels::w4a4_device
