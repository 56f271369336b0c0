#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep {

/// CRC32C (Castagnoli) of `bytes`, continuing from `crc`, that of what came before.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc = 0);

}  // namespace lockstep
