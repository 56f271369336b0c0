#include "data/shuffle.h"

#include <bit>

#include "base/philox.h"

namespace lockstep::data {

std::int64_t shuffled(std::uint64_t key, std::int64_t i, std::int64_t n) {
  // A Feistel network on the least even number of bits that holds n, walked until it is below n.
  constexpr std::uint32_t kRounds = 4;
  const auto limit = static_cast<std::uint64_t>(n);
  const auto half = static_cast<int>(std::bit_width(limit - 1) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  auto value = static_cast<std::uint64_t>(i);
  do {
    std::uint64_t left = value >> half;
    std::uint64_t right = value & mask;
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = left ^ (philox(key, philox_counter(right, round, 0))[0] & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= limit);
  return static_cast<std::int64_t>(value);
}

}  // namespace lockstep::data
