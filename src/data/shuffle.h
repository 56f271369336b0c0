/// A permutation of [0, n) without a table: what stands at i follows from the key and i alone.
#pragma once

#include <cstdint>

namespace lockstep::data {

/// The number at position i of the permutation that `key` names. Requires 0 <= i < n <= 2^62.
std::int64_t shuffled(std::uint64_t key, std::int64_t i, std::int64_t n);

}  // namespace lockstep::data
