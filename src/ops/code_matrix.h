#pragma once

#include "kernels/exact/w4a4.h"

namespace lockstep::ops {

/// One matrix of every expert as codes, in the layout that its exact product reads: NVFP4's or
/// MXFP4's.
struct CodeMatrix {
  kernels::W4a4Weights nvfp4{};
  PackedView<std::uint8_t> mxfp4{};  // codes and scales [experts * out, ...]
  std::int32_t experts = 0;
  std::int32_t out = 0;

  bool empty() const { return experts == 0; }
};

}  // namespace lockstep::ops
