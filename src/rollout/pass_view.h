#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/dense/attention.h"
#include "rollout/pass.h"
#include "rollout/upload.h"

namespace lockstep::rollout {

/// A pass as kernels see it: on a CUDA device all spans lie there.
struct PassView {
  std::int64_t rows = 0;
  std::span<const Token> tokens;
  std::span<const std::int32_t> positions;
  std::span<const std::uint64_t> streams;  // what names a row's noise beside its position
  std::span<const std::int32_t> wanted;
  kernels::PagedRows where;
};

/// Brings passes to the device, each in one copy.
class PassUpload {
 public:
  /// `group`: heads on a KV head.
  PassUpload(Workplace& at, std::int32_t group);

  /// Valid until the next call and while `pass` lives. Throws Error naming the row that has no
  /// page.
  PassView view(const Pass& pass, std::int32_t page_tokens);

 private:
  void lay_table(const Pass& pass, std::int32_t page_tokens);
  void lay_tiles(const Pass& pass);

  Workplace* at_;
  std::int32_t most_rows_;  // of a tile
  Upload upload_;
  std::vector<std::uint64_t> streams_;
  std::vector<std::int32_t> table_;
  std::int64_t width_ = 0;  // of the table
  std::vector<kernels::RowTile> tiles_;
};

}  // namespace lockstep::rollout
