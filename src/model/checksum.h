/// What the two ends of a WeightSource and a WeightSink compare: CRC32C of a weight's values.
#pragma once

#include <cstdint>

#include "device/view.h"

namespace lockstep {

/// Of the rows, one after another.
std::uint32_t checksum(const TensorView<const Bf16, 2>& value);

/// Of the codes' rows, the scales' rows, the mantissas' rows, and the global scale of all rows: the
/// first there is, 1 where there is none. Little-endian.
std::uint32_t checksum(const PackedView<const std::uint8_t>& value);

/// The same of codes and scales whose CRC is known.
std::uint32_t checksum_with_global(std::uint32_t crc, float global);

}  // namespace lockstep
