#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "record/trajectory.h"

namespace lockstep::rollout {

/// One pass through the model: rows of many sequences, prefill chunks and decode steps alike. No
/// row's result depends on another sequence's rows, nor on how a prompt was cut into chunks.
struct Pass {
  std::vector<Token> tokens;            // [n]
  std::vector<std::int32_t> positions;  // [n]
  std::vector<TokenKey> keys;           // [n] under which records are kept and noise is drawn
  std::vector<std::int32_t> sequence;   // [n] row -> its sequence in `pages`
  std::vector<std::span<const std::int32_t>> pages;  // [sequences] page table, by position
  std::vector<std::int32_t> wanted;                  // rows whose logits are computed, ascending

  // [n] 0 where an earlier pass already left the row's records and only K and V are wanted again;
  // empty: all rows are new. For Capture alone: it changes nothing that is computed.
  std::vector<std::uint8_t> fresh;

  std::int64_t rows() const { return static_cast<std::int64_t>(tokens.size()); }
};

}  // namespace lockstep::rollout
