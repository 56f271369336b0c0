#pragma once

#include <cstdint>
#include <vector>

#include "device/memory.h"
#include "rollout/pass.h"
#include "rollout/rows.h"

namespace lockstep::rollout {

/// Where a pass is looked at, in every layer in this order.
enum class Check : std::uint8_t { kQkv, kAttention, kW13In, kW2In, kExperts };
inline constexpr std::int32_t kChecks = 5;

/// What was not finite in a pass: for each check the first row, in the order of layers. On a CPU a
/// pass ends where it is found; on a CUDA device the rows are told at its end.
class PassChecks {
 public:
  /// `counts` numbers lie behind the cells and are brought with them.
  PassChecks(std::int32_t layers, Workplace& at, std::int64_t counts = 0);

  void begin(const Pass& pass);

  /// Where a check leaves its row, on the device; the logits' is an index among those wanted.
  std::int32_t* cell(std::int32_t layer, Check check) const {
    return cells_.as<std::int32_t>() + layer * kChecks + static_cast<std::int32_t>(check);
  }
  std::int32_t* logits() const { return cells_.as<std::int32_t>() + layers_ * kChecks; }

  /// On the device; begin() leaves them.
  std::int64_t* counts() const {
    return reinterpret_cast<std::int64_t*>(cells_.as<>() + counts_at());
  }
  /// As they were when settle() was called, and into their places.
  std::vector<std::int64_t> settled_counts() const;
  void put_counts(const std::vector<std::int64_t>& counts) const;

  /// On a CPU throws Error with layer and token where the cell has a row.
  void look(const std::int32_t* cell) const;

  /// Asks for all cells, which settle() then reads, once they are there: Error as look()'s.
  void fetch();
  void settle();

 private:
  [[noreturn]] void stop(std::int32_t cell, std::int32_t row) const;
  std::int64_t bytes() const { return (layers_ * kChecks + 1) * std::int64_t{4}; }
  std::int64_t counts_at() const { return (bytes() + 7) / 8 * 8; }
  std::int64_t all_bytes() const { return counts_at() + 8 * num_counts_; }

  std::int32_t layers_;
  std::int64_t num_counts_;
  Workplace* at_;
  Buffer cells_;
  PinnedBuffer fetched_;
  bool asked_ = false;
  // Of the pass.
  std::int32_t rows_ = 0;  // that somebody asks for
  std::vector<Token> tokens_;
  std::vector<TokenKey> keys_;
  std::vector<std::int32_t> wanted_;
};

}  // namespace lockstep::rollout
