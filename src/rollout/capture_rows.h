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
  bool all = false;  // every row is kept that is asked for

  void clear() { *this = {}; }
  void add(std::int32_t row, TokenKey key) {
    rows.push_back(row);
    keys.push_back(key);
  }
  bool empty() const { return keys.empty(); }
};

/// Puts rows that lie in host memory into the sink.
class RowWriter {
 public:
  RowWriter(const Agreement& agreement, TraceSink* sink) : agreement_(&agreement), sink_(sink) {}

  TraceSink* sink() const { return sink_; }

  /// Of the rows of `from`, those that are kept.
  void records(const KeptRows& kept, Place place, const RowLayout& layout,
               TensorView<const std::uint8_t, 2> from);
  /// kCodes from the codes of a token's `slots` rows that follow each other.
  void audits(const KeptRows& kept, Place place, const PackedView<const std::uint8_t>& from,
              std::int64_t slots);
  void numbers(const KeptRows& kept, Place place, TensorView<const Bf16, 2> from);
  /// Throws Error where they are not K different experts.
  void routes(const KeptRows& kept, Place place, TensorView<const std::int32_t, 2> from);

  std::span<std::byte> room(std::size_t rows, std::int32_t row_bytes) {
    buffer_.resize(rows * static_cast<std::size_t>(row_bytes));
    return buffer_;
  }

 private:
  const Agreement* agreement_;
  TraceSink* sink_;
  std::vector<std::byte> buffer_;
};

}  // namespace lockstep::rollout
