#include "base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace lockstep {

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) {
  constexpr std::size_t kChunk = std::size_t{1} << 30;  // isa-l counts in int
  std::uint32_t state = ~crc;
  while (!bytes.empty()) {
    const std::size_t n = std::min(bytes.size(), kChunk);
    // isa-l takes a pointer to non-const and does not write through it.
    auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(bytes.data()));
    state = crc32_iscsi(data, static_cast<int>(n), state);
    bytes = bytes.subspan(n);
  }
  return ~state;
}

}  // namespace lockstep
