#include "kernels/exact/quantize_weights.h"

#include <array>

#include "base/build.h"
#include "base/error.h"
#include "kernels/exact/quantize_weights_rows.h"

namespace lockstep::kernels {
namespace {

[[noreturn]] void throw_no_backend() {
  throw Error("quantize_weights: weights must lie on a CUDA device, for which this build has none");
}

template <typename T>
bool lies_well(const TensorView<T, 2>& view, Device device, std::uintptr_t to) {
  return view.device == device && view.stride[1] == 1 && view.stride[0] == view.shape[1] &&
         reinterpret_cast<std::uintptr_t>(view.data) % to == 0;
}

}  // namespace

bool takes_nvfp4_weights(const Quantizer& rule) {
  return rule.element == Element::kE2m1 && rule.scale == ScaleFormat::kE4m3 && rule.block == 16 &&
         rule.block_rows == 1 && rule.scale_rule == ScaleRule::kExact &&
         rule.code_rule == CodeRule::kExact && rule.global == GlobalScale::kPerTensor &&
         rule.global_is_power_of_two && rule.four_over_six == FourOverSix::kOff &&
         rule.tie == Tie::kEven && rule.zero_block == ZeroBlock::kZero &&
         rule.sign_of_zero == SignOfZero::kDropped && rule.macro_block == 0;
}

bool quantizes_at_once(const Quantizer& rule, const TensorView<const float, 2>& master) {
  const Device device = master.device;
  return build::has_cuda && device.kind == Device::Kind::kCuda && takes_nvfp4_weights(rule) &&
         master.shape[1] % 16 == 0 && lies_well(master, device, 16);
}

WeightSums::WeightSums(Device device, Stream stream)
    : device_(device), stream_(stream), sums_(device, 16 * (1 + kMostParts), stream) {
  fill_bytes(sums_.as<void>(), device, 0, 16, stream);
}

void WeightSums::fold() {
  if (parts_ == 0) return;
  if constexpr (build::has_cuda) {
    fold_sums_cuda(sums_.as<double>(), sums_.as<double>() + 2, parts_, device_, stream_);
    parts_ = 0;
    return;
  }
  throw_no_backend();
}

void WeightSums::read(double& error, double& norm) {
  fold();
  std::array<double, 2> sums{};
  copy_bytes(sums.data(), {}, sums_.as<void>(), device_, sizeof sums, stream_);
  synchronize(device_, stream_);
  error = sums[0];
  norm = sums[1];
}

void quantize_weights(std::span<const WeightOnItsWay> weights, const Quantizer& rule,
                      WeightSums& sums) {
  if (weights.empty()) return;
  if (std::ssize(weights) > kMostWeights) throw Error("quantize_weights: too many at once");
  for (const WeightOnItsWay& weight : weights) {
    const Device device = weight.master.device;
    if (!quantizes_at_once(rule, weight.master) || !lies_well(weight.out.codes, device, 8) ||
        !lies_well(weight.out.scales, device, 1)) {
      throw Error("quantize_weights: there is no kernel for this rule, or for where the codes lie");
    }
  }
  const int parts = static_cast<int>(weights.size()) * kSumBlocks;
  if (sums.parts_ + parts > kMostParts) sums.fold();
  if constexpr (build::has_cuda) {
    quantize_weights_cuda(weights, rule, sums.sums_.as<double>() + 2 + 2 * sums.parts_,
                          sums.stream_);
    sums.parts_ += parts;
    return;
  }
  throw_no_backend();
}

void w4a4_replace(std::span<const Replaced> experts, Stream stream) {
  if (experts.empty()) return;
  if (std::ssize(experts) > kMostReplaced) throw Error("w4a4_replace: too many at once");
  for (const Replaced& one : experts) {
    const Device device = one.place.device;
    if (one.place.scaled) {
      throw Error("w4a4_replace: the place is for global scales that are no powers of two");
    }
    if (!lies_well(one.now.codes, device, 8) || !lies_well(one.now.scales, device, 1) ||
        one.now.codes.shape != std::array<std::int64_t, 2>{one.place.out, one.place.cols / 2} ||
        one.now.scales.shape != std::array<std::int64_t, 2>{one.place.out, one.place.cols / 16}) {
      throw Error("w4a4_replace: codes must have the experts' shape, on their device, no gaps");
    }
  }
  if constexpr (build::has_cuda) return w4a4_replace_cuda(experts, stream);
  throw_no_backend();
}

}  // namespace lockstep::kernels
