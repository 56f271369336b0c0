#include "rollout/pass.h"

#include <bit>

namespace lockstep::rollout {
namespace {

std::int64_t size_for(std::int64_t rows) {
  // Few rows choose few experts: one that fills up would have others read beside them.
  if (rows <= 8) return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows)));
  const std::int64_t step = rows <= 64 ? 8 : rows <= 256 ? 16 : 32;
  return (rows + step - 1) / step * step;
}

}  // namespace

void fill_up(Pass& pass, std::span<const std::int32_t> table) {
  pass.real_rows = pass.rows();
  const auto size = static_cast<std::size_t>(size_for(pass.rows()));
  const auto rows = static_cast<std::size_t>(pass.rows());
  if (pass.fresh.empty()) pass.fresh.assign(rows, 1);
  pass.fresh.resize(size, 0);
  pass.pages.push_back(table);
  for (std::size_t row = rows; row < size; ++row) {
    pass.wanted.push_back(static_cast<std::int32_t>(row));
    pass.tokens.push_back(0);
    pass.positions.push_back(0);
    pass.keys.push_back({});
    pass.sequence.push_back(static_cast<std::int32_t>(pass.pages.size()) - 1);
  }
  // As many tables as rows, and one: the number of sequences follows from that of rows too.
  pass.pages.resize(size + 1, table);
}

}  // namespace lockstep::rollout
