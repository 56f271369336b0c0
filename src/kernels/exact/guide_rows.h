/// What stands behind guide(): elements at given scales, on a CPU. Inside kernels/exact/ only.
#pragma once

#include <cstdint>

#include "kernels/exact/isa.h"
#include "numerics/guided.h"

namespace lockstep::kernels {

/// How the code is chosen once the scale is known.
enum class Choice : std::uint8_t { kNearest, kBit, kCodeGuided, kCodeForced };

struct GuideElements {
  Choice choice = Choice::kNearest;
  const Bf16* x = nullptr;        // [groups * 16], finite
  Bf16* out = nullptr;            // may be x
  std::int64_t groups = 0;        // of sixteen elements
  const float* scales = nullptr;  // [groups] s8 * 2^n or 2^e, repeated where a block is longer
  const std::uint8_t* plane = nullptr;  // kBit: 2 bytes a group; kCode*: 8, or 16 of E4M3
};

/// Writes the guided values; returns how many codes differ from round-to-nearest.
using GuideKernel = std::int64_t (*)(const GuideElements&);

std::int64_t guide_elements_portable(const GuideElements& args);  // the definition
GuideKernel guide_elements(Isa isa);

/// The same of E4M3 elements; scales are powers of two, or 0.
std::int64_t guide_elements_e4m3(const GuideElements& args);

}  // namespace lockstep::kernels
