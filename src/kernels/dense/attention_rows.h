/// Between attention.cc and its backends: a tile of rows of one sequence against one KV head.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
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

/// 16 numbers; GCC makes of it what the function's target has.
using Float16 = float __attribute__((vector_size(64), aligned(4), may_alias));

/// A key block of one KV head, and the running softmax of the tile. One a thread.
struct AttentionScratch {
  std::vector<float> keys;    // [C, 64]
  std::vector<float> values;  // [64, C]
  std::vector<float> row;     // [C]
  std::vector<float> q;       // [tile rows, group, C]
  std::vector<float> sums;    // [tile rows, group, C]
  std::vector<float> top;     // [tile rows, group]
  std::vector<float> total;   // [tile rows, group]

  void fit(std::int64_t heads, std::int64_t dim) {
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    if (q.size() >= size(heads * dim) && row.size() >= size(dim) && top.size() >= size(heads))
      return;
    keys.assign(size(dim * kKeyBlock), 0.0f);
    values.assign(size(dim * kKeyBlock), 0.0f);
    row.assign(size(dim), 0.0f);
    q.assign(size(heads * dim), 0.0f);
    sums.assign(size(heads * dim), 0.0f);
    top.assign(size(heads), 0.0f);
    total.assign(size(heads), 0.0f);
  }
};

/// Calls visit(j, row) for keys first..first+count-1, j counting from 0.
template <typename Visit>
[[gnu::always_inline]] inline void each_row(const PagedKv& kv, std::span<const std::int32_t> pages,
                                            std::int32_t first, std::int32_t count, Visit visit) {
  std::int32_t page = first / kv.page_tokens;
  std::int32_t slot = first % kv.page_tokens;
  const std::byte* row = kv.row(pages, first);
  for (std::int32_t j = 0; j < count; ++j) {
    visit(j, row);
    row += kv.row_bytes;
    if (++slot < kv.page_tokens || j + 1 == count) continue;
    slot = 0;
    ++page;
    row = kv.pool +
          static_cast<std::int64_t>(pages[static_cast<std::size_t>(page)]) * kv.page_bytes +
          kv.offset;
  }
}

/// What codes are worth, two to a byte, and block scales times the cache's global scale.
struct KvTables {
  float pairs[256][2];
  float scales[256];

  explicit KvTables(std::int8_t exponent) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      pairs[byte][0] = to_float(static_cast<E2m1>(static_cast<std::uint8_t>(byte & 15)));
      pairs[byte][1] = to_float(static_cast<E2m1>(static_cast<std::uint8_t>(byte >> 4)));
      const auto scale = static_cast<E4m3>(static_cast<std::uint8_t>(byte & 127));
      scales[byte] = to_float(scale) * float_of(static_cast<std::uint32_t>(127 + exponent) << 23);
    }
  }
};

/// One head's part of a row as FP32: exactly what dequantize() gives.
[[gnu::always_inline]] inline void read_head(const PagedKv& kv, const KvTables& tables,
                                             const std::byte* row, std::int64_t head,
                                             std::int64_t dim, std::int64_t heads, float* out) {
  if (kv.rule.element == Element::kBf16) {
    const Bf16* x = reinterpret_cast<const Bf16*>(row) + head * dim;
    for (std::int64_t c = 0; c < dim; ++c) out[c] = to_float(x[c]);
    return;
  }
  const std::int64_t block = kv.rule.block;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(row) + head * dim / 2;
  const auto* scales =
      reinterpret_cast<const std::uint8_t*>(row) + heads * dim / 2 + head * dim / block;
  for (std::int64_t b = 0; b < dim / block; ++b) {
    const float scale = tables.scales[scales[b]];
    for (std::int64_t i = 0; i < block / 2; ++i) {
      const float* pair = tables.pairs[codes[b * block / 2 + i]];
      out[b * block + 2 * i] = pair[0] * scale;
      out[b * block + 2 * i + 1] = pair[1] * scale;
    }
  }
}

/// scores[j] = q . key j, a chain over the channels.
[[gnu::always_inline]] inline void score_keys(const float* q, const float* keys, std::int64_t dim,
                                              float* scores) {
  Float16 a{}, b{}, c{}, d{};
  for (std::int64_t i = 0; i < dim; ++i) {
    const auto* key = reinterpret_cast<const Float16*>(keys + i * kKeyBlock);
    a += q[i] * key[0];
    b += q[i] * key[1];
    c += q[i] * key[2];
    d += q[i] * key[3];
  }
  auto* out = reinterpret_cast<Float16*>(scores);
  out[0] = a;
  out[1] = b;
  out[2] = c;
  out[3] = d;
}

/// sums[c] = sums[c] * scale + p[0] * value 0 + p[1] * value 1 + ..., in that order.
[[gnu::always_inline]] inline void add_values(const float* p, const float* values,
                                              std::int32_t count, std::int64_t dim, float scale,
                                              float* sums) {
  std::int64_t c = 0;
  for (; c + 32 <= dim; c += 32) {
    auto* sum = reinterpret_cast<Float16*>(sums + c);
    Float16 a = sum[0] * scale, b = sum[1] * scale;
    for (std::int32_t j = 0; j < count; ++j) {
      const auto* value = reinterpret_cast<const Float16*>(values + j * dim + c);
      a += p[j] * value[0];
      b += p[j] * value[1];
    }
    sum[0] = a;
    sum[1] = b;
  }
  for (; c < dim; ++c) {
    float sum = sums[c] * scale;
    for (std::int32_t j = 0; j < count; ++j) sum += p[j] * values[j * dim + c];
    sums[c] = sum;
  }
}

/// One head of one row takes the block's first `count` keys in.
[[gnu::always_inline]] inline void take_block(const AttentionScratch& block, std::int32_t count,
                                              std::int64_t dim, const float* q, float* sums,
                                              float& top, float& total) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  alignas(64) float p[kKeyBlock];
  score_keys(q, block.keys.data(), dim, p);
  for (std::int32_t j = 0; j < kKeyBlock; ++j) {
    p[j] = j < count ? p[j] * scale : -std::numeric_limits<float>::infinity();
  }
  float lane[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) {
    lane[i] = p[i];
    for (std::int64_t j = i + kLanes; j < kKeyBlock; j += kLanes) {
      lane[i] = p[j] > lane[i] ? p[j] : lane[i];
    }
  }
  float now = top;
  for (const float x : lane) now = x > now ? x : now;
  for (float& x : p) x = exp_fp32(x - now);
  for (std::int64_t i = 0; i < kLanes; ++i) {
    lane[i] = p[i];
    for (std::int64_t j = i + kLanes; j < kKeyBlock; j += kLanes) lane[i] += p[j];
  }
  const float moved = exp_fp32(top - now);
  total = total * moved + sum_of_lanes(lane);
  add_values(p, block.values.data(), count, dim, moved, sums);
  top = now;
}

[[gnu::always_inline]] inline void attention_tile_body(const AttentionArgs& args,
                                                       const KvTables& k_tables,
                                                       const KvTables& v_tables,
                                                       const AttentionTile& tile,
                                                       AttentionScratch& scratch) {
  const std::int64_t dim = args.head_dim;
  const std::int64_t group = args.num_heads / args.num_kv_heads;
  const auto at = [&](std::int64_t row) { return static_cast<std::size_t>(tile.first_row + row); };
  const auto pages = args.rows.pages[static_cast<std::size_t>(args.rows.sequence[at(0)])];
  scratch.fit(tile.rows * group, dim);
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const Bf16* q =
        args.q.data + (tile.first_row + row) * args.q.stride[0] + tile.kv_head * group * dim;
    for (std::int64_t i = 0; i < group * dim; ++i) {
      scratch.q[static_cast<std::size_t>(row * group * dim + i)] = to_float(q[i]);
    }
  }
  std::fill_n(scratch.sums.begin(), tile.rows * group * dim, 0.0f);
  std::fill_n(scratch.top.begin(), tile.rows * group, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.total.begin(), tile.rows * group, 0.0f);

  const std::int32_t last = args.rows.positions[at(tile.rows - 1)];
  for (std::int32_t first = 0; first <= last; first += kKeyBlock) {
    const std::int32_t count = std::min(kKeyBlock, last + 1 - first);
    each_row(
        args.k, pages, first,
        count, [&](std::int32_t j, const std::byte* row) __attribute__((always_inline)) {
          read_head(args.k, k_tables, row, tile.kv_head, dim, args.num_kv_heads,
                    scratch.row.data());
          for (std::int64_t c = 0; c < dim; ++c) {
            scratch.keys[static_cast<std::size_t>(c * kKeyBlock + j)] =
                scratch.row[static_cast<std::size_t>(c)];
          }
        });
    each_row(
        args.v, pages, first,
        count, [&](std::int32_t j, const std::byte* row) __attribute__((always_inline)) {
          read_head(args.v, v_tables, row, tile.kv_head, dim, args.num_kv_heads,
                    scratch.values.data() + j * dim);
        });
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      const std::int32_t position = args.rows.positions[at(row)];
      if (position < first) continue;
      const std::int32_t seen = std::min(kKeyBlock, position + 1 - first);
      for (std::int64_t head = row * group; head < (row + 1) * group; ++head) {
        const auto h = static_cast<std::size_t>(head);
        take_block(scratch, seen, dim, scratch.q.data() + head * dim,
                   scratch.sums.data() + head * dim, scratch.top[h], scratch.total[h]);
      }
    }
  }
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    Bf16* out =
        args.out.data + (tile.first_row + row) * args.out.stride[0] + tile.kv_head * group * dim;
    for (std::int64_t head = 0; head < group; ++head) {
      const auto h = static_cast<std::size_t>(row * group + head);
      const float* sums = scratch.sums.data() + h * static_cast<std::size_t>(dim);
      for (std::int64_t c = 0; c < dim; ++c) {
        out[head * dim + c] = to_bf16(sums[c] / scratch.total[h]);
      }
    }
  }
}

void attention_portable(const AttentionArgs& args, const KvTables& k_tables,
                        const KvTables& v_tables, const AttentionTile& tile,
                        AttentionScratch& scratch);
void attention_avx2(const AttentionArgs& args, const KvTables& k_tables, const KvTables& v_tables,
                    const AttentionTile& tile, AttentionScratch& scratch);
void attention_avx512(const AttentionArgs& args, const KvTables& k_tables, const KvTables& v_tables,
                      const AttentionTile& tile, AttentionScratch& scratch);

}  // namespace lockstep::kernels
