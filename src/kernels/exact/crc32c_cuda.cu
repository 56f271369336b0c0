/// CRC32C on a CUDA device: a lane takes every so many'th word of a unit, by Horner's rule in one
/// fixed power of x. That product is four lookups, one a byte, in tables that every lane has for
/// itself, bank by bank, so that no two lanes meet; the tables are made in shared memory by the
/// block that reads them.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/crc32c_rows.h"
#include "kernels/exact/gf2.h"
#include "kernels/exact/w4a4.h"
#include "numerics/exponent.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kTableBytes = 4 * 256 * 32 * 4;
constexpr std::uint64_t kRowStride = 32 * 32;  // bits from a lane's word to its next
constexpr std::uint64_t kTileStride = 2 * 32;

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

/// A tile's codes: lane 4 g + t has of each block columns 4 t .. 4 t + 3 of outputs g and g + 8,
/// two bytes of each. It gives one output's to its neighbour for the other's of the same columns:
/// then every lane has words of one row.
__device__ std::uint32_t tile_codes(const std::byte* tile, int blocks, int rows,
                                    const std::uint32_t* powers, const std::uint32_t* table) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::uint32_t lane4 = 4 * (threadIdx.x & 31u);
  const bool odd = (lane & 1) != 0;
  std::uint32_t s = 0;
  const auto* chunk = reinterpret_cast<const uint4*>(tile) + lane;
  uint4 next = chunk[0];
  uint4 second = blocks > 4 ? chunk[36] : next;
  for (int left = blocks; left > 0; left -= 4, chunk += 36) {
    const uint4 own = next;
    next = second;
    if (left > 8) second = chunk[72];
    // Of output g, the halves below; of g + 8, those above. An even lane keeps the halves below.
    const std::uint32_t low01 = __byte_perm(own.x, own.y, 0x5410);
    const std::uint32_t high01 = __byte_perm(own.x, own.y, 0x7632);
    const std::uint32_t low23 = __byte_perm(own.z, own.w, 0x5410);
    const std::uint32_t high23 = __byte_perm(own.z, own.w, 0x7632);
    const std::uint32_t kept01 = odd ? high01 : low01;
    const std::uint32_t kept23 = odd ? high23 : low23;
    const std::uint32_t got01 = __shfl_xor_sync(0xFFFFFFFFu, odd ? low01 : high01, 1);
    const std::uint32_t got23 = __shfl_xor_sync(0xFFFFFFFFu, odd ? low23 : high23, 1);
    const std::uint32_t first01 = odd ? got01 : kept01, last01 = odd ? kept01 : got01;
    const std::uint32_t first23 = odd ? got23 : kept23, last23 = odd ? kept23 : got23;
    const std::uint32_t words[4] = {
        __byte_perm(first01, last01, 0x5410), __byte_perm(first01, last01, 0x7632),
        __byte_perm(first23, last23, 0x5410), __byte_perm(first23, last23, 0x7632)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) s = step(table, lane4, s) ^ words[i];
    }
  }
  const int row = lane / 4 + 8 * (lane & 1);
  // The lane's last word is the row's last but one, or its last.
  return row < rows ? gf2::times(s, powers[((lane & 2) != 0 ? 16 : 0) + rows - 1 - row]) : 0u;
}

/// A tile's scales: lane 16 q + r takes row r, every other chunk's four.
__device__ std::uint32_t tile_scales(const std::byte* tile, int blocks, int rows,
                                     const std::uint32_t* powers, const std::uint32_t* table) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::uint32_t lane4 = 4 * (threadIdx.x & 31u);
  const int row = lane & 15, g = row & 7;
  const std::uint32_t select = row >= 8 ? 0x7531 : 0x6420;
  const int chunks = blocks / 4, rest = blocks % 4;
  const auto word_of = [&](int chunk) {
    const auto pair = *reinterpret_cast<const uint2*>(tile + chunk * 576 + 512 + 8 * g);
    return __byte_perm(pair.x, pair.y, select);
  };
  std::uint32_t s = 0;
  // Where the number of chunks is odd, a zero stands before the first.
#pragma unroll 4
  for (int chunk = (lane >> 4) - (chunks & 1); chunk < chunks; chunk += 2) {
    s = step(table, lane4, s) ^ (chunk >= 0 ? word_of(chunk) : 0u);
  }
  if (rest > 0) {
    static constexpr std::uint32_t kTwo = gf2::power(64), kOne = gf2::power(32);
    s = gf2::times(s, lane >= 16 ? kOne : kTwo);
    const std::uint32_t last = word_of(chunks);
    for (int i = 0; i < rest; ++i) s = gf2::after_byte(s, lane < 16 ? last >> i * 8 & 255u : 0u);
  }
  return row < rows ? gf2::times(s, powers[lane / 16 * 16 + rows - 1 - row]) : 0u;
}

__global__ void __launch_bounds__(kThreads, 1)
    crc_tiles_kernel(const __grid_constant__ CrcTiles p, std::uint32_t* sums) {
  extern __shared__ std::uint32_t table[];
  static constexpr std::uint32_t kStride = gf2::power(kTileStride);
  make_table(table, kStride);
  const std::uint32_t lane = threadIdx.x & 31u;
  const int tiles = (p.out + 15) / 16;
  for (std::int64_t u = first_unit(); u < p.count * tiles; u += std::int64_t{gridDim.x} * kWarps) {
    const CrcExpert expert = p.experts[u / tiles];
    const auto number = static_cast<int>(u % tiles);
    const std::byte* tile = expert.data + W4a4Weights::kHeaderBytes + number * p.tile_bytes;
    const int rows = min(16, p.out - number * 16);
    const std::uint32_t codes =
        __reduce_xor_sync(0xFFFFFFFFu, tile_codes(tile, p.blocks, rows, p.powers, table));
    const std::uint32_t scales =
        __reduce_xor_sync(0xFFFFFFFFu, tile_scales(tile, p.blocks, rows, p.powers + 32, table));
    // Three lanes a part each: codes, scales, and with the first tile the global scale.
    static constexpr std::uint32_t kWord = gf2::power(32);
    std::uint32_t part = lane == 0 ? codes : scales;
    std::uint32_t power = lane < 2 ? p.powers[64 + 2 * number + lane] : kWord;
    if (lane == 2) {
      part = number == 0
                 ? float_bits(power_of_two(*reinterpret_cast<const std::int32_t*>(expert.data)))
                 : 0u;
    }
    part = gf2::times(part, power);
    if (lane < 3) atomicXor(sums + expert.item, part);
  }
}

/// As many blocks as the device holds, and no more than there is work for.
template <typename Kernel>
unsigned int blocks_for(Kernel kernel, std::int64_t warps, Device device) {
  cuda::require(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTableBytes),
      "cudaFuncSetAttribute");
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
  const unsigned int blocks =
      blocks_for(crc_tiles_kernel, tiles.count * ((tiles.out + 15) / 16), device);
  crc_tiles_kernel<<<blocks, kThreads, kTableBytes, cuda::stream_of(stream)>>>(tiles, sums);
  cuda::require_launch("crc_tiles_kernel");
}

}  // namespace lockstep::kernels
