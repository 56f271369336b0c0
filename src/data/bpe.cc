#include "data/bpe.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>

namespace lockstep::data {
namespace {

// Up to here, looking at every pair anew is faster than a queue.
constexpr std::size_t kShort = 48;

std::uint64_t pair_key(Token left, Token right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

struct Candidate {
  std::uint32_t rank;
  std::size_t left;               // the position of the pair's left symbol
  Token left_token, right_token;  // as they were: a later merge may have taken them
  friend bool operator>(const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
  }
};

}  // namespace

bool Bpe::add_merge(Token left, Token right, Token merged) {
  const auto rank = static_cast<std::uint32_t>(merges_.size());
  return merges_.emplace(pair_key(left, right), Merge{rank, merged}).second;
}

const Bpe::Merge* Bpe::find(Token left, Token right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::encode(std::string_view piece, std::vector<Token>& out) const {
  if (!whole_.empty()) {
    if (const auto found = whole_.find(std::string(piece)); found != whole_.end()) {
      out.push_back(found->second);
      return;
    }
  }
  std::vector<Token> symbols;
  symbols.reserve(piece.size());
  for (char c : piece) symbols.push_back(bytes_[static_cast<unsigned char>(c)]);
  if (symbols.size() > kShort) return merge_long(std::move(symbols), out);

  while (symbols.size() > 1) {
    const Merge* best = nullptr;
    std::size_t at = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      const Merge* merge = find(symbols[i], symbols[i + 1]);
      if (merge && (!best || merge->rank < best->rank)) {
        best = merge;
        at = i;
      }
    }
    if (!best) break;
    symbols[at] = best->merged;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  out.insert(out.end(), symbols.begin(), symbols.end());
}

void Bpe::merge_long(std::vector<Token> symbols, std::vector<Token>& out) const {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  constexpr Token kGone = -1;
  const std::size_t n = symbols.size();
  std::vector<std::size_t> previous(n), next(n);
  for (std::size_t i = 0; i < n; ++i) {
    previous[i] = i == 0 ? kNone : i - 1;
    next[i] = i + 1 == n ? kNone : i + 1;
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto consider = [&](std::size_t left) {
    if (left == kNone || next[left] == kNone) return;
    const Token a = symbols[left];
    const Token b = symbols[next[left]];
    if (const Merge* merge = find(a, b)) queue.push({merge->rank, left, a, b});
  };
  for (std::size_t i = 0; i < n; ++i) consider(i);
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const std::size_t right = next[top.left];
    if (symbols[top.left] != top.left_token || right == kNone ||
        symbols[right] != top.right_token) {
      continue;
    }
    symbols[top.left] = find(top.left_token, top.right_token)->merged;
    symbols[right] = kGone;
    next[top.left] = next[right];
    if (next[right] != kNone) previous[next[right]] = top.left;
    consider(previous[top.left]);
    consider(top.left);
  }
  for (Token symbol : symbols) {
    if (symbol != kGone) out.push_back(symbol);
  }
}

}  // namespace lockstep::data
