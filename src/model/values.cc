#include "model/values.h"

#include "base/error.h"
#include "base/text.h"
#include "device/memory.h"
#include "model/names.h"
#include "numerics/bf16.h"

namespace lockstep {
namespace {

float f32(float x) { return x; }
float f32(Bf16 x) { return to_float(x); }

template <typename T>
std::vector<float> f32_rows(const TensorView<const T, 2>& view) {
  if (view.device.kind == Device::Kind::kCuda) {
    const auto [rows, cols] = view.shape;
    std::vector<T> here(static_cast<std::size_t>(rows * cols));
    // A copy to such memory waits: one for all where nothing lies between the rows.
    const std::int64_t at_once = view.stride[0] == cols ? rows : 1;
    for (std::int64_t row = 0; row < rows; row += at_once) {
      copy_bytes(here.data() + row * cols, {}, view.data + row * view.stride[0], view.device,
                 at_once * cols * static_cast<std::int64_t>(sizeof(T)));
    }
    synchronize(view.device);
    return f32_rows(TensorView<const T, 2>{here.data(), {rows, cols}, {cols, 1}});
  }
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(view.shape[0] * view.shape[1]));
  for (std::int64_t row = 0; row < view.shape[0]; ++row) {
    for (std::int64_t col = 0; col < view.shape[1]; ++col) {
      values.push_back(f32(view.data[row * view.stride[0] + col * view.stride[1]]));
    }
  }
  return values;
}

}  // namespace

std::vector<float> f32_of(const Weight& weight) {
  if (const auto* view = std::get_if<TensorView<const float, 2>>(&weight.value)) {
    return f32_rows(*view);
  }
  if (const auto* view = std::get_if<TensorView<const Bf16, 2>>(&weight.value)) {
    return f32_rows(*view);
  }
  throw Error(cat({"weight ", to_string(weight.id),
                   " comes as codes, which cannot be changed on their way: give BF16 or FP32"}));
}

std::int64_t rows_of(const Weight& weight) {
  return std::visit(
      [](const auto& view) {
        if constexpr (requires { view.codes; }) {
          return view.codes.shape[0];
        } else {
          return view.shape[0];
        }
      },
      weight.value);
}

}  // namespace lockstep
