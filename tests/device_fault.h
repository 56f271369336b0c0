#pragma once

#include <cstdint>

namespace lockstep::testing {

/// After so many milliseconds a kernel traps, beside whatever the device does then: all of the
/// process's work there fails from that moment on. Returns at once. Defined where there is a CUDA
/// compiler.
void plant_fault(std::int8_t index, double milliseconds);

}  // namespace lockstep::testing
