/// Between capture.cc and its device: which rows of a pass are kept, and how they come to the sink.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/view.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "rollout/pass.h"

namespace lockstep::rollout {

/// Rows of a pass under their names.
struct KeptRows {
  std::vector<std::int32_t> rows{};
  std::vector<TokenKey> keys{};
  bool all = false;       // every row is kept that is asked for
  bool in_order = false;  // they were gathered: the i-th lies in the i-th row

  void clear() {
    rows.clear();
    keys.clear();
    all = in_order = false;
  }
  void add(std::int32_t row, TokenKey key) {
    rows.push_back(row);
    keys.push_back(key);
  }
  bool empty() const { return keys.empty(); }
  std::int64_t row(std::size_t i) const {
    return in_order ? static_cast<std::int64_t>(i) : rows[i];
  }
};

/// Puts rows that lie in host memory into the sink: all that came since the last hand_on().
class RowWriter {
 public:
  RowWriter(const Agreement& agreement, TraceSink* sink) : agreement_(&agreement), sink_(sink) {}

  /// Of the rows of `from`, those that are kept. It stays as it is until hand_on().
  void records(const KeptRows& kept, Place place, const RowLayout& layout,
               TensorView<const std::uint8_t, 2> from);
  /// kCodes from the codes of a token's `slots` rows that follow each other.
  void audits(const KeptRows& audited, Place place, const PackedView<const std::uint8_t>& from,
              std::int64_t slots);
  void numbers(const KeptRows& kept, Place place, TensorView<const Bf16, 2> from);
  /// Throws Error where they are not K different experts.
  void routes(const KeptRows& kept, Place place, TensorView<const std::int32_t, 2> from);

  /// With the keys of what came. Where it throws, or one of the others did, the rest is forgotten.
  void hand_on(std::span<const TokenKey> kept, std::span<const TokenKey> audited);
  void forget();

 private:
  std::span<std::byte> room(std::size_t rows, std::int32_t row_bytes);

  const Agreement* agreement_;
  TraceSink* sink_;
  std::vector<Rows<const std::byte>> kept_, audits_;
  std::vector<std::vector<std::byte>> rooms_;  // of places whose rows do not lie as they are kept
  std::size_t used_ = 0;
};

}  // namespace lockstep::rollout
