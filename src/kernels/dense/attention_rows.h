/// Between attention.cc and its backends: a tile of rows of one sequence against one KV head, key
/// block by key block. The loops over a block are compiled for each ISA; what is around them is
/// not.
#pragma once

#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "kernels/dense/attention.h"
#include "kernels/dense/lanes.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace lockstep::kernels {

struct AttentionTile {
  std::int64_t first_row = 0;
  std::int64_t rows = 0;  // consecutive ones of one sequence, positions rising
  std::int32_t kv_head = 0;
};

/// What codes are worth, two to a byte, and block scales times the cache's global scale; or what
/// codes of E4M3, a byte each, are worth under the global scale.
struct KvTables {
  float pairs[256][2];
  float scales[256];
  float wide[256];

  explicit KvTables(const PagedKv& kv);
};

/// The rows of a key block that belong to one KV head, and where they go.
struct KvBlock {
  const PagedKv* kv;
  const KvTables* tables;
  std::span<const std::int32_t> pages;
  std::int32_t first;   // position
  std::int32_t count;   // <= kKeyBlock
  std::int64_t head;    // KV head
  std::int64_t heads;   // N
  std::int64_t dim;     // C
  std::int64_t stride;  // C rounded up to 16; what is past C is not written
  float* out;           // [count, stride] in the order of place_of()
};

/// The running softmax of one head of one row.
struct HeadState {
  const float* q;  // [stride], 0 past C
  float* sums;     // [stride]
  float top;       // the greatest score so far
  float total;     // of exp(score - top)
};

struct HeadBlock {
  const float* keys;    // [64, stride]
  const float* values;  // [64, stride]
  std::int32_t count;
  std::int64_t stride;
  float scale;  // 1 / sqrt(C)
};

/// The loops of one ISA. `load` puts a query in the order of place_of(), `store` gives a head's
/// result.
struct AttentionOps {
  void (*load)(const Bf16* q, std::int64_t dim, float* out);
  void (*store)(const HeadState& head, std::int64_t dim, Bf16* out);
  void (*read)(const KvBlock& block);
  void (*take)(const HeadBlock& block, HeadState& head);
};

AttentionOps attention_portable();
AttentionOps attention_avx2();
AttentionOps attention_avx512();

/// Goes over a block's rows, page by page.
class RowCursor {
 public:
  [[gnu::always_inline]] explicit RowCursor(const KvBlock& block)
      : block_(block),
        page_(block.first / block.kv->page_tokens),
        slot_(block.first % block.kv->page_tokens),
        row_(block.kv->row(block.pages, block.first)) {}

  [[gnu::always_inline]] const std::byte* row() const { return row_; }

  /// Not past the block's last row.
  [[gnu::always_inline]] void next() {
    const PagedKv& kv = *block_.kv;
    row_ += kv.row_bytes;
    if (++slot_ < kv.page_tokens) return;
    slot_ = 0;
    ++page_;
    row_ = kv.pool + kv.page_bytes * block_.pages[static_cast<std::size_t>(page_)] + kv.offset;
  }

 private:
  const KvBlock& block_;
  std::int32_t page_;
  std::int32_t slot_;
  const std::byte* row_;
};

/// Where channel c of a head of `dim` lies among its FP32 numbers: of each whole 32 channels the
/// even ones come first, so that the two codes of a byte, or the halves of a word of BF16, go to
/// the same lane of two vectors.
constexpr std::int64_t place_of(std::int64_t c, std::int64_t dim) {
  const std::int64_t first = c / 32 * 32;
  return first + 32 <= dim ? first + c % 2 * 16 + c % 32 / 2 : c;
}

/// Channels from..dim-1 of a head's codes as FP32: exactly what dequantize() gives.
[[gnu::always_inline]] inline void read_codes(const KvBlock& block, const std::byte* row,
                                              std::int64_t from, float* out) {
  const std::int64_t size = block.kv->rule.block;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row) + block.head * block.dim / 2;
  const auto* scales = reinterpret_cast<const std::uint8_t*>(row) + block.heads * block.dim / 2 +
                       block.head * block.dim / size;
  for (std::int64_t c = from; c < block.dim; c += 2) {
    const float* pair = block.tables->pairs[codes[c / 2]];
    const float scale = block.tables->scales[scales[c / size]];
    out[place_of(c, block.dim)] = pair[0] * scale;
    out[place_of(c + 1, block.dim)] = pair[1] * scale;
  }
}

[[gnu::always_inline]] inline void read_bf16(const KvBlock& block, const std::byte* row,
                                             std::int64_t from, float* out) {
  const Bf16* x = reinterpret_cast<const Bf16*>(row) + block.head * block.dim;
  for (std::int64_t c = from; c < block.dim; ++c) out[place_of(c, block.dim)] = to_float(x[c]);
}

[[gnu::always_inline]] inline void read_wide(const KvBlock& block, const std::byte* row,
                                             float* out) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row) + block.head * block.dim;
  for (std::int64_t c = 0; c < block.dim; ++c) {
    out[place_of(c, block.dim)] = block.tables->wide[codes[c]];
  }
}

[[gnu::always_inline]] inline void read_block(const KvBlock& block) {
  const bool plain = block.kv->rule.element == Element::kBf16;
  RowCursor cursor(block);
  for (std::int32_t j = 0; j < block.count; ++j) {
    if (j > 0) cursor.next();
    float* out = block.out + j * block.stride;
    if (plain) {
      read_bf16(block, cursor.row(), 0, out);
    } else if (block.kv->rule.is_wide()) {
      read_wide(block, cursor.row(), out);
    } else {
      read_codes(block, cursor.row(), 0, out);
    }
  }
}

[[gnu::always_inline]] inline void load_query(const Bf16* q, std::int64_t dim, float* out) {
  const std::int64_t whole = dim / 32 * 32;
  for (std::int64_t c = 0; c < whole; c += 32) split_pairs(q + c, out + c);
  for (std::int64_t c = whole; c < dim; ++c) out[c] = to_float(q[c]);
}

[[gnu::always_inline]] inline void store_head(const HeadState& head, std::int64_t dim, Bf16* out) {
  const std::int64_t whole = dim / 32 * 32;
  for (std::int64_t c = 0; c < dim; ++c) head.sums[c] /= head.total;
  for (std::int64_t c = 0; c < whole; c += 32) join_pairs(head.sums + c, out + c);
  for (std::int64_t c = whole; c < dim; ++c) out[c] = to_bf16(head.sums[c]);
}

/// q . key in 16 lanes, fused and in the order of place_of(); lanes are added by halves.
[[gnu::always_inline]] inline float score(const float* q, const float* key, std::int64_t stride) {
  float lane[kLanes] = {};
  for (std::int64_t c = 0; c < stride; c += kLanes) {
    for (std::int64_t i = 0; i < kLanes; ++i) lane[i] = std::fma(q[c + i], key[c + i], lane[i]);
  }
  return sum_of_lanes(lane);
}

/// Scores become probabilities under the running maximum; returns by what older sums shrink.
[[gnu::always_inline]] inline float softmax_block(const HeadBlock& block, HeadState& head,
                                                  float (&p)[kKeyBlock]) {
  for (std::int32_t j = 0; j < kKeyBlock; ++j) {
    p[j] = j < block.count ? p[j] * block.scale : -std::numeric_limits<float>::infinity();
  }
  float lane[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) {
    lane[i] = p[i];
    for (std::int64_t j = i + kLanes; j < kKeyBlock; j += kLanes) {
      lane[i] = p[j] > lane[i] ? p[j] : lane[i];
    }
  }
  float now = head.top;
  for (const float x : lane) now = x > now ? x : now;
  for (float& x : p) x = exp_fp32(x - now);
  for (std::int64_t i = 0; i < kLanes; ++i) {
    lane[i] = p[i];
    for (std::int64_t j = i + kLanes; j < kKeyBlock; j += kLanes) lane[i] += p[j];
  }
  const float shrink = exp_fp32(head.top - now);
  head.total = head.total * shrink + sum_of_lanes(lane);
  head.top = now;
  return shrink;
}

/// Key j goes to chain j mod 4; sums = sums * shrink + ((0 + 1) + (2 + 3)).
[[gnu::always_inline]] inline void add_values(const HeadBlock& block, const float* p, float shrink,
                                              float* sums) {
  for (std::int64_t c = 0; c < block.stride; c += kLanes) {
    float chain[4][kLanes] = {};
    for (std::int32_t j = 0; j < block.count; ++j) {
      const float* value = block.values + j * block.stride + c;
      float* sum = chain[j % 4];
      for (std::int64_t i = 0; i < kLanes; ++i) sum[i] = std::fma(p[j], value[i], sum[i]);
    }
    for (std::int64_t i = 0; i < kLanes; ++i) {
      const float added = (chain[0][i] + chain[1][i]) + (chain[2][i] + chain[3][i]);
      sums[c + i] = sums[c + i] * shrink + added;
    }
  }
}

[[gnu::always_inline]] inline void take_block(const HeadBlock& block, HeadState& head) {
  alignas(64) float p[kKeyBlock] = {};
  for (std::int32_t j = 0; j < block.count; ++j) {
    p[j] = score(head.q, block.keys + j * block.stride, block.stride);
  }
  const float shrink = softmax_block(block, head, p);
  add_values(block, p, shrink, head.sums);
}

}  // namespace lockstep::kernels
