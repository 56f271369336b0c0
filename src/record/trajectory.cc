#include "record/trajectory.h"

#include "base/philox.h"

namespace lockstep {

bool audited(std::uint64_t seed, TokenKey key, std::int32_t every) {
  if (every <= 0) return false;
  const auto position = static_cast<std::uint32_t>(key.position);
  return philox(seed, philox_counter(key.span.value, position, 0))[0] %
             static_cast<std::uint32_t>(every) ==
         0;
}

std::uint64_t hash_tokens(std::span<const Token> tokens, std::uint64_t before) {
  std::uint64_t hash = before;
  for (const Token token : tokens) {
    for (int shift = 0; shift < 32; shift += 8) {
      hash = (hash ^ (static_cast<std::uint32_t>(token) >> shift & 0xff)) * 0x100000001b3;
    }
  }
  return hash;
}

std::vector<TokenKey> keys(const Trajectory& trajectory) {
  std::vector<TokenKey> keys;
  for (const Span& span : trajectory.path) {
    for (std::int32_t i = 0; i < span.count; ++i) keys.push_back({span.id, span.first + i});
  }
  return keys;
}

}  // namespace lockstep
