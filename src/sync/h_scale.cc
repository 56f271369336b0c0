#include "sync/h_scale.h"

#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/h_scale.h"
#include "model/names.h"
#include "model/values.h"
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
  void refined(const Weight& weight, const std::function<void(const Weight&)>& visit) const {
    const std::vector<float> values = f32_of(weight);
    const std::int64_t rows = rows_of(weight);
    const std::int64_t cols = static_cast<std::int64_t>(values.size()) / rows;
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
