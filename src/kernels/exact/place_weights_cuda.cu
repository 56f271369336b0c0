/// One block a multiprocessor and all of them together: a step's matrices lie in their shared
/// memory and registers, so that the masters are read once. While a step is quantized the next one
/// tells its largest magnitudes and the one after it is on its way.
#include <algorithm>

#include "device/cuda/arrivals.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/exact/gf2.h"
#include "kernels/exact/place_unit_cuda.h"

namespace lockstep::kernels {
namespace {

using namespace place_device;

// Behind the placers a warp that trades magnitudes with other blocks, and one that gives orders and
// adds checksums.
constexpr int kPlaceThreads = 32 * (kPlacers + 2);

__device__ inline std::uint32_t parity_of(std::int32_t step) { return step >> 1 & 1; }

/// Tells the largest magnitude of the warp's unit, and where there is one that is not finite.
__device__ inline void tell_amax(const PlaceArgs& p, PlaceShared& s, std::int32_t step,
                                 const float4* unit) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const Order& order = s.orders[step % kOrders][warp];
  std::uint32_t most = 0;
  if (order.matrix >= 0) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float4 x = unit[32 * k + lane];
      most = abs_max_pair(most, abs_max_pair(to_bf16_pair(x.x, x.y), to_bf16_pair(x.z, x.w)));
    }
    most = __reduce_max_sync(0xFFFFFFFFu, max(most & 0x7FFFu, most >> 16 & 0x7FFFu));
    if (most >= 0x7F80u) {
      const PlacedMatrix& m = p.matrices[order.matrix];
      const std::int64_t first = order.from - m.master;
#pragma unroll 1
      for (int i = 31; i >= 0; --i) {
        const int row = 8 * (i / 16) + lane / 4, col = lane % 4 * 16 + i % 16;
        const float value = order.from[std::int64_t{row} * order.cols + col];
        if (is_finite(to_bf16(value))) continue;
        atomicMin(m.bad,
                  static_cast<unsigned long long>(first + std::int64_t{row} * order.cols + col));
      }
    }
  }
  if (lane == 0) s.amax[step & 1][warp] = most;
  if (cuda::arrives(lane)) barrier_arrive(&s.told[step & 1]);
}

/// Codes of x to where they go, and all that is to be known of them.
__device__ inline void place_unit(const PlaceArgs& p, PlaceShared& s, std::int32_t step,
                                  const Order& order, const float (&x)[2][16], LaneFlips& flips) {
  using namespace w4a4_device;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  std::int32_t n = s.exponents[step & 3][order.slot];
  MatrixScale by{};
  by.finite = n < kNotFinite / 2;
  if (!by.finite) n -= kNotFinite;
  by.per_unit = power_of_two(-n);
  by.per_scale = by.per_unit * (1.0f / 6.0f);
  by.down = n > 100;
  by.unit = power_of_two(by.down ? n - 40 : n);
  float error = 0, norm = 0;
  std::uint32_t bytes[2];
  uint2 codes[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) codes[h] = quantize_sixteen(x[h], by, bytes[h], error, norm);
  s.residues[step & 1][warp][lane] = residue(p, order.behind, codes, bytes);
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    error += __shfl_xor_sync(0xFFFFFFFFu, error, half);
    norm += __shfl_xor_sync(0xFFFFFFFFu, norm, half);
  }
  if (order.sampled != 0) leave_sample(p.matrices[order.matrix], order.unit, n, codes, bytes);
  const uint4 words = tile_words(codes, static_cast<int>(threadIdx.x) % 4);
  const std::uint32_t scales = bytes[0] | bytes[1] << 8;
  if (flips.of != nullptr) {
    wait_for_before();
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
  *(reinterpret_cast<uint4*>(order.to) + lane) = words;
  *(reinterpret_cast<std::uint16_t*>(order.to + kChunkCodeBytes) + lane) =
      static_cast<std::uint16_t>(scales);
  if (lane != 0) return;
  const double square = static_cast<double>(power_of_two(n)) * power_of_two(n);
  s.sums[warp].error += error * square;
  s.sums[warp].norm += norm * square;
  if (order.unit == 0) {
    *reinterpret_cast<std::int32_t*>(order.to - W4a4Weights::kHeaderBytes) = n;
  }
}

/// The warp's own unit of each step.
__device__ void place_units(const PlaceArgs& p, PlaceShared& s) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  float4(&units)[2][kUnitBytes / 16] = s.units[warp];
  for (int step = 0; step < 2; ++step) {
    fetch_numbers(s.orders[step][warp], units[step], &s.arrived[warp][step]);
  }
  if (lane == 0) s.sums[warp] = {};
  barrier_wait(&s.arrived[warp][0], 0);
  tell_amax(p, s, 0, units[0]);
  LaneFlips flips;
  for (std::int32_t step = 0; step < p.num_steps; ++step) {
    float x[2][16];
    read_sixteen(units[step & 1], 0, x[0]);
    read_sixteen(units[step & 1], 1, x[1]);
    __syncwarp();
    const Order& order = s.orders[step % kOrders][warp];
    if (order.matrix >= 0) {
      if (order.flips != flips.of) {
        flips.add();
        flips.of = order.flips;
      }
      if (flips.of != nullptr) fetch_before(order.to, s.before[warp]);
    }
    fetch_numbers(s.orders[(step + 2) % kOrders][warp], units[step & 1],
                  &s.arrived[warp][step & 1]);
    if (step + 1 < p.num_steps) {
      barrier_wait(&s.arrived[warp][~step & 1], parity_of(step + 1));
      tell_amax(p, s, step + 1, units[~step & 1]);
    }
    barrier_wait(&s.ready[step & 1], parity_of(step));
    if (order.matrix >= 0) place_unit(p, s, step, order, x, flips);
    __syncwarp();
    if (cuda::arrives(lane)) barrier_arrive(&s.summed[step & 1]);
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
__device__ void trade(const PlaceArgs& p, PlaceShared& s, std::int32_t number) {
  constexpr std::uint32_t kTold = 1u << 31;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const PlaceStep step = p.steps[number];
  barrier_wait(&s.told[number & 1], parity_of(number));
  const bool has_unit = lane < kPlacers && s.orders[number % kOrders][lane].matrix >= 0;
  const std::int32_t slot = has_unit ? s.orders[number % kOrders][lane].slot : -1;
  const std::uint32_t own = has_unit ? s.amax[number & 1][lane] : 0u;
#pragma unroll 1
  for (std::int32_t k = 0; k < step.count; ++k) {
    if (__ballot_sync(0xFFFFFFFFu, slot == k) == 0) continue;
    const std::uint32_t most = __reduce_max_sync(0xFFFFFFFFu, slot == k ? own : 0u);
    if (lane != 0) continue;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(
                     p.seen + std::int64_t{step.first + k} * p.blocks + blockIdx.x),
                 "r"(most | kTold)
                 : "memory");
  }
#pragma unroll 1
  for (std::int32_t k = 0; k < step.count; ++k) {
    if (__ballot_sync(0xFFFFFFFFu, slot == k) == 0) continue;
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
    if (lane == 0) s.exponents[number & 3][k] = finite ? n : n + kNotFinite;
  }
  __syncwarp();
  if (cuda::arrives(lane)) barrier_arrive(&s.ready[number & 1]);
}

/// Lane w writes warp w's order of a step.
__device__ void give_orders(const PlaceArgs& p, PlaceShared& s, std::int32_t number) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (lane >= kPlacers) return;
  Order order;
  if (number < p.num_steps) {
    const PlaceStep step = p.steps[number];
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t at = quotient(step.units * block, p.per_blocks) + lane;
    if (at < quotient(step.units * (block + 1), p.per_blocks)) {
      std::int32_t slot = 0;
      while (slot + 1 < step.count && p.matrices[step.first + slot + 1].first <= at) ++slot;
      const PlacedMatrix& m = p.matrices[step.first + slot];
      order.unit = at - m.first;
      const std::int32_t tile = quotient(order.unit, m.per_chunks);
      const std::int32_t chunk = order.unit - tile * m.chunks;
      order.slot = slot;
      order.matrix = step.first + slot;
      order.cols = m.chunks * 64;
      order.behind = m.chunks - 1 - chunk;
      order.from = m.master + std::int64_t{tile} * 16 * order.cols + chunk * 64;
      order.to = m.expert + W4a4Weights::kHeaderBytes +
                 std::int64_t{order.unit} * w4a4_device::kChunkBytes;
      order.flips = m.flips;
      order.sampled = m.sample != nullptr;
    }
  }
  s.orders[number % kOrders][lane] = order;
}

/// Adds what the step's units came to, a tile's at a time.
__device__ void add_residues(const PlaceArgs& p, PlaceShared& s, std::int32_t number) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const Order(&orders)[kPlacers] = s.orders[number % kOrders];
  const int row = lane / 4 + 8 * (lane & 1), part = lane >> 1 & 1;
  const int units = __popc(__ballot_sync(0xFFFFFFFFu, lane < kPlacers && orders[lane].matrix >= 0));
  barrier_wait(&s.summed[number & 1], parity_of(number));
#pragma unroll 1
  for (int w = 0; w < units;) {
    const Order& order = orders[w];
    const PlacedMatrix& m = p.matrices[order.matrix];
    const std::int32_t tile = quotient(order.unit, m.per_chunks);
    const std::uint32_t power = __ldg(m.powers + (tile * 16 + row) * 2 + part);
    const int end = min(units, w + order.behind + 1);
    std::uint32_t sum = 0;
    for (; w < end; ++w) sum ^= s.residues[number & 1][w][lane];
    sum = gf2::times(sum, power);
    if (order.unit == 0 && lane == 0) {
      static constexpr std::uint32_t kWord = gf2::power(32);
      const std::int32_t n = s.exponents[number & 3][order.slot];
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
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&s.told[i], kPlacers * cuda::kArrivals);
      barrier_init(&s.ready[i], 2 * cuda::kArrivals);
      barrier_init(&s.summed[i], kPlacers * cuda::kArrivals);
      for (int w = 0; w < kPlacers; ++w) barrier_init(&s.arrived[w][i], 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp >= kPlacers) {
    for (int step = warp - kPlacers; step < 3; step += 2) give_orders(p, s, step);
  }
  __syncthreads();
  if (warp < kPlacers) {
    place_units(p, s);
  } else if (warp == kPlacers) {
    for (std::int32_t step = 0; step < p.num_steps; ++step) trade(p, s, step);
  } else {
    for (std::int32_t step = 0; step <= p.num_steps; ++step) {
      if (step < p.num_steps) {
        give_orders(p, s, step + 3);
        __syncwarp();
        if (cuda::arrives(lane)) barrier_arrive(&s.ready[step & 1]);
      }
      if (step > 0) add_residues(p, s, step - 1);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Pair sum;
  for (const Pair& of_warp : s.sums) {
    sum.error += of_warp.error;
    sum.norm += of_warp.norm;
  }
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

}  // namespace

std::int32_t place_blocks(Device device) { return cuda::multiprocessors(device.index); }

void place_weights_cuda(const PlaceArgs& args, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  cuda::allow_shared(place_weights_kernel, sizeof(PlaceShared));
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
