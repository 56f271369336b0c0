/// For .cu files alone: what is asked of each device once, not of the first one for all.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

namespace lockstep::cuda {

/// What `find` says, which is asked once for each device and each place in the code.
template <typename Find>
int once_a_device(std::int8_t index, Find find) {
  static std::array<std::once_flag, 128> asked;
  static std::array<int, 128> found{};
  const auto at = static_cast<std::size_t>(index);
  std::call_once(asked[at], [&] { found[at] = find(); });
  return found[at];
}

}  // namespace lockstep::cuda
