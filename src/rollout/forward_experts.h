/// The routed experts of a layer: router, dispatch, the two products.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/exact/mx_error.h"
#include "kernels/exact/mx_product.h"
#include "kernels/exact/quantize.h"
#include "rollout/capture.h"
#include "rollout/engine.h"
#include "rollout/pass_checks.h"
#include "rollout/rows.h"
#include "rollout/top_error.h"
#include "rollout/weights.h"

namespace lockstep::rollout {

/// What the experts of a layer read at one site: item i is row from[i] of x, for the expert whose
/// range of offsets [E + 1] holds i.
struct ExpertInputs {
  Layer layer;
  Site site;
  TensorView<const Bf16, 2> x;  // [n, D], or [n * K, F]
  std::span<const std::int32_t> from;
  std::span<const std::int32_t> offsets;
};
using ExpertObserver = std::function<void(const ExpertInputs&)>;

/// On a CUDA device few rows whose records of w2_in nobody keeps take all steps behind the first
/// quantization in one op, which gives the same bits.
class ForwardExperts {
 public:
  /// `counts`: where what quantization meets is counted, if not in memory of its own.
  ForwardExperts(const Agreement& agreement, const Options& options, Workplace& at,
                 std::int64_t* counts = nullptr);

  /// What the experts make of `x` [n, D], BF16, normalized and finite: combine() of it is the
  /// layer's, and `out` where there are no Outputs. Records go to `capture`, rows with operands of
  /// W2 that are not finite to `checks`.
  struct Outputs {
    TensorView<const float, 2> y;      // [n * K, D], of the next run() too
    TensorView<const float, 2> gates;  // [n, K]
  };
  Outputs run(const Pass& pass, Layer layer, const LayerWeights& weights,
              TensorView<const Bf16, 2> x, Capture& capture, const PassChecks& checks,
              TensorView<Bf16, 2> out);

  /// Shows every site's inputs from now on: calibration.
  void observe(ExpertObserver observer) { observer_ = std::move(observer); }

  /// QuantizeCount of all activations since the last call.
  std::vector<std::int64_t> take_counts() { return counts_.take(); }
  TopError& top_error() { return top_error_; }
  /// Of a sample of the activations, where they are MXFP4.
  kernels::MxError& mx_error() { return mx_error_; }

 private:
  struct SiteInput {
    TensorView<const Bf16, 2> x;              // [n, D], or [n * K, F]
    Quantizer rule;                           // of x
    PackedView<const std::uint8_t> codes;     // of x, where the layer's activations are quantized
    PackedView<const std::uint8_t> residual;  // where there is a second pass
  };

  struct Dispatched {
    std::span<std::int32_t> offsets;  // [E + 1]
    std::span<std::int32_t> row_of;   // [items]
    std::span<std::int32_t> slot_of;  // [items] row * K + slot
  };

  void route(const Pass& pass, Layer layer, const LayerWeights& weights,
             TensorView<const Bf16, 2> x, Capture& capture);
  bool quantizes(Layer layer) const;
  bool fits_one_op(const Pass& pass, Layer layer, const LayerWeights& weights,
                   const Capture& capture) const;
  void one_op(const Pass& pass, Layer layer, const LayerWeights& weights,
              PackedView<const std::uint8_t> codes, Capture& capture, std::int32_t* bad,
              TensorView<Bf16, 2> out);
  PackedView<const std::uint8_t> quantize(const Pass& pass, Layer layer, Site site,
                                          TensorView<const Bf16, 2> x, Capture& capture);
  bool compensates(Layer layer, const LayerWeights& weights, Site site) const;
  PackedView<const std::uint8_t> residual(Layer layer, Site site, const SiteInput& input);
  void coded_product(const SiteInput& site, const kernels::W4a4Weights& weights,
                     std::span<const std::int32_t> from, TensorView<float, 2> y);
  void mx_product(const SiteInput& site, const PackedView<const std::uint8_t>& weights,
                  std::span<const std::int32_t> from, TensorView<float, 2> y);
  void mx_sum(const SiteInput& site, kernels::MxProductArgs args);
  void in_halves(
      const SiteInput& site, TensorView<float, 2> y,
      const std::function<void(const SiteInput& half, TensorView<float, 2> out)>& multiply);
  TensorView<const Bf16, 2> numbers(const SiteInput& site);
  void packed_product(const SiteInput& site, const kernels::W4a4Weights& weights,
                      std::span<const std::int32_t> from, TensorView<float, 2> y);
  void bf16_product(const SiteInput& site, const kernels::PackedMatrix& weights,
                    std::span<const std::int32_t> from, TensorView<float, 2> y);
  void product(const SiteInput& site, const LayerWeights& weights, bool down,
               std::span<const std::int32_t> from, TensorView<float, 2> y);

  TensorView<const std::int32_t, 1> index(std::span<const std::int32_t> values) const {
    return {values.data(), {std::ssize(values)}, {1}, at_->device};
  }

  Agreement agreement_;
  Options options_;
  Workplace* at_;
  ExpertObserver observer_;
  std::int64_t d_, f_, experts_, slots_;
  DeviceCounts counts_;
  TopError top_error_;
  kernels::MxError mx_error_;
  Buffer groups_;  // the contract's residual_groups

  // Of the pass that runs. Items are (row, slot) pairs in the order of their experts.
  Dispatched items_;
  Rows2d<float> logits_, gates_, up_, down_, half_, rest_, scores_, powers_;
  Rows2d<std::int32_t> chosen_, index_;
  Rows2d<Bf16> gathered_, w2_in_, dequantized_;
  CodeRows codes_, w2_codes_, residual_, halves_, residual_halves_;
};

}  // namespace lockstep::rollout
