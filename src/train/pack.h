/// How a batch is cut into passes. A pass holds whole trajectories one behind the other; a
/// trajectory of T tokens has rows 0..T-2, as many as it has records, for its last token is
/// predicted and never read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/block.h"
#include "record/trajectory.h"

namespace lockstep::train {

struct Pack {
  std::size_t first = 0;                 // trajectories [first, first + start.size()) of the batch
  std::vector<std::int64_t> start;       // [trajectories] the row of position 0
  std::vector<std::int32_t> token;       // [rows]
  std::vector<std::int32_t> position;    // [rows]
  std::vector<ops::Block> blocks;        // for attention; every row is in one of them
  std::vector<std::int64_t> scored_row;  // rows whose next token has response_mask 1
  std::vector<std::int64_t> scored_token;  // that next token
  std::vector<float> temperature;          // and its trajectory's
  std::int64_t top = 0;                    // k: the other tokens that a loss asks for at each
  std::vector<std::int64_t> top_token;     // [scored, k]

  // Rows that have a record's name, and the names: all rows of trajectories that have a path.
  std::vector<std::int64_t> key_row;
  std::vector<TokenKey> keys;

  std::int64_t rows() const { return static_cast<std::int64_t>(token.size()); }
};

struct PackLimits {
  std::int32_t tokens_per_pass = 8192;
  std::int32_t max_positions = 0;
  std::int32_t vocabulary = 0;
};

/// Cuts in the batch's order, so that the same batch is always cut alike.
/// Throws Error naming the trajectory where tokens are outside the vocabulary, a mask or a path has
/// another length than the tokens, or a sequence is longer than the model's positions.
std::vector<Pack> pack(std::span<const Trajectory> batch, const PackLimits& limits);

}  // namespace lockstep::train
