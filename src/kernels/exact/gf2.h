/// Polynomials over GF(2) modulo CRC32C's own, in the order of bits in which a CRC has them: bit 31
/// is the coefficient of 1, bit 0 that of x^31.
///
/// A message's CRC register that began as 0 is a sum: the message's 32-bit words, little-endian,
/// each times x^32 and x once for every bit that follows it. So pieces may be taken in any order,
/// by anybody.
#pragma once

#include <cstdint>

namespace lockstep::kernels::gf2 {

inline constexpr std::uint32_t kModulus = 0x82F63B78u;  // less x^32
inline constexpr std::uint32_t kOne = 0x80000000u;

/// a x.
constexpr std::uint32_t times_x(std::uint32_t a) { return a >> 1 ^ ((a & 1u) != 0 ? kModulus : 0); }

constexpr std::uint32_t times(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int i = 31; i >= 0; --i) {
    if ((a >> i & 1u) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

/// x^n.
constexpr std::uint32_t power(std::uint64_t n) {
  std::uint32_t result = kOne;
  for (std::uint32_t square = kOne >> 1; n != 0; n >>= 1, square = times(square, square)) {
    if ((n & 1u) != 0) result = times(result, square);
  }
  return result;
}

/// The register after one more byte.
constexpr std::uint32_t after_byte(std::uint32_t state, std::uint32_t byte) {
  state ^= byte;
  for (int i = 0; i < 8; ++i) state = times_x(state);
  return state;
}

/// The CRC32C of `bytes` bytes that leave a register of 0 as `state`.
constexpr std::uint32_t crc_of(std::uint32_t state, std::uint64_t bytes) {
  return ~(state ^ times(~std::uint32_t{0}, power(8 * bytes)));
}

}  // namespace lockstep::kernels::gf2
