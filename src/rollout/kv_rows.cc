#include "rollout/kv_rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/build.h"
#include "base/parallel.h"
#include "kernels/exact/record_row.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kTokensATask = 256;

}  // namespace

void record_from_row(const std::byte* row, const RowLayout& layout, bool wide, std::byte* out) {
  assert(layout.width % 16 == 0 && layout.exponents == 0 && "a row of the cache");
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row);
  std::memset(out, 0, static_cast<std::size_t>(layout.bytes()));
  kernels::write_record({.codes = codes,
                         .scales = codes + (wide ? layout.width : layout.width / 2),
                         .cols = layout.width,
                         .wide = wide},
                        0, layout, reinterpret_cast<std::uint8_t*>(out));
}

void records_from_pages(std::span<const PageSlot> slots, std::span<const KvRows> all,
                        [[maybe_unused]] std::int64_t most_bytes, std::byte* out, Device device,
                        [[maybe_unused]] Stream stream) {
  assert(most_bytes < std::int64_t{1} << 31 && "a kernel counts its bytes in 32 bits");
  if (device.kind == Device::Kind::kCuda) {
    if constexpr (build::has_cuda) {
      return records_from_pages_cuda(slots, all, most_bytes, out, device, stream);
    }
  }
  const auto count = static_cast<std::int64_t>(slots.size());
  const std::int64_t tasks = (count + kTokensATask - 1) / kTokensATask;
  // Tasks of the same tokens follow each other: their pages are read together.
  parallel_for(tasks * std::ssize(all), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const KvRows& rows = all[static_cast<std::size_t>(task % std::ssize(all))];
      const std::int64_t first = task / std::ssize(all) * kTokensATask;
      const std::int64_t from = std::max(first, rows.first);
      const std::int64_t last = std::min(first + kTokensATask, rows.first + rows.count);
      for (std::int64_t i = from; i < last; ++i) {
        const PageSlot& at = slots[static_cast<std::size_t>(i)];
        record_from_row(at.page + rows.offset + at.slot * rows.row_bytes, rows.layout, rows.wide,
                        out + rows.to + (i - rows.first) * rows.layout.bytes());
      }
    }
  });
}

}  // namespace lockstep::rollout
