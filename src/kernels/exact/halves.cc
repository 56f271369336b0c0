#include "kernels/exact/halves.h"

#include <algorithm>

#include "base/build.h"
#include "base/error.h"
#include "kernels/exact/halves_rows.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

bool is_there(Device device) {
  if (device.kind == Device::Kind::kCpu) return false;
  if constexpr (build::has_cuda) return true;
  throw Error("halves: the numbers are on a CUDA device, and this build has no CUDA backend");
}

}  // namespace

void keep_half(const PackedView<const std::uint8_t>& from, bool first,
               const PackedView<std::uint8_t>& to, Stream stream) {
  const std::int64_t rows = from.codes.shape[0], bytes = from.codes.shape[1];
  if (to.codes.shape != from.codes.shape || to.scales.shape != from.scales.shape ||
      to.global.shape != from.global.shape || bytes % 2 != 0 ||
      to.codes.device != from.codes.device) {
    throw Error("halves: codes, scales and global scales must have one shape, on one device");
  }
  if constexpr (build::has_cuda) {
    if (is_there(from.codes.device)) return keep_half_cuda(from, first, to, stream);
  }
  is_there(from.codes.device);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::uint8_t* const codes = to.codes.data + row * to.codes.stride[0];
    std::copy_n(from.codes.data + row * from.codes.stride[0], bytes, codes);
    std::fill_n(codes + (first ? bytes / 2 : 0), bytes / 2, std::uint8_t{0});
    std::copy_n(from.scales.data + row * from.scales.stride[0], from.scales.shape[1],
                to.scales.data + row * to.scales.stride[0]);
    to.global.data[row * to.global.stride[0]] = from.global.data[row * from.global.stride[0]];
  }
}

void add_halves(const TensorView<const float, 2>& other, const TensorView<float, 2>& y,
                Stream stream) {
  if (other.shape != y.shape || other.device != y.device || y.stride[0] != y.shape[1] ||
      other.stride[0] != y.shape[1]) {
    throw Error("halves: both sums must have one shape without gaps, on one device");
  }
  if constexpr (build::has_cuda) {
    if (is_there(y.device)) return add_halves_cuda(other, y, stream);
  }
  is_there(y.device);
  for (std::int64_t i = 0; i < y.shape[0] * y.shape[1]; ++i) {
    y.data[i] = to_float(to_bf16(y.data[i])) + to_float(to_bf16(other.data[i]));
  }
}

}  // namespace lockstep::kernels
