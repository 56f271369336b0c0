/// One block a multiprocessor and all of them together: a step's matrices lie in their shared
/// memory and registers, so that the masters are read once. While a step is quantized the next one
/// tells its largest magnitudes and the one after it is on its way.
///
/// Checksums are products of bits: 16 rows of 256 bits, the codes of a unit as lanes have them,
/// times what each bit is worth at its place in the row (gf2.h), on tensor cores.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/block_sum_cuda.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/crc_bits_cuda.h"
#include "kernels/exact/flips_cuda.h"
#include "kernels/exact/gf2.h"
#include "kernels/exact/place_weights_rows.h"
#include "kernels/exact/sixteen_cuda.h"
#include "kernels/exact/w4a4_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kPlaceThreads = 32 * (kPlacers + 1);  // the last warp trades with other blocks
constexpr int kUnitBytes = kUnitNumbers * 4;
constexpr std::int32_t kNotFinite = 1 << 16;

/// Twice: of even steps and of odd ones.
struct PlaceShared {
  float4 units[kPlacers][2][kUnitBytes / 16];
  float4 before[kPlacers][w4a4_device::kChunkBytes / 16];
  Pair sums[32 * kPlacers];  // here, for registers are dear
  std::uint32_t residues[2][kPlacers][32];
  std::uint32_t amax[2][kPlacers];
  std::int32_t mine[2][kPlacers];
  std::int32_t exponents[2][kMostOfStep];  // + kNotFinite
  std::uint64_t told[2], ready[2], summed[2];
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

__device__ inline std::uint32_t bf16_words(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// n / d of small numbers, given 1 / d: what the product is off by is less than a half of that.
__device__ inline std::int32_t quotient(std::int32_t n, float per) {
  return __float2int_rd((static_cast<float>(n) + 0.5f) * per);
}

/// The step's unit of this warp, its matrix above kUnitBits; -1: none.
__device__ inline std::int32_t find_unit(const PlaceArgs& p, std::int32_t number, int warp) {
  const PlaceStep step = p.steps[number];
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t at = quotient(step.units * block, p.per_blocks) + warp;
  if (at >= quotient(step.units * (block + 1), p.per_blocks)) return -1;
  std::int32_t m = step.first;
  while (m + 1 < step.first + step.count && p.matrices[m + 1].first <= at) ++m;
  return m << kUnitBits | (at - p.matrices[m].first);
}

/// Its numbers begin to arrive, 16 rows of 256 bytes, pieces of 16 exchanged so that reading them
/// meets no bank twice.
__device__ inline void fetch_numbers(const PlaceArgs& p, std::int32_t mine, float4* to) {
  if (mine >= 0) {
    const PlacedMatrix& m = p.matrices[mine >> kUnitBits];
    const std::int32_t unit = mine & ((1 << kUnitBits) - 1), tile = quotient(unit, m.per_chunks);
    const std::int64_t cols = std::int64_t{m.chunks} * 64;
    const int lane = static_cast<int>(threadIdx.x) & 31, row = lane / 16, piece = lane % 16;
    const float* from = m.master + (std::int64_t{tile} * 16 + row) * cols +
                        (unit - tile * m.chunks) * 64 + piece * 4;
    const std::uint32_t at =
        shared_address(to) + row * 256 + 16 * (piece ^ (piece >> 3) ^ (row << 1));
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + 512 * k),
                   "l"(from + 2 * k * cols)
                   : "memory");
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// And what lies where its codes will.
__device__ inline void fetch_before(const std::byte* from, float4* to) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int i = lane; i < w4a4_device::kChunkBytes / 16; i += 32) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)),
                 "l"(from + 16 * i)
                 : "memory");
  }
}

/// Sixteen numbers of the lane's block, of output g or of g + 8.
__device__ inline void read_sixteen(const float4* unit, int half, float (&x)[16]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane / 4, quad = lane % 4;
  const int swap = (quad >> 1) | (g & 1) << 1;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float4 four = unit[(g + 8 * half) * 16 + 4 * quad + (k ^ swap)];
    x[4 * k] = four.x;
    x[4 * k + 1] = four.y;
    x[4 * k + 2] = four.z;
    x[4 * k + 3] = four.w;
  }
}

/// Tells the largest magnitude of the warp's unit, and where there is one that is not finite.
__device__ inline void tell_amax(const PlaceArgs& p, PlaceShared& s, std::int32_t mine, int parity,
                                 const float4* unit) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t most = 0;
  if (mine >= 0) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float4 x = unit[32 * k + lane];
      most = abs_max_pair(most, abs_max_pair(bf16_words(x.x, x.y), bf16_words(x.z, x.w)));
    }
    most = __reduce_max_sync(0xFFFFFFFFu, max(most & 0x7FFFu, most >> 16 & 0x7FFFu));
    if (most >= 0x7F80u) {
      const PlacedMatrix& m = p.matrices[mine >> kUnitBits];
      const std::int32_t number = mine & ((1 << kUnitBits) - 1),
                         tile = quotient(number, m.per_chunks);
      for (int half = 1; half >= 0; --half) {
        float x[16];
        read_sixteen(unit, half, x);
        const std::int64_t row = tile * 16 + half * 8 + lane / 4;
        const std::int64_t first =
            row * m.chunks * 64 + (number - tile * m.chunks) * 64 + lane % 4 * 16;
#pragma unroll
        for (int k = 15; k >= 0; --k) {
          if (!is_finite(to_bf16(x[k]))) {
            atomicMin(m.bad, static_cast<unsigned long long>(first + k));
          }
        }
      }
    }
  }
  if (lane == 0) {
    s.amax[parity][warp] = most;
    s.mine[parity][warp] = mine;
    barrier_arrive(&s.told[parity]);
  }
}

struct MatrixScale {
  float per_unit, per_scale, unit;
  bool down, finite;
};

/// Codes of x, and their scale's byte; as weight_codes_kernel() has it.
__device__ inline uint2 quantize_sixteen(const float (&x)[16], const MatrixScale& by,
                                         std::uint32_t& byte, Pair& sums) {
  constexpr std::uint32_t kDown = 0x2B802B80u;  // 2^-40 twice
  Sixteen numbers;
#pragma unroll
  for (int k = 0; k < 8; ++k) numbers.words[k] = bf16_words(x[2 * k], x[2 * k + 1]);
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
  float error = 0, norm = 0;
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
  sums.error += error;
  sums.norm += norm;
  byte = by.finite ? byte : 0u;
  const uint2 packed = {pack_eight(codes[0], codes[1], codes[2], codes[3]),
                        pack_eight(codes[4], codes[5], codes[6], codes[7])};
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

/// Words 0 .. 3 of block `quad`, columns 4 t .. 4 t + 3 of both outputs, become word `quad` of all
/// four blocks.
__device__ inline uint4 tile_words(const uint2 (&codes)[2]) {
  const int quad = static_cast<int>(threadIdx.x) % 4;
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

/// The warp's own unit of each step.
__device__ void place_units(const PlaceArgs& p, PlaceShared& s) {
  using namespace w4a4_device;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  float4(&units)[2][kUnitBytes / 16] = s.units[warp];
  std::int32_t mine = find_unit(p, 0, warp), next = -1;
  fetch_numbers(p, mine, units[0]);
  if (p.num_steps > 1) next = find_unit(p, 1, warp);
  fetch_numbers(p, next, units[1]);
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
  tell_amax(p, s, mine, 0, units[0]);
  s.sums[threadIdx.x] = {};
  LaneFlips flips;
  for (std::int32_t step = 0; step < p.num_steps; ++step) {
    const int parity = step & 1;
    float x[2][16];
    read_sixteen(units[parity], 0, x[0]);
    read_sixteen(units[parity], 1, x[1]);
    __syncwarp();
    std::byte* to = nullptr;
    std::int32_t behind = 0;
    if (mine >= 0) {
      const PlacedMatrix& m = p.matrices[mine >> kUnitBits];
      const std::int32_t unit = mine & ((1 << kUnitBits) - 1);
      behind = (quotient(unit, m.per_chunks) + 1) * m.chunks - 1 - unit;
      to = m.expert + W4a4Weights::kHeaderBytes + std::int64_t{unit} * kChunkBytes;
      if (m.flips != flips.of) {
        flips.add();
        flips.of = m.flips;
      }
      if (flips.of != nullptr) fetch_before(to, s.before[warp]);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    const std::int32_t after = step + 2 < p.num_steps ? find_unit(p, step + 2, warp) : -1;
    fetch_numbers(p, after, units[parity]);
    if (step + 1 < p.num_steps) {
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      __syncwarp();
      tell_amax(p, s, next, parity ^ 1, units[parity ^ 1]);
    }
    barrier_wait(&s.ready[parity], step >> 1 & 1);
    if (mine >= 0) {
      std::int32_t n = s.exponents[parity][(mine >> kUnitBits) - p.steps[step].first];
      MatrixScale by{};
      by.finite = n < kNotFinite / 2;
      if (!by.finite) n -= kNotFinite;
      by.per_unit = power_of_two(-n);
      by.per_scale = by.per_unit * (1.0f / 6.0f);
      by.down = n > 100;
      by.unit = power_of_two(by.down ? n - 40 : n);
      Pair of_unit;
      std::uint32_t bytes[2];
      uint2 codes[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) codes[h] = quantize_sixteen(x[h], by, bytes[h], of_unit);
      const double square = static_cast<double>(power_of_two(n)) * power_of_two(n);
      Pair& sums = s.sums[threadIdx.x];
      sums.error += of_unit.error * square;
      sums.norm += of_unit.norm * square;
      s.residues[parity][warp][lane] = residue(p, behind, codes, bytes);
      const PlacedMatrix& m = p.matrices[mine >> kUnitBits];
      if (m.sample != nullptr) {
        leave_sample(m, mine & ((1 << kUnitBits) - 1), n, codes, bytes);
      }
      const uint4 words = tile_words(codes);
      const std::uint32_t scales = bytes[0] | bytes[1] << 8;
      if (flips.of != nullptr) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        const uint4 before = reinterpret_cast<const uint4*>(s.before[warp])[lane];
        const std::uint32_t scales_before =
            reinterpret_cast<const std::uint16_t*>(s.before[warp])[kChunkCodeBytes / 2 + lane];
        compare_word(words.x, before.x, flips.codes, flips.adjacent);
        compare_word(words.y, before.y, flips.codes, flips.adjacent);
        compare_word(words.z, before.z, flips.codes, flips.adjacent);
        compare_word(words.w, before.w, flips.codes, flips.adjacent);
        flips.scales += ((scales ^ scales_before) & 0xFFu) != 0;
        flips.scales += ((scales ^ scales_before) & 0xFF00u) != 0;
      }
      *(reinterpret_cast<uint4*>(to) + lane) = words;
      *(reinterpret_cast<std::uint16_t*>(to + kChunkCodeBytes) + lane) =
          static_cast<std::uint16_t>(scales);
      if ((mine & ((1 << kUnitBits) - 1)) == 0 && lane == 0) {
        *reinterpret_cast<std::int32_t*>(to - W4a4Weights::kHeaderBytes) = n;
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.summed[parity]);
    mine = next;
    next = after;
  }
  flips.add();
}

__device__ inline bool has_units(std::int32_t units, std::int32_t block, std::int32_t blocks) {
  return units * block / blocks < units * (block + 1) / blocks;
}
__device__ inline std::int32_t block_of(std::int32_t unit, std::int32_t units,
                                        std::int32_t blocks) {
  return ((unit + 1) * blocks - 1) / units;
}

/// This block's largest magnitudes of a step to the others, theirs to its warps, as exponents.
/// Returns lane w's unit as warp w has it.
__device__ std::int32_t trade(const PlaceArgs& p, PlaceShared& s, std::int32_t number) {
  const int lane = static_cast<int>(threadIdx.x) & 31, parity = number & 1;
  constexpr std::uint32_t kTold = 1u << 31;
  barrier_wait(&s.told[parity], number >> 1 & 1);
  const std::int32_t mine = lane < kPlacers ? s.mine[parity][lane] : -1;
  const std::uint32_t own = lane < kPlacers ? s.amax[parity][lane] : 0u;
  const PlaceStep step = p.steps[number];
  for (std::int32_t k = 0; k < step.count; ++k) {
    const bool of_it = mine >= 0 && mine >> kUnitBits == step.first + k;
    if (__ballot_sync(0xFFFFFFFFu, of_it) == 0) continue;
    const std::uint32_t most = __reduce_max_sync(0xFFFFFFFFu, of_it ? own : 0u);
    if (lane != 0) continue;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(
                     p.seen + std::int64_t{step.first + k} * p.blocks + blockIdx.x),
                 "r"(most | kTold)
                 : "memory");
  }
  for (std::int32_t k = 0; k < step.count; ++k) {
    if (__ballot_sync(0xFFFFFFFFu, mine >= 0 && mine >> kUnitBits == step.first + k) == 0) continue;
    const PlacedMatrix& m = p.matrices[step.first + k];
    const std::int32_t last = block_of(m.first + m.units - 1, step.units, p.blocks);
    std::uint32_t most = 0;
    for (std::int32_t b = block_of(m.first, step.units, p.blocks) + lane; b <= last; b += 32) {
      if (!has_units(step.units, b, p.blocks)) continue;
      std::uint32_t told = 0;
      while (told == 0) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                     : "=r"(told)
                     : "l"(p.seen + std::int64_t{step.first + k} * p.blocks + b)
                     : "memory");
      }
      most = max(most, told & ~kTold);
    }
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    const bool finite = most < 0x7F80u;
    const std::int32_t n = own_exponent(p.rule, finite ? float_of(most << 16) : 0.0f);
    if (lane == 0) s.exponents[parity][k] = finite ? n : n + kNotFinite;
  }
  if (lane == 0) barrier_arrive(&s.ready[parity]);
  return mine;
}

/// Adds what the step's units came to.
__device__ void add_residues(const PlaceArgs& p, PlaceShared& s, std::int32_t number,
                             std::int32_t mine) {
  const int lane = static_cast<int>(threadIdx.x) & 31, parity = number & 1;
  const std::int32_t first = p.steps[number].first;
  const int units = __popc(__ballot_sync(0xFFFFFFFFu, mine >= 0));
  const int row = lane / 4 + 8 * (lane & 1), part = lane >> 1 & 1;
  barrier_wait(&s.summed[parity], number >> 1 & 1);
  for (int w = 0; w < units;) {
    const std::int32_t of_warp = __shfl_sync(0xFFFFFFFFu, mine, w);
    const std::int32_t matrix = of_warp >> kUnitBits, unit = of_warp & ((1 << kUnitBits) - 1);
    const PlacedMatrix& m = p.matrices[matrix];
    const std::int32_t tile = quotient(unit, m.per_chunks);
    const int end = min(units, w + (tile + 1) * m.chunks - unit);
    std::uint32_t sum = 0;
    for (; w < end; ++w) sum ^= s.residues[parity][w][lane];
    sum = gf2::times(sum, p.matrices[matrix].powers[(tile * 16 + row) * 2 + part]);
    if (unit == 0 && lane == 0) {
      static constexpr std::uint32_t kWord = gf2::power(32);
      const std::int32_t n = s.exponents[parity][matrix - first];
      sum ^= gf2::times(float_bits(power_of_two(n < kNotFinite / 2 ? n : n - kNotFinite)), kWord);
    }
    sum = __reduce_xor_sync(0xFFFFFFFFu, sum);
    if (lane == 0) atomicXor(m.sum, sum);
  }
}

__global__ void __launch_bounds__(kPlaceThreads, 1)
    place_weights_kernel(const __grid_constant__ PlaceArgs p) {
  extern __shared__ float4 place_memory[];
  PlaceShared& s = *reinterpret_cast<PlaceShared*>(place_memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&s.told[i], kPlacers);
      barrier_init(&s.ready[i], 1);
      barrier_init(&s.summed[i], kPlacers);
    }
  }
  __syncthreads();
  Pair mine;
  if (threadIdx.x < 32 * kPlacers) {
    place_units(p, s);
    mine = s.sums[threadIdx.x];
  } else {
    std::int32_t now = trade(p, s, 0);
    for (std::int32_t step = 0; step < p.num_steps; ++step) {
      const std::int32_t next = step + 1 < p.num_steps ? trade(p, s, step + 1) : -1;
      add_residues(p, s, step, now);
      now = next;
    }
  }
  __syncwarp();
  const Pair sum = block_sum<kPlaceThreads>(mine);
  if (threadIdx.x != 0) return;
  p.parts[2 * blockIdx.x] = sum.error;
  p.parts[2 * blockIdx.x + 1] = sum.norm;
}

/// A thread a word of a lane: what each of its bits is worth, bit 8 t + g of it in word t. In the
/// last third a byte of scales, bits 8 t + k of one word.
__global__ void place_bits_kernel(std::uint32_t* bits, std::int32_t chunks) {
  const auto at = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= chunks * 96) return;
  const int lane = at % 32, quad = lane % 4, g = lane / 4;
  if (at < chunks * 64) {
    const int behind = at / 64, word = at / 32 % 2;
    std::uint32_t power = gf2::power(32u + 8u * (32 * behind + 28 - 8 * quad - 4 * word));
    std::uint32_t words[4] = {0, 0, 0, 0};
    for (int k = 31; k >= 0; --k, power = gf2::times_x(power)) {
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] |= (power >> (8 * t + g) & 1u) << k;
    }
    reinterpret_cast<uint4*>(bits)[at] = {words[0], words[1], words[2], words[3]};
    return;
  }
  const int behind = at / 32 - 2 * chunks;
  std::uint32_t power = gf2::power(8u + 8u * (4 * behind + 3 - quad) + 24u);
  std::uint32_t word = 0;
  for (int k = 7; k >= 0; --k, power = gf2::times_x(power)) {
#pragma unroll
    for (int t = 0; t < 4; ++t) word |= (power >> (8 * t + g) & 1u) << (8 * t + k);
  }
  bits[chunks * 256 + behind * 32 + lane] = word;
}

constexpr int kTableThreads = 64;
unsigned int table_blocks(std::int64_t threads) {
  return static_cast<unsigned int>((threads + kTableThreads - 1) / kTableThreads);
}

}  // namespace

std::int32_t place_blocks(Device device) { return cuda::multiprocessors(device.index); }

void place_weights_cuda(const PlaceArgs& args, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  cuda::require(
      cudaFuncSetAttribute(place_weights_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(PlaceShared))),
      "cudaFuncSetAttribute");
  PlaceArgs p = args;
  void* arguments[] = {&p};
  cuda::require(
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(place_weights_kernel),
                                  dim3(static_cast<unsigned int>(args.blocks)), dim3(kPlaceThreads),
                                  arguments, sizeof(PlaceShared), cuda::stream_of(stream)),
      "place_weights_kernel");
}

void place_bits_cuda(std::uint32_t* bits, std::int32_t chunks, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  place_bits_kernel<<<table_blocks(std::int64_t{chunks} * 96), kTableThreads, 0,
                      cuda::stream_of(stream)>>>(bits, chunks);
  cuda::require_launch("place_bits_kernel");
}

}  // namespace lockstep::kernels
