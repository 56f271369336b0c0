#include "kernels/exact/code_flips.h"

#include <bit>
#include <cstdlib>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/code_flips_cuda.h"

namespace lockstep::kernels {
namespace {

template <typename View>
void require(const View& now, std::int64_t rows, std::int64_t cols, Device device) {
  if (now.device != device) throw Error("count_flips: both must lie on one device");
  if (now.shape[0] == rows && now.shape[1] == cols && (now.stride[1] == 1 || cols <= 1)) return;
  throw Error(cat({"count_flips: [", now.shape[0], ", ", now.shape[1], "] against [", rows, ", ",
                   cols, "], rows must be contiguous"}));
}

bool on_cuda(Device device) {
  if (device.kind == Device::Kind::kCpu) return false;
  if (build::has_cuda) return true;
  throw Error("count_flips: the codes are on a CUDA device, this build has no CUDA backend");
}

void count_row(const std::uint8_t* now, const std::uint8_t* before, std::int64_t bytes,
               std::int64_t* counts) {
  for (std::int64_t i = 0; i < bytes; ++i) {
    if (now[i] == before[i]) continue;
    for (const int shift : {0, 4}) {
      const int steps =
          std::abs(grid_place(now[i] >> shift & 15u) - grid_place(before[i] >> shift & 15u));
      counts[kCodeFlips] += steps != 0;
      counts[kAdjacentFlips] += steps == 1;
    }
  }
}

void count_scales(const std::uint8_t* now, const std::uint8_t* before, std::int64_t count,
                  std::int64_t* counts) {
  for (std::int64_t i = 0; i < count; ++i) counts[kScaleFlips] += now[i] != before[i];
}

template <typename T>
T* row_of(const TensorView<T, 2>& view, std::int64_t row) {
  return view.data + row * view.stride[0];
}

}  // namespace

void count_flips(const PackedView<const std::uint8_t>& now, const W4a4Weights& before,
                 std::int32_t expert, std::int64_t* counts, Stream stream) {
  require(now.codes, before.out, before.cols / 2, before.device);
  require(now.scales, before.out, before.cols / 16, before.device);
  if (on_cuda(before.device)) {
    if constexpr (build::has_cuda) {
      return count_flips_cuda(now, before, expert, counts, stream);
    }
  }
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(now.codes.shape[1]));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(now.scales.shape[1]));
  for (std::int32_t row = 0; row < before.out; ++row) {
    w4a4_read(before, expert, row, codes, scales);
    count_row(row_of(now.codes, row), codes.data(), std::ssize(codes), counts);
    count_scales(row_of(now.scales, row), scales.data(), std::ssize(scales), counts);
  }
}

void count_flips(const PackedView<const std::uint8_t>& now,
                 const PackedView<const std::uint8_t>& before, std::int64_t* counts,
                 Stream stream) {
  const Device device = before.codes.device;
  require(now.codes, before.codes.shape[0], before.codes.shape[1], device);
  require(now.scales, before.scales.shape[0], before.scales.shape[1], device);
  if (on_cuda(device)) {
    if constexpr (build::has_cuda) return count_flips_cuda(now, before, counts, stream);
  }
  for (std::int64_t row = 0; row < now.codes.shape[0]; ++row) {
    count_row(row_of(now.codes, row), row_of(before.codes, row), now.codes.shape[1], counts);
  }
  for (std::int64_t row = 0; row < now.scales.shape[0]; ++row) {
    count_scales(row_of(now.scales, row), row_of(before.scales, row), now.scales.shape[1], counts);
  }
}

void count_flips(TensorView<const Bf16, 2> now, TensorView<const Bf16, 2> before,
                 std::int64_t* counts, Stream stream) {
  require(now, before.shape[0], before.shape[1], before.device);
  if (on_cuda(before.device)) {
    if constexpr (build::has_cuda) return count_flips_cuda(now, before, counts, stream);
  }
  for (std::int64_t row = 0; row < now.shape[0]; ++row) {
    for (std::int64_t i = 0; i < now.shape[1]; ++i) {
      counts[kValueFlips] += is_value_flip(std::bit_cast<std::uint16_t>(row_of(before, row)[i]),
                                           std::bit_cast<std::uint16_t>(row_of(now, row)[i]));
    }
  }
}

}  // namespace lockstep::kernels
