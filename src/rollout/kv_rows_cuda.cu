#include "device/cuda/check.h"
#include "numerics/four_over_six.h"
#include "rollout/kv_rows.h"

namespace lockstep::rollout {
namespace {

constexpr int kRecordThreads = 256;

struct RecordParams {
  const PageSlot* slots;
  const KvRows* all;
  std::uint8_t* out;
};

/// The lowest bits of eight codes.
__device__ unsigned lowest_bits(const std::uint8_t* codes, bool wide) {
  unsigned bits = 0;
  if (wide) {
    for (int i = 0; i < 8; ++i) bits |= (codes[i] & 1u) << i;
    return bits;
  }
  for (int i = 0; i < 4; ++i) bits |= ((codes[i] & 1u) | (codes[i] >> 3 & 2u)) << (2 * i);
  return bits;
}

/// Byte `at` of the record of the row that begins with `codes`; as write_record() has it.
__device__ unsigned record_byte(const std::uint8_t* codes, const RowLayout& layout, bool wide,
                                std::int32_t at) {
  const std::uint8_t* const scales = codes + (wide ? layout.width : layout.width / 2);
  const bool full = layout.encoding == Encoding::kCodes || layout.encoding == Encoding::kCodes8;
  if (at < layout.element_bytes()) {
    return full ? codes[at] : lowest_bits(codes + (wide ? 8 : 4) * at, wide);
  }
  at -= layout.element_bytes();
  const std::int32_t blocks = layout.blocks();
  unsigned bits = 0;
  if (at < layout.scale_bytes()) {
    if (layout.encoding != Encoding::kLsbScaleMod4 &&
        layout.encoding != Encoding::kLsbScaleMod4Map) {
      return scales[at];
    }
    for (int i = 0; i < 4 && 4 * at + i < blocks; ++i) bits |= (scales[4 * at + i] & 3u) << (2 * i);
    return bits;
  }
  at -= layout.scale_bytes();
  for (int i = 0; i < 8 && 8 * at + i < blocks; ++i) {
    const std::int32_t block = 8 * at + i;
    const std::uint8_t* const from = codes + block * layout.block / 2;
    if (is_mapped_to_four(from, layout.block, scales[block])) bits |= 1u << i;
  }
  return bits;
}

/// A thread a byte; blocks of one y have one place.
__global__ void __launch_bounds__(kRecordThreads)
    records_kernel(const __grid_constant__ RecordParams p) {
  const KvRows& rows = p.all[blockIdx.y];
  const RowLayout layout = rows.layout;
  const auto width = static_cast<std::uint32_t>(layout.bytes());
  const std::uint32_t at = blockIdx.x * kRecordThreads + threadIdx.x;
  const std::uint32_t token = at / width;
  if (token >= rows.count) return;
  const PageSlot slot = p.slots[rows.first + token];
  const auto* const codes =
      reinterpret_cast<const std::uint8_t*>(slot.page) + rows.offset + slot.slot * rows.row_bytes;
  p.out[rows.to + at] = static_cast<std::uint8_t>(
      record_byte(codes, layout, rows.wide, static_cast<std::int32_t>(at - token * width)));
}

}  // namespace

void records_from_pages_cuda(std::span<const PageSlot> slots, std::span<const KvRows> all,
                             std::int64_t most_bytes, std::byte* out, Device device,
                             Stream stream) {
  if (slots.empty() || all.empty() || most_bytes == 0) return;
  const cuda::OnDevice scope(device.index);
  const RecordParams params{slots.data(), all.data(), reinterpret_cast<std::uint8_t*>(out)};
  const dim3 grid(static_cast<unsigned>((most_bytes + kRecordThreads - 1) / kRecordThreads),
                  static_cast<unsigned>(all.size()));
  records_kernel<<<grid, kRecordThreads, 0, cuda::stream_of(stream)>>>(params);
  cuda::require_launch("records_kernel");
}

}  // namespace lockstep::rollout
