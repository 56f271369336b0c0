/// What quantization loses where it loses most: in the block of the token's largest scale. A global
/// scale that is a power of two leaves the top of E4M3's range unused, and all of that is paid
/// there (docs/formats/nvfp4.md), so the mean over all blocks would hide it.
#pragma once

#include <cstdint>

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::rollout {

class TopError {
 public:
  /// x [rows, cols] and its codes under `rule`; rules without E2M1 codes, or under a global scale
  /// that is no power of two, are passed over.
  void add(TensorView<const Bf16, 2> x, const Quantizer& rule,
           const PackedView<const std::uint8_t>& codes);

  /// Root of the sum of squared errors over that of squared values, since take() was last called;
  /// -1 where nothing was added.
  double take();

 private:
  double errors_ = 0;
  double values_ = 0;
};

}  // namespace lockstep::rollout
