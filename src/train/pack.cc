#include "train/pack.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"

namespace lockstep::train {
namespace {

std::int64_t rows_of(const Trajectory& trajectory) {
  return std::max<std::int64_t>(static_cast<std::int64_t>(trajectory.tokens.size()) - 1, 0);
}

std::string name_of(std::size_t i, const Trajectory& trajectory) {
  return "trajectory " + std::to_string(i) + " (prompt " + std::to_string(trajectory.prompt.value) +
         ", sample " + std::to_string(trajectory.sample) + ")";
}

void check(std::size_t i, const Trajectory& t, const PackLimits& limits) {
  if (rows_of(t) > limits.max_positions) {
    throw Error(name_of(i, t) + " has " + std::to_string(t.tokens.size()) +
                " tokens; the model has positions for " + std::to_string(limits.max_positions));
  }
  if (!t.response_mask.empty() && t.response_mask.size() != t.tokens.size()) {
    throw Error(name_of(i, t) + ": response_mask has " + std::to_string(t.response_mask.size()) +
                " entries for " + std::to_string(t.tokens.size()) + " tokens");
  }
  for (const std::vector<Token>* tokens : {&t.tokens, &t.top_tokens}) {
    for (const Token token : *tokens) {
      if (token < 0 || token >= limits.vocabulary) {
        throw Error(name_of(i, t) + ": token " + std::to_string(token) +
                    " is outside the vocabulary of " + std::to_string(limits.vocabulary));
      }
    }
  }
  if (!t.top_tokens.empty() && t.top_tokens.size() % t.tokens.size() != 0) {
    throw Error(name_of(i, t) + ": " + std::to_string(t.top_tokens.size()) + " top tokens for " +
                std::to_string(t.tokens.size()) + " tokens");
  }
  std::int64_t covered = 0;
  for (const Span& span : t.path) {
    if (span.first != covered) {
      throw Error(name_of(i, t) + ": its path has a gap at position " + std::to_string(covered));
    }
    covered += span.count;
  }
  // A record of the last token is harmless; a missing one would shift nothing, but is a fault.
  if (!t.path.empty() && covered != rows_of(t) && covered != rows_of(t) + 1) {
    throw Error(name_of(i, t) + ": its path covers " + std::to_string(covered) + " positions of " +
                std::to_string(t.tokens.size()) + " tokens; expected " +
                std::to_string(rows_of(t)));
  }
}

void append(Pack& pack, const Trajectory& t) {
  const std::int64_t start = pack.rows();
  const std::int64_t rows = rows_of(t);
  pack.start.push_back(start);
  for (std::int64_t p = 0; p < rows; ++p) {
    const auto at = static_cast<std::size_t>(p);
    pack.token.push_back(t.tokens[at]);
    pack.position.push_back(static_cast<std::int32_t>(p));
    if (t.response_mask.empty() || t.response_mask[at + 1] == 0) continue;
    pack.scored_row.push_back(start + p);
    pack.scored_token.push_back(t.tokens[at + 1]);
    pack.temperature.push_back(t.sampling.temperature);
    const auto top = t.top_tokens.begin() + static_cast<std::ptrdiff_t>((at + 1) * t.top_count());
    pack.top_token.insert(pack.top_token.end(), top,
                          top + static_cast<std::ptrdiff_t>(t.top_count()));
  }
  const std::vector<TokenKey> names = keys(t);
  for (std::int64_t p = 0; p < std::min(rows, static_cast<std::int64_t>(names.size())); ++p) {
    pack.key_row.push_back(start + p);
    pack.keys.push_back(names[static_cast<std::size_t>(p)]);
  }
}

/// Longest first; a block ends where padding would pass an eighth.
void block_by_length(Pack& pack, std::span<const Trajectory> members) {
  std::vector<std::size_t> order(members.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater{},
                           [&](std::size_t i) { return rows_of(members[i]); });
  for (const std::size_t i : order) {
    const std::int64_t length = rows_of(members[i]);
    if (length == 0) continue;
    const std::int64_t longest = pack.blocks.empty() ? 0 : pack.blocks.back().longest;
    if (longest == 0 || longest - length > std::max<std::int64_t>(longest / 8, 4)) {
      pack.blocks.emplace_back().longest = length;
    }
    pack.blocks.back().start.push_back(pack.start[i]);
    pack.blocks.back().length.push_back(length);
  }
}

}  // namespace

std::vector<Pack> pack(std::span<const Trajectory> batch, const PackLimits& limits) {
  std::vector<Pack> packs;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    check(i, batch[i], limits);
    const bool full =
        !packs.empty() && packs.back().rows() + rows_of(batch[i]) > limits.tokens_per_pass;
    if (packs.empty() || full) packs.emplace_back().first = i;
    if (batch[i].top_count() != batch[0].top_count()) {
      throw Error(name_of(i, batch[i]) + " has " + std::to_string(batch[i].top_count()) +
                  " top tokens a position, the batch's first " +
                  std::to_string(batch[0].top_count()));
    }
    packs.back().top = static_cast<std::int64_t>(batch[i].top_count());
    append(packs.back(), batch[i]);
  }
  for (Pack& pack : packs) block_by_length(pack, batch.subspan(pack.first, pack.start.size()));
  return packs;
}

}  // namespace lockstep::train
