#include "rollout/pass_view.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::rollout {
namespace {

/// Widths of tables, of which there are to be few: a graph is good for one.
std::int64_t rounded(std::int64_t pages) {
  constexpr std::int64_t kStep = 256;
  if (pages > kStep) return (pages + kStep - 1) / kStep * kStep;
  return std::max<std::int64_t>(
      16, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(pages))));
}

}  // namespace

PassUpload::PassUpload(Workplace& at, std::int32_t group)
    : at_(&at), most_rows_(kernels::rows_of_tile(group)), upload_(at) {}

PassView PassUpload::view(const Pass& pass, std::int32_t page_tokens) {
  streams_.resize(pass.keys.size());
  std::transform(pass.keys.begin(), pass.keys.end(), streams_.begin(),
                 [](const TokenKey& key) { return key.span.value; });
  upload_.begin();
  const std::size_t tokens = upload_.add(pass.tokens), positions = upload_.add(pass.positions),
                    sequence = upload_.add(pass.sequence), streams = upload_.add(streams_),
                    wanted = upload_.add(pass.wanted);
  PassView view;
  view.rows = pass.rows();
  if (!at_->on_cuda()) {
    view.where.pages = pass.pages;
    upload_.send();
  } else {
    lay_table(pass, page_tokens);
    lay_tiles(pass);
    const std::size_t table = upload_.add(table_), tiles = upload_.add(tiles_);
    upload_.send();
    view.where.table = {upload_.get<std::int32_t>(table).data(),
                        {std::ssize(pass.pages), width_},
                        {width_, 1},
                        at_->device};
    view.where.longest = static_cast<std::int32_t>(width_ * page_tokens);
    view.where.tiles = upload_.get<kernels::RowTile>(tiles);
  }
  view.tokens = upload_.get<Token>(tokens);
  view.positions = view.where.positions = upload_.get<std::int32_t>(positions);
  view.where.sequence = upload_.get<std::int32_t>(sequence);
  view.streams = upload_.get<std::uint64_t>(streams);
  view.wanted = upload_.get<std::int32_t>(wanted);
  return view;
}

/// Page tables side by side. Of a sequence at least as many pages as its rows reach.
void PassUpload::lay_table(const Pass& pass, std::int32_t page_tokens) {
  std::int64_t most = 1;
  for (std::size_t i = 0; i < pass.positions.size(); ++i) {
    const auto sequence = static_cast<std::size_t>(pass.sequence[i]);
    const bool known = pass.sequence[i] >= 0 && sequence < pass.pages.size();
    const std::int64_t held =
        known ? static_cast<std::int64_t>(pass.pages[sequence].size()) * page_tokens : 0;
    if (pass.positions[i] < 0 || pass.positions[i] >= held) {
      throw Error(cat({"forward: row ", i, " is at position ", pass.positions[i], " of sequence ",
                       pass.sequence[i], ", whose pages hold ", held, " tokens"}));
    }
    most = std::max<std::int64_t>(most, pass.positions[i] / page_tokens + 1);
  }
  width_ = rounded(most);
  table_.assign(pass.pages.size() * static_cast<std::size_t>(width_), 0);
  for (std::size_t s = 0; s < pass.pages.size(); ++s) {
    const auto count = std::min(pass.pages[s].size(), static_cast<std::size_t>(width_));
    std::copy_n(pass.pages[s].begin(), count,
                table_.begin() + static_cast<std::ptrdiff_t>(s) * width_);
  }
}

/// Rows of one sequence that follow each other, together; none where every row stands alone.
void PassUpload::lay_tiles(const Pass& pass) {
  tiles_.clear();
  bool alone = true;
  for (std::size_t i = 0; i < pass.positions.size(); ++i) {
    const bool joins = i > 0 && tiles_.back().rows < most_rows_ &&
                       pass.sequence[i] == pass.sequence[i - 1] &&
                       pass.positions[i] > pass.positions[i - 1];
    if (joins) {
      ++tiles_.back().rows;
      alone = false;
    } else {
      tiles_.push_back({static_cast<std::int32_t>(i), 1});
    }
  }
  if (alone) tiles_.clear();
}

}  // namespace lockstep::rollout
