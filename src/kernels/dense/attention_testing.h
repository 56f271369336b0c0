/// Attention problems for the tests: sequences, their rows, and caches that hold them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/dense/attention.h"
#include "kernels/dense/check.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {

inline constexpr Quantizer kNvfp4 = {.element = Element::kE2m1,
                                     .scale = ScaleFormat::kE4m3,
                                     .global = GlobalScale::kStatic,
                                     .global_is_power_of_two = true};

/// K or V of some sequences in pages that lie in no order.
struct Cache {
  std::vector<std::byte> pool;
  PagedKv kv;
  std::vector<std::vector<std::int32_t>> tables;
  std::vector<std::span<const std::int32_t>> spans;

  Cache(const Quantizer& rule, std::int32_t width, std::int32_t page_tokens,
        const std::vector<std::int32_t>& lengths, bool aligned = false) {
    kv.rule = rule;
    kv.exponent = rule.is_mx() ? std::int8_t{0} : std::int8_t{-7};
    kv.page_tokens = page_tokens;
    kv.row_bytes = static_cast<std::int32_t>(
        rule.quantizes() ? rule.code_bytes(width) + rule.scale_cols(width) : 2 * width);
    kv.offset = aligned ? 64 : 40;
    kv.page_bytes = kv.offset + page_tokens * kv.row_bytes + 8;
    if (aligned) kv.page_bytes = (kv.page_bytes + 15) / 16 * 16;
    std::int32_t pages = 0;
    for (const std::int32_t length : lengths) pages += (length + page_tokens - 1) / page_tokens;
    pool.assign(static_cast<std::size_t>(pages * kv.page_bytes), std::byte{0xFF});
    kv.pool = pool.data();
    for (const std::int32_t length : lengths) {
      tables.emplace_back();
      for (std::int32_t held = 0; held < length; held += page_tokens) {
        tables.back().push_back(--pages);
      }
    }
    for (const auto& table : tables) spans.emplace_back(table);
  }
};

struct Rows {
  std::vector<std::int32_t> positions, sequence;

  /// All positions of sequences of these lengths, one sequence after another.
  explicit Rows(const std::vector<std::int32_t>& lengths) {
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      for (std::int32_t p = 0; p < lengths[s]; ++p) {
        positions.push_back(p);
        sequence.push_back(static_cast<std::int32_t>(s));
      }
    }
  }
  PagedRows in(const Cache& cache) const { return {positions, sequence, cache.spans}; }
  std::int64_t count() const { return static_cast<std::int64_t>(positions.size()); }
};

struct Shape {
  std::int32_t heads, kv_heads, dim;
};

struct Problem {
  Shape shape;
  std::vector<std::int32_t> lengths;
  Rows rows;
  std::vector<Bf16> q, k, v;

  Problem(Shape s, std::vector<std::int32_t> l) : shape(s), lengths(std::move(l)), rows(lengths) {
    q = random_bf16(rows.count() * shape.heads * shape.dim, 1);
    k = random_bf16(rows.count() * kv_width(), 2);
    v = random_bf16(rows.count() * kv_width(), 3);
  }
  std::int32_t kv_width() const { return shape.kv_heads * shape.dim; }

  void write(Cache& to_k, Cache& to_v) const {
    write_kv(
        {.x = rows_of(k.data(), rows.count(), kv_width()), .kv = to_k.kv, .rows = rows.in(to_k)},
        {});
    write_kv(
        {.x = rows_of(v.data(), rows.count(), kv_width()), .kv = to_v.kv, .rows = rows.in(to_v)},
        {});
  }

  /// Rows first..first+count-1 as one call.
  std::vector<Bf16> attend(const Cache& k_cache, const Cache& v_cache, std::int64_t first,
                           std::int64_t count) const {
    const std::int64_t width = shape.heads * shape.dim;
    std::vector<Bf16> out(static_cast<std::size_t>(count * width));
    const auto part = [&](const std::vector<std::int32_t>& of) {
      return std::span(of).subspan(static_cast<std::size_t>(first),
                                   static_cast<std::size_t>(count));
    };
    attention({.q = rows_of(q.data() + first * width, count, width),
               .k = k_cache.kv,
               .v = v_cache.kv,
               .rows = {part(rows.positions), part(rows.sequence), k_cache.spans},
               .num_heads = shape.heads,
               .num_kv_heads = shape.kv_heads,
               .head_dim = shape.dim,
               .out = rows_of(out.data(), count, width)},
              {});
    return out;
  }
};

/// The errors of docs/tolerances.md: of a score, relative to the sum of its products' magnitudes;
/// of a probability, relative to itself, but for the number of keys n; and for each of n.
struct AttentionErrors {
  double score, weight, key;
};

inline AttentionErrors cpu_errors(std::int32_t dim) {
  return {(2.0 * dim + 4) * 0x1p-24, 20 * 0x1p-23, 2 * 0x1p-23};
}

/// One head of one row in double, with the bound of docs/tolerances.md.
inline void check_head(const Problem& p, std::int64_t row, std::int32_t head,
                       const std::vector<Bf16>& out, const AttentionErrors& errors) {
  const std::int64_t dim = p.shape.dim;
  const std::int32_t kv_head = head / (p.shape.heads / p.shape.kv_heads);
  const std::int64_t start = row - p.rows.positions[static_cast<std::size_t>(row)];
  const auto at = [&](const std::vector<Bf16>& x, std::int64_t index) {
    return static_cast<double>(to_float(x[static_cast<std::size_t>(index)]));
  };
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  std::vector<double> score;
  double score_error = 0;
  for (std::int64_t j = start; j <= row; ++j) {
    double sum = 0, size = 0;
    for (std::int64_t c = 0; c < dim; ++c) {
      const double term = at(p.q, (row * p.shape.heads + head) * dim + c) *
                          at(p.k, (j * p.shape.kv_heads + kv_head) * dim + c);
      sum += term;
      size += std::abs(term);
    }
    score.push_back(sum * scale);
    score_error = std::max(score_error, errors.score * size * scale);
  }
  const double top = *std::max_element(score.begin(), score.end());
  double total = 0;
  for (double& s : score) total += s = std::exp(s - top);
  const auto keys = static_cast<double>(score.size());
  for (std::int64_t c = 0; c < dim; ++c) {
    double exact = 0, size = 0;
    for (std::size_t j = 0; j < score.size(); ++j) {
      const double value =
          at(p.v, ((start + static_cast<std::int64_t>(j)) * p.shape.kv_heads + kv_head) * dim + c);
      exact += score[j] / total * value;
      size += score[j] / total * std::abs(value);
    }
    const double bound =
        (2 * score_error + keys * errors.key + errors.weight) * (size + std::abs(exact)) +
        0x1p-8 * std::abs(exact);
    const double got = at(out, (row * p.shape.heads + head) * dim + c);
    ASSERT_LE(std::abs(got - exact), bound) << "row " << row << " head " << head << " c " << c;
  }
}

}  // namespace lockstep::kernels
