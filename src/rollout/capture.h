#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/view.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "rollout/pass.h"

namespace lockstep::rollout {

/// Takes what a pass reveals to the TraceSink: routes and activation records while it runs. K and V
/// are read from the pages when a sequence is released.
class Capture {
 public:
  /// A null sink captures nothing.
  Capture(const Agreement& agreement, TraceSink* sink);
  ~Capture();

  /// The layout in which quantize() is to write the records of a site; kNone: none are wanted.
  RowLayout layout(Layer layer, Site site) const;

  /// `records` [n, layout.bytes()], one row a token of the pass; `codes` [n, ...] are what they
  /// were taken from, for the audit slice. Call once a layer and site, layout or not: audit tokens
  /// are kept wherever the contract quantizes.
  void activations(const Pass& pass, Layer layer, Site site,
                   TensorView<const std::uint8_t, 2> records, PackedView<const std::uint8_t> codes);

  /// `experts` [n, K], in the order of the router's choice.
  void routes(const Pass& pass, Layer layer, TensorView<const std::int32_t, 2> experts);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::rollout
