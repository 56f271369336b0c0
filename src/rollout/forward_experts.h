/// The routed experts of a layer: router, dispatch, the two products, combination.
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
#include "rollout/top_error.h"
#include "rollout/weights.h"

namespace lockstep::rollout {

/// Rows of a matrix that grows and never shrinks.
template <typename T>
class Rows2d {
 public:
  TensorView<T, 2> view(std::int64_t rows, std::int64_t cols) {
    const auto size = static_cast<std::size_t>(rows * cols);
    if (values_.size() < size) values_.resize(size);
    return {values_.data(), {rows, cols}, {cols, 1}};
  }

 private:
  std::vector<T> values_;
};

/// Codes of as many rows as a pass has.
class CodeRows {
 public:
  PackedView<std::uint8_t> view(std::int64_t rows, std::int64_t cols, const Quantizer& rule) {
    const auto global = global_.view(rows, 1);
    const std::int64_t macros = rule.macro_cols(cols);
    return {codes_.view(rows, rule.code_bytes(cols)),
            scales_.view(rows, rule.scale_cols(cols)),
            {global.data, {rows}, {1}},
            macros > 0 ? mantissas_.view(rows, macros) : TensorView<std::uint8_t, 2>{}};
  }

 private:
  Rows2d<std::uint8_t> codes_, scales_, mantissas_;
  Rows2d<float> global_;
};

/// A row that is not finite, which ends the pass.
struct Nonfinite {
  std::int64_t row = -1;  // of the pass; -1: there is none
  const char* what = "";
};

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

class ForwardExperts {
 public:
  ForwardExperts(const Agreement& agreement, const Options& options);

  /// out = the combined output for `x` [n, D], BF16, normalized. Records go to `capture`.
  Nonfinite run(const Pass& pass, Layer layer, const LayerWeights& weights,
                TensorView<const Bf16, 2> x, Capture& capture, TensorView<Bf16, 2> out);

  /// Shows every site's inputs from now on: calibration.
  void observe(ExpertObserver observer) { observer_ = std::move(observer); }

  /// QuantizeCount of all activations so far.
  std::vector<std::int64_t>& counts() { return counts_; }
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

  void route(const Pass& pass, Layer layer, const LayerWeights& weights,
             TensorView<const Bf16, 2> x, Capture& capture);
  void dispatch(std::int64_t rows);
  bool quantizes(Layer layer) const;
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
  void bf16_product(const SiteInput& site, const kernels::PackedMatrix& weights,
                    std::span<const std::int32_t> from, TensorView<float, 2> y);
  void product(const SiteInput& site, const LayerWeights& weights, bool down,
               std::span<const std::int32_t> from, TensorView<float, 2> y);

  Agreement agreement_;
  Options options_;
  ExpertObserver observer_;
  std::int64_t d_, f_, experts_, slots_;
  std::vector<std::int64_t> counts_;
  TopError top_error_;
  kernels::MxError mx_error_;

  // Of the pass that runs. Items are (row, slot) pairs in the order of their experts.
  Rows2d<float> logits_, gates_, up_, down_, half_, rest_;
  Rows2d<std::int32_t> chosen_;
  std::vector<std::int32_t> offsets_;  // [E + 1]
  std::vector<std::int32_t> row_of_;   // [items]
  std::vector<std::int32_t> slot_of_;  // [items] row * K + slot
  Rows2d<Bf16> gathered_, w2_in_, dequantized_;
  CodeRows codes_, residual_, halves_, residual_halves_;
  Rows2d<std::uint8_t> records_;
};

}  // namespace lockstep::rollout
