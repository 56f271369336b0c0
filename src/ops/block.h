#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::ops {

/// Sequences of similar length, attended to as one padded block.
struct Block {
  std::int64_t longest = 0;
  std::vector<std::int64_t> start;   // the row of each sequence's first token
  std::vector<std::int64_t> length;  // its tokens
};

}  // namespace lockstep::ops
