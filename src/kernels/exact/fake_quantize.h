/// Many weights at once from their BF16 numbers to what their codes are worth, without the codes:
/// a trainer's weights after each update.
#pragma once

#include <cstdint>

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

struct FakeQuantizeArgs {
  TensorView<Bf16, 3> x;          // [weights, rows, cols] in place, contiguous, finite
  Quantizer rule;                 // of a weight: each has a global scale of its own
  std::uint32_t* amax = nullptr;  // [weights] of scratch, where x lies
};

/// Whether fake_quantize() has a kernel for that: a CUDA device, NVFP4 under one power of two a
/// weight, whole blocks in a row, an address of 16 bytes.
bool fakes_at_once(const FakeQuantizeArgs& args);

/// Each weight becomes dequantize() of its quantize(), to the bit. Nobody waits, nothing is
/// allocated. Throws Error where there is no kernel.
void fake_quantize(const FakeQuantizeArgs& args, Stream stream);

/// Behind the checks.
void fake_quantize_cuda(const FakeQuantizeArgs& args, Stream stream);

}  // namespace lockstep::kernels
