/// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): random
/// words that follow from a key and a counter alone, so that nothing has to be drawn in order.
#pragma once

#include <array>
#include <cstdint>

namespace lockstep {

using PhiloxWords = std::array<std::uint32_t, 4>;

constexpr PhiloxWords philox(std::uint64_t seed, PhiloxWords counter) {
  auto key0 = static_cast<std::uint32_t>(seed);
  auto key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

/// The counter of three numbers that name a draw; `c` fits 32 bits.
constexpr PhiloxWords philox_counter(std::uint64_t a, std::uint32_t b, std::uint32_t c) {
  return {static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32), b, c};
}

/// 53 random bits as a number in [0, 1).
constexpr double unit(std::uint32_t high, std::uint32_t low) {
  return static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
}

}  // namespace lockstep
