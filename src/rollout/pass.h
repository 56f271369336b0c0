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

  // Rows behind these only fill the pass up to a size that comes often: nobody asks for what they
  // give. -1: there are none.
  std::int64_t real_rows = -1;

  std::int64_t rows() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t asked_rows() const { return real_rows < 0 ? rows() : real_rows; }
};

/// Fills a pass of one row a sequence, all wanted, up to a number of rows of which there are few:
/// work that was given once for so many (Graph) can then be given again. `table`: pages of the
/// sequence to which they belong, where they may write.
void fill_up(Pass& pass, std::span<const std::int32_t> table);

}  // namespace lockstep::rollout
