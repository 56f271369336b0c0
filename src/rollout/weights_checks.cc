/// What a weight must be before it is put: Weights::require_kind() and require_numbers().
#include <array>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/w4a4.h"
#include "model/names.h"
#include "numerics/bf16.h"
#include "numerics/scale.h"
#include "rollout/weights.h"

namespace lockstep::rollout {
namespace {

void require_finite(const WeightId& id, const TensorView<const Bf16, 2>& value) {
  for (std::int64_t row = 0; row < value.shape[0]; ++row) {
    for (std::int64_t col = 0; col < value.shape[1]; ++col) {
      const float x = to_float(value.data[row * value.stride[0] + col]);
      if (is_finite(x)) continue;
      throw Error(cat({"weight ", to_string(id), " holds ", x, " at [", row, ", ", col,
                       "]; every weight must be finite"}));
    }
  }
}

void require_scales(const WeightId& id, const TensorView<const std::uint8_t, 2>& scales,
                    std::uint8_t most) {
  for (std::int64_t row = 0; row < scales.shape[0]; ++row) {
    for (std::int64_t b = 0; b < scales.shape[1]; ++b) {
      const std::uint8_t byte = scales.data[row * scales.stride[0] + b];
      if (byte <= most) continue;
      throw Error(cat({"weight ", to_string(id), " has scale byte ", int{byte}, " in row ", row,
                       ", block ", b, ", must be at most ", int{most}, "; the data is damaged"}));
    }
  }
}

}  // namespace

void Weights::require_kind(const Weight& weight) const {
  const auto expected = weight_shape(model_, weight.id.role);
  std::array<std::int64_t, 2> shape{};
  const bool codes = arrives_as_codes(weight.id);
  if (codes) {
    const auto* value = std::get_if<PackedView<const std::uint8_t>>(&weight.value);
    if (value == nullptr) {
      throw Error(cat({"weight ", to_string(weight.id),
                       " arrives in plain numbers; under this contract it must be codes: "
                       "quantize it, or leave layer ",
                       weight.id.layer.value, " out of contract.layers"}));
    }
    const Quantizer& rule = contract_.weight;
    shape = {value->codes.shape[0], rule.columns(value->codes.shape[1])};
    const auto& scales = value->scales.shape;
    const std::array<std::int64_t, 2> wanted = {rule.scale_rows(expected[0]),
                                                rule.scale_cols(expected[1])};
    if (scales != wanted) {
      throw Error(cat({"weight ", to_string(weight.id), " has scales [", scales[0], ", ", scales[1],
                       "]; expected [", wanted[0], ", ", wanted[1], "]"}));
    }
    if (value->mantissas.shape[1] != rule.macro_cols(expected[1])) {
      throw Error(cat({"weight ", to_string(weight.id), " has ", value->mantissas.shape[1],
                       " mantissas a row; expected ", rule.macro_cols(expected[1])}));
    }
  } else {
    const auto* value = std::get_if<TensorView<const Bf16, 2>>(&weight.value);
    if (value == nullptr) {
      throw Error(cat({"weight ", to_string(weight.id),
                       " does not arrive in BF16; under this "
                       "contract it must"}));
    }
    shape = value->shape;
  }
  if (shape == expected) return;
  throw Error(cat({"weight ", to_string(weight.id), " is [", shape[0], ", ", shape[1],
                   "]; expected [", expected[0], ", ", expected[1], "]"}));
}

/// Of what lies on the host; its kind has been found right.
void Weights::require_numbers(const Weight& weight) const {
  const auto* codes = std::get_if<PackedView<const std::uint8_t>>(&weight.value);
  const Device lies = codes != nullptr ? codes->codes.device
                                       : std::get<TensorView<const Bf16, 2>>(weight.value).device;
  if (lies.kind != Device::Kind::kCpu) {
    if (lies == device_) return;
    throw Error(cat({"weight ", to_string(weight.id),
                     " lies on a CUDA device that the engine does not run on"}));
  }
  if (codes == nullptr) {
    return require_finite(weight.id, std::get<TensorView<const Bf16, 2>>(weight.value));
  }
  switch (layers_[static_cast<std::size_t>(weight.id.layer.value)].format) {
    case ExpertFormat::kW4a4:
    case ExpertFormat::kW4a16: try { kernels::w4a4_require(*codes, contract_.weight);
      } catch (const Error& error) {
        throw Error(cat({"weight ", to_string(weight.id), ": ", error.what()}));
      }
      break;
    case ExpertFormat::kMx:
      require_scales(weight.id, codes->scales, most_scale_byte(contract_.weight));
      break;
    default: break;  // dequantize() looks at them
  }
}

}  // namespace lockstep::rollout
