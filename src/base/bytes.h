/// Fields of on-disk formats, one by one, little-endian.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace lockstep {

template <std::unsigned_integral T>
void put_le(std::vector<std::byte>& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<std::byte>(value >> (8 * i) & 0xff));
  }
}

/// Requires offset + sizeof(T) <= bytes.size().
template <std::unsigned_integral T>
T get_le(std::span<const std::byte> bytes, std::size_t offset) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(static_cast<T>(bytes[offset + i]) << (8 * i)));
  }
  return value;
}

}  // namespace lockstep
