/// CRC32C on a CUDA device. Of bytes in rows: a lane takes every so many'th word of a unit, by
/// Horner's rule in one fixed power of x. That product is four lookups, one a byte, in tables that
/// every lane has for itself, bank by bank, so that no two lanes meet; the tables are made in
/// shared memory by the block that reads them. Of what lies in tiles: products of bits,
/// crc_bits_cuda.h.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/exact/crc32c_rows.h"
#include "kernels/exact/crc_bits_cuda.h"
#include "kernels/exact/gf2.h"
#include "kernels/exact/w4a4_tile.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kTableBytes = 4 * 256 * 32 * 4;
constexpr std::uint64_t kRowStride = 32 * 32;  // bits from a lane's word to its next

/// [4][256][32]: byte v at place b, times x^kStride, once a lane.
__device__ void make_table(std::uint32_t* table, std::uint32_t stride) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int entry = static_cast<int>(threadIdx.x); entry < 1024; entry += kThreads) {
    const std::uint32_t value =
        gf2::times(static_cast<std::uint32_t>(entry & 255) << (entry >> 8) * 8, stride);
    for (int i = 0; i < 32; ++i) table[entry * 32 + ((lane + i) & 31)] = value;
  }
  __syncthreads();
}

/// s times the table's power of x. `lane4`: the lane's column, in bytes.
__device__ inline std::uint32_t step(const std::uint32_t* table, std::uint32_t lane4,
                                     std::uint32_t s) {
  constexpr std::uint32_t kRow = 0x7F80u;  // 128 bytes to an entry
  const auto* bytes = reinterpret_cast<const char*>(table);
  const auto at = [bytes](std::uint32_t offset) {
    return *reinterpret_cast<const std::uint32_t*>(bytes + offset);
  };
  return at((s << 7 & kRow) | lane4) ^ at(((s >> 1 & kRow) | lane4) + 0x8000u) ^
         at(((s >> 9 & kRow) | lane4) + 0x10000u) ^ at(((s >> 17 & kRow) | lane4) + 0x18000u);
}

/// x^32 to the power of n, n <= 32.
__device__ std::uint32_t words_power(std::uint32_t n) {
  static constexpr std::uint32_t k1 = gf2::power(32), k2 = gf2::power(64), k4 = gf2::power(128),
                                 k8 = gf2::power(256), k16 = gf2::power(512),
                                 k32 = gf2::power(1024);
  std::uint32_t power = n >= 32 ? k32 : gf2::kOne;
  if ((n & 1) != 0) power = gf2::times(power, k1);
  if ((n & 2) != 0) power = gf2::times(power, k2);
  if ((n & 4) != 0) power = gf2::times(power, k4);
  if ((n & 8) != 0) power = gf2::times(power, k8);
  if ((n & 16) != 0) power = gf2::times(power, k16);
  return power;
}

/// What an expert's header says, m 2^n.
__device__ inline float global_of(const std::byte* expert) {
  const PowerPair power = power_pair(*reinterpret_cast<const std::int32_t*>(expert + kExponentAt));
  const float mantissa = *reinterpret_cast<const float*>(expert + kMantissaAt) + 1.0f;
  return mantissa * power.first * power.second;
}

/// Where units are few, every block has some.
__device__ inline std::int64_t first_unit() {
  return std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
}

__global__ void __launch_bounds__(kThreads, 1)
    crc_rows_kernel(const CrcUnit* units, std::int64_t count, std::uint32_t* sums) {
  extern __shared__ std::uint32_t table[];
  static constexpr std::uint32_t kStride = gf2::power(kRowStride);
  make_table(table, kStride);
  const std::uint32_t lane = threadIdx.x & 31u;
  const std::uint32_t lane4 = 4 * lane;
  const std::uint32_t lane_power = words_power(32 - lane);  // this lane's word and those after it
  for (std::int64_t u = first_unit(); u < count; u += std::int64_t{gridDim.x} * kWarps) {
    const CrcUnit unit = units[u];
    // Zeros before a message leave a register of 0 as it is: the first word may be in part
    // another's bytes, masked, and lanes of the first round may have none.
    const auto head = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(unit.data) & 3u);
    const auto* words = reinterpret_cast<const std::uint32_t*>(unit.data - head);
    const std::uint32_t whole = (head + unit.bytes) / 4;
    const std::uint32_t pad = (0u - whole) & 31u;
    const std::uint32_t rounds = (whole + pad) / 32;
    std::uint32_t s = 0;
    if (rounds > 0) {
      if (lane >= pad) {
        s = words[lane - pad];
        if (lane == pad) s &= 0xFFFFFFFFu << head * 8;
      }
      const std::uint32_t* next = words + (32 + lane - pad);
      std::uint32_t round = 1;
      for (; round + 8 <= rounds; round += 8, next += 256) {
        std::uint32_t w[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = next[i * 32];
#pragma unroll
        for (int i = 0; i < 8; ++i) s = step(table, lane4, s) ^ w[i];
      }
      for (; round < rounds; ++round, next += 32) s = step(table, lane4, s) ^ *next;
      s = __reduce_xor_sync(0xFFFFFFFFu, gf2::times(s, lane_power));
    }
    if (lane != 0) continue;
    const auto* end = reinterpret_cast<const std::uint8_t*>(unit.data) + unit.bytes;
    const auto* at = reinterpret_cast<const std::uint8_t*>(words + whole);
    if (whole == 0) at += head;
    for (; at < end; ++at) s = gf2::after_byte(s, *at);
    atomicXor(sums + unit.item, gf2::times(s, unit.power));
  }
}

constexpr int kTileThreads = 256;

/// A warp a tile. Lane 4 g + q has of each block columns 4 q .. 4 q + 3 of outputs g and g + 8, two
/// bytes of each, and scales of block q.
__global__ void __launch_bounds__(kTileThreads, 2)
    crc_tiles_kernel(const __grid_constant__ CrcTiles p, std::uint32_t* sums) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int tiles = (p.out + 15) / 16, chunks = p.chunks;
  const auto* const code_bits = reinterpret_cast<const uint4*>(p.bits) + lane;
  const std::uint32_t* const scale_bits = p.bits + chunks * 256 + lane;
  const std::int64_t step = std::int64_t{gridDim.x} * (kTileThreads / 32);
  for (std::int64_t u = std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
       u < p.count * tiles; u += step) {
    const CrcExpert expert = p.experts[u / tiles];
    const auto number = static_cast<int>(u % tiles);
    const std::byte* tile = expert.data + W4a4Weights::kHeaderBytes + number * p.tile_bytes;
    const auto* codes = reinterpret_cast<const uint4*>(tile) + lane;
    const auto* scales = reinterpret_cast<const std::uint16_t*>(tile + 512) + lane;
    std::int32_t of_codes[4][4] = {}, of_scales[4][4] = {};
#pragma unroll 4
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint4 own = __ldcs(codes + chunk * 36);
      const std::uint32_t bytes = __ldcs(scales + chunk * 288);
      const uint4 first = __ldg(code_bits + chunk * 64);
      const uint4 second = __ldg(code_bits + chunk * 64 + 32);
      const std::uint32_t third = __ldg(scale_bits + chunk * 32);
      // Of output g the halves below, of g + 8 those above.
      const std::uint32_t a[4] = {
          __byte_perm(own.x, own.y, 0x5410), __byte_perm(own.x, own.y, 0x7632),
          __byte_perm(own.z, own.w, 0x5410), __byte_perm(own.z, own.w, 0x7632)};
      const std::uint32_t b0[4] = {first.x, first.y, first.z, first.w};
      const std::uint32_t b1[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        count_common(of_codes[t], a, b0[t], b1[t]);
        count_common(of_scales[t], bytes & 255u, bytes >> 8, third >> 8 * t);
      }
    }
    std::uint32_t words[4] = {0, 0, 0, 0};
    parities(of_codes, words[0], words[1]);
    parities(of_scales, words[2], words[3]);
    std::uint32_t sum = of_lane(words);
    const int row = number * 16 + lane / 4 + 8 * (lane & 1);
    sum = row < p.out ? gf2::times(sum, p.powers[row * 2 + (lane >> 1 & 1)]) : 0u;
    if (number == 0 && lane == 0) {
      static constexpr std::uint32_t kWord = gf2::power(32);
      sum ^= gf2::times(float_bits(global_of(expert.data)), kWord);
    }
    sum = __reduce_xor_sync(0xFFFFFFFFu, sum);
    if (lane == 0) atomicXor(sums + expert.item, sum);
  }
}

/// What bit i of a byte is worth, with so many bytes behind it: x^(39 - i) times x^8 for each.
struct ByteBits {
  std::uint32_t power;
  __device__ explicit ByteBits(std::int32_t behind)
      : power(gf2::power(32u + 8u * static_cast<std::uint32_t>(max(behind, 0)))) {}
  /// Bits 8 t + g of it, of all i, where they stand in a byte.
  __device__ void add_to(std::uint32_t (&words)[4], int g, int shift) {
    for (int i = 7; i >= 0; --i, power = gf2::times_x(power)) {
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] |= (power >> (8 * t + g) & 1u) << (shift + i);
    }
  }
};

__global__ void tile_bits_kernel(std::uint32_t* bits, std::int32_t cols) {
  const auto at = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const std::int32_t chunks = (cols + 63) / 64;
  if (at >= chunks * 96) return;
  const int lane = at % 32, quad = lane % 4, g = lane / 4;
  std::uint32_t words[4] = {0, 0, 0, 0};
  if (at < chunks * 64) {
    const int chunk = at / 64, word = at / 32 % 2;
    for (int k = 0; k < 4; ++k) {
      const int byte = 32 * chunk + 8 * (2 * word + k / 2) + 2 * quad + k % 2;
      ByteBits(cols / 2 - 1 - byte).add_to(words, g, 8 * k);
    }
    reinterpret_cast<uint4*>(bits)[at] = {words[0], words[1], words[2], words[3]};
    return;
  }
  const int chunk = at / 32 - 2 * chunks;
  ByteBits(cols / 16 - 1 - (4 * chunk + quad)).add_to(words, g, 0);
  bits[chunks * 256 + chunk * 32 + lane] =
      words[0] | words[1] << 8 | words[2] << 16 | words[3] << 24;
}

__global__ void row_powers_kernel(std::uint32_t* powers, std::int32_t out, std::int32_t cols) {
  const auto at = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= 2 * out) return;
  const std::int64_t row_bytes = at % 2 == 0 ? cols / 2 : cols / 16;
  const std::int64_t all_scales = at % 2 == 0 ? std::int64_t{out} * (cols / 16) : 0;
  const std::int64_t behind = row_bytes * (out - 1 - at / 2) + all_scales + 4;
  powers[at] = gf2::power(8 * static_cast<std::uint64_t>(behind));
}

/// As many blocks as the device holds, and no more than there is work for.
template <typename Kernel>
unsigned int blocks_for(Kernel kernel, std::int64_t warps, Device device) {
  cuda::allow_shared(kernel, kTableBytes);
  const std::int64_t most = cuda::multiprocessors(device.index);
  return static_cast<unsigned int>(std::min(most, warps));
}

}  // namespace

void crc_rows_cuda(const CrcUnit* units, std::int64_t count, std::uint32_t* sums, Device device,
                   Stream stream) {
  const cuda::OnDevice scope(device.index);
  const unsigned int blocks = blocks_for(crc_rows_kernel, count, device);
  crc_rows_kernel<<<blocks, kThreads, kTableBytes, cuda::stream_of(stream)>>>(units, count, sums);
  cuda::require_launch("crc_rows_kernel");
}

void crc_tiles_cuda(const CrcTiles& tiles, std::uint32_t* sums, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  const std::int64_t most = 2 * cuda::multiprocessors(device.index);
  const std::int64_t units = tiles.count * ((tiles.out + 15) / 16);
  crc_tiles_kernel<<<static_cast<unsigned int>(std::min(most, units)), kTileThreads, 0,
                     cuda::stream_of(stream)>>>(tiles, sums);
  cuda::require_launch("crc_tiles_kernel");
}

void tile_tables_cuda(std::uint32_t* bits, std::uint32_t* powers, std::int32_t out,
                      std::int32_t cols, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  tile_bits_kernel<<<table_blocks((cols + 63) / 64 * 96), kTableThreads, 0,
                     cuda::stream_of(stream)>>>(bits, cols);
  cuda::require_launch("tile_bits_kernel");
  row_powers_cuda(powers, out, cols, device, stream);
}

void row_powers_cuda(std::uint32_t* powers, std::int32_t out, std::int32_t cols, Device device,
                     Stream stream) {
  const cuda::OnDevice scope(device.index);
  row_powers_kernel<<<table_blocks(2ll * out), kTableThreads, 0, cuda::stream_of(stream)>>>(
      powers, out, cols);
  cuda::require_launch("row_powers_kernel");
}

}  // namespace lockstep::kernels
