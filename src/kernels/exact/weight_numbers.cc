#include "kernels/exact/weight_numbers.h"

#include <algorithm>
#include <array>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/weight_numbers_cuda.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

template <typename A, typename B>
void require(const char* op, const A& a, const B& b) {
  if (a.device == b.device && a.shape == b.shape && (a.stride[1] == 1 || a.shape[1] <= 1) &&
      (b.stride[1] == 1 || b.shape[1] <= 1)) {
    return;
  }
  throw Error(cat({op, ": [", a.shape[0], ", ", a.shape[1], "] and [", b.shape[0], ", ", b.shape[1],
                   "] must have one shape, on one device, with contiguous rows"}));
}

bool on_cuda(const char* op, Device device) {
  if (device.kind == Device::Kind::kCpu) return false;
  if (build::has_cuda) return true;
  throw Error(cat({op, ": the weight is on a CUDA device, this build has no CUDA backend"}));
}

}  // namespace

void round_weight(TensorView<const float, 2> master, TensorView<Bf16, 2> rounded,
                  std::uint64_t* bad, Stream stream) {
  require("round_weight", master, rounded);
  if (on_cuda("round_weight", master.device)) {
    if constexpr (build::has_cuda) return round_weight_cuda(master, rounded, bad, stream);
  }
  const auto [rows, cols] = master.shape;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      const Bf16 x = to_bf16(master.data[row * master.stride[0] + col]);
      rounded.data[row * rounded.stride[0] + col] = x;
      if (!is_finite(x)) *bad = std::min(*bad, static_cast<std::uint64_t>(row * cols + col));
    }
  }
}

bool copy_weight(TensorView<const Bf16, 2> from, Bf16* to, std::int32_t* bad, Stream stream) {
  const auto lies_well = [](const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  };
  const auto [rows, cols] = from.shape;
  if (from.device.kind == Device::Kind::kCpu || from.stride[1] != 1 || from.stride[0] != cols ||
      cols % 8 != 0 || rows == 0 || cols == 0 || !lies_well(from.data) || !lies_well(to)) {
    return false;
  }
  if constexpr (build::has_cuda) copy_weight_cuda(from, to, bad, stream);
  return build::has_cuda;
}

WeightError::WeightError(Device device, Stream stream)
    : device_(device), stream_(stream), sums_(device, 8 * (2 + 2 * kErrorBlocks), stream) {
  fill_bytes(sums_.as<void>(), device, 0, sums_.bytes(), stream);
}

void WeightError::add(TensorView<const float, 2> master, TensorView<const float, 2> back) {
  require("weight_error", master, back);
  if (on_cuda("weight_error", device_)) {
    if constexpr (build::has_cuda) {
      return weight_error_cuda(master, back, sums_.as<double>(), stream_);
    }
  }
  double* const sums = sums_.as<double>();
  for (std::int64_t row = 0; row < master.shape[0]; ++row) {
    for (std::int64_t col = 0; col < master.shape[1]; ++col) {
      const double value = master.data[row * master.stride[0] + col];
      const double difference = back.data[row * back.stride[0] + col] - value;
      sums[0] += difference * difference;
      sums[1] += value * value;
    }
  }
}

void WeightError::read(double& error, double& norm) const {
  std::array<double, 2> sums{};
  copy_bytes(sums.data(), {}, sums_.as<void>(), device_, sizeof sums, stream_);
  synchronize(device_, stream_);
  error = sums[0];
  norm = sums[1];
}

}  // namespace lockstep::kernels
