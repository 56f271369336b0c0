#include "sync/h_scale.h"

#include <array>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/h_scale.h"
#include "model/names.h"
#include "numerics/bf16.h"
#include "sync/refit.h"

namespace lockstep::sync {
namespace {

class HScaled final : public WeightSource {
 public:
  HScaled(const WeightSource& from, const Contract& contract, InputSquares squares)
      : from_(from), contract_(contract), squares_(std::move(squares)) {}

  void each(const std::function<void(const Weight&)>& visit) const override {
    from_.each([&](const Weight& weight) {
      const bool codes = std::holds_alternative<PackedView<const std::uint8_t>>(weight.value);
      if (codes || !quantized(contract_, weight.id)) return visit(weight);
      refined(weight, visit);
    });
  }

 private:
  static std::vector<float> as_f32(const Weight& weight, std::array<std::int64_t, 2>& shape) {
    std::vector<float> values;
    std::visit(
        [&](const auto& view) {
          if constexpr (requires { view.shape; }) {
            shape = view.shape;
            for (std::int64_t r = 0; r < shape[0]; ++r) {
              for (std::int64_t c = 0; c < shape[1]; ++c) {
                if constexpr (std::is_same_v<decltype(view.data), const float*>) {
                  values.push_back(view.data[r * view.stride[0] + c * view.stride[1]]);
                } else {
                  values.push_back(to_float(view.data[r * view.stride[0] + c * view.stride[1]]));
                }
              }
            }
          }
        },
        weight.value);
    return values;
  }

  void refined(const Weight& weight, const std::function<void(const Weight&)>& visit) const {
    std::array<std::int64_t, 2> shape{};
    const std::vector<float> values = as_f32(weight, shape);
    const auto [rows, cols] = shape;
    std::vector<std::uint8_t> codes(values.size() / 2), scales(values.size() / 16);
    float global = 0;
    const PackedView<std::uint8_t> packed = {{codes.data(), {rows, cols / 2}, {cols / 2, 1}},
                                             {scales.data(), {rows, cols / 16}, {cols / 16, 1}},
                                             {&global, {rows}, {0}}};
    try {
      kernels::quantize_weight_h_scale({values.data(), {rows, cols}, {cols, 1}},
                                       squares_(weight.id), contract_.weight, packed);
    } catch (const Error& error) {
      throw Error(cat({"weight ", to_string(weight.id), ": ", error.what()}));
    }
    visit({weight.id, PackedView<const std::uint8_t>(packed)});
  }

  const WeightSource& from_;
  Contract contract_;
  InputSquares squares_;
};

}  // namespace

std::unique_ptr<WeightSource> h_scaled(const WeightSource& from, const Contract& contract,
                                       InputSquares squares) {
  return std::make_unique<HScaled>(from, contract, std::move(squares));
}

}  // namespace lockstep::sync
