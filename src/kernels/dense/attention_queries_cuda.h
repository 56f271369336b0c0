/// For .cu files alone: what a warp holds of its queries: operands, running softmax, sums.
#pragma once

#include <cstdint>

#include "kernels/dense/attention_block_cuda.h"

namespace lockstep::kernels {

inline constexpr unsigned kAll = 0xFFFFFFFFu;

/// Scores are base-2 logarithms. The maximum that probabilities are relative to moves when it is
/// exceeded by more than this, so that sums seldom have to be scaled.
inline constexpr float kSlack = 8.0f;

/// Of the thread in its warp, read once: a compiler that knows what it is reads it again and again.
__device__ inline int own_lane() {
  int id = 0;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(id));
  return id;
}

__device__ inline float minus_infinity() { return float_of(0xFF800000u); }

__device__ inline float exp2_of(float x) {
  float y = 0.0f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// By what sums under `top` are multiplied to be under `now`, which is not less.
__device__ inline float shrink(float top, float now) {
  return top == minus_infinity() ? 0.0f : exp2_of(top - now);
}

/// Sums of some keys under the greatest score; those of later keys are folded into those of earlier
/// ones by this alone, wherever it happens.
__device__ inline float fold(float sum, float factor, float more, float more_factor) {
  return __fmaf_rn(more, more_factor, __fmul_rn(sum, factor));
}

/// Where a warp keeps sums of its queries in shared memory: each thread has its own.
struct KeptSums {
  float* sums;   // 32 apart
  float2* rows;  // the greatest score and the total of each query
};

/// A warp's queries against one KV head: kGroups times 8 of them, a row's heads side by side.
template <KvFormat kFormat, int kDim, int kGroups>
class Queries {
 public:
  static constexpr int kSteps = kDim / 16;
  static constexpr int kOwn = kSteps / 2;  // of the sums' steps, one half of a split has these
  static constexpr int kKeys = keys_at_once(kFormat);
  static constexpr int kTiles = kKeys / 8;
  static constexpr bool kFp16 = kRunsInFp16<kFormat>;
  template <int kCount>
  using Sums = float[kGroups][kCount][4];

  /// Eight queries are kept in shared memory, where registers are few.
  static constexpr bool kKeepsShared = kGroups == 1;

  /// Queries first.. of the tile's.
  __device__ Queries(const AttentionParams& p, const RowTile& tile, int kv_head, int first,
                     unsigned char* shared = nullptr)
      : p_(p),
        tile_(tile),
        kv_head_(kv_head),
        first_(first),
        lane_(own_lane()),
        shared_(address_of(shared)) {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) load(h, shared);
    __syncwarp();
  }

  /// The same queries: what the compiler knew of their place may be forgotten until here.
  __device__ void place(const RowTile& tile, int kv_head, int first) {
    tile_ = tile;
    kv_head_ = kv_head;
    first_ = first;
  }
  __device__ int lane() const { return lane_; }
  __device__ bool any() const { return exists(0); }

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top_[h][c] = minus_infinity();
        total_[h][c] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums_[h][i][j] = 0.0f;
      }
    }
  }

  /// `seen`: how many of the keys a query sees, or more than there are. `turns` is told when keys
  /// and values have been read, and waits for the latter.
  template <typename Block, typename Seen, typename Turns>
  __device__ void take(const Block& block, const Seen& seen, const Turns& turns) {
    Scores s;
    scores(block, s);
    turns.leave_keys();
    softmax(seen, s);
    turns.wait_for_values();
    add_values(block, s, turns);
  }

  /// Of the keys from position `first` on.
  __device__ int seen_from(int first, int query) const {
    return exists(query) ? p_.positions[row(query)] + 1 - first : 0;
  }

  /// What is left of the totals of threads that share a query.
  __device__ void finish_totals() {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int x = 4; x < 32; x *= 2) total_[h][c] += __shfl_xor_sync(kAll, total_[h][c], x);
      }
    }
  }

  /// Bytes for kCount steps of a warp's sums.
  template <int kCount>
  static constexpr int kKeptBytes = kGroups*(kCount * 4 * 32 * 4 + 8 * 8);
  template <int kCount>
  static __device__ KeptSums kept_at(unsigned char* at) {
    return {reinterpret_cast<float*>(at),
            reinterpret_cast<float2*>(at + kGroups * kCount * 4 * 32 * 4)};
  }

  /// Steps from.. of the sums.
  template <int kCount>
  __device__ void keep(const KeptSums& to, int from) const {
    float4* const sums = reinterpret_cast<float4*>(to.sums) + lane_;
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto& x = sums_[h][i + from];
        sums[32 * (h * kCount + i)] = make_float4(x[0], x[1], x[2], x[3]);
      }
      *rows_of(to, h) = make_float4(top_[h][0], total_[h][0], top_[h][1], total_[h][1]);
    }
  }

  /// This warp's half and one that was kept become their split.
  template <int kHalf, int kCount>
  __device__ void join(const KeptSums& kept, Sums<kCount>& split) {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      const float4 both = *rows_of(kept, h);
      const float tops[2] = {both.x, both.z}, totals[2] = {both.y, both.w};
      float by[2], others_by[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float now = fmaxf(top_[h][c], tops[c]);
        by[c] = shrink(top_[h][c], now);
        others_by[c] = shrink(tops[c], now);
        total_[h][c] = in_order<kHalf>(total_[h][c], by[c], totals[c], others_by[c]);
        top_[h][c] = now;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float4 y = reinterpret_cast<const float4*>(kept.sums)[32 * (h * kCount + i) + lane_];
        const float more[4] = {y.x, y.y, y.z, y.w};
        const auto& x = sums_[h][kCount == kSteps ? i : i + kHalf * kOwn];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          split[h][i][j] = in_order<kHalf>(x[j], by[j & 1], more[j], others_by[j & 1]);
        }
      }
    }
  }

  /// A split where the combining kernel finds it.
  __device__ void store_split(int split, int half, const Sums<kOwn>& own) const {
    const int g = lane_ >> 2;
    const int t = lane_ & 3;
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int query = 8 * h + 2 * t + odd;
        if (!exists(query)) continue;
        if (half == 0 && g == 0) {
          float* const tops = p_.tops + 2 * slot(query, split);
          tops[0] = top_[h][odd];
          tops[1] = total_[h][odd];
        }
        float* const to = p_.sums + slot(query, split) * kDim + g * (kDim / 8) + 2 * kOwn * half;
#pragma unroll
        for (int i = 0; i < kOwn; i += 2) {
          const auto& x = own[h][i];
          if constexpr (kOwn == 1) {
            *reinterpret_cast<float2*>(to) = make_float2(x[odd], x[2 + odd]);
          } else {
            const auto& y = own[h][i + 1];
            *reinterpret_cast<float4*>(to + 2 * i) =
                make_float4(x[odd], x[2 + odd], y[odd], y[2 + odd]);
          }
        }
      }
    }
  }

  /// This warp's half of a split whose other half has no keys.
  __device__ void own_half(Sums<kSteps>& split) const {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) split[h][i][j] = sums_[h][i][j];
      }
    }
  }

  /// Folds kCount steps of a split into `totals`.
  template <int kCount>
  __device__ void fold_split(bool is_first, const KeptSums& totals,
                             const Sums<kCount>& split) const {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      float4* const rows = rows_of(totals, h);
      const float4 both = *rows;
      const float tops[2] = {is_first ? minus_infinity() : both.x,
                             is_first ? minus_infinity() : both.z};
      const float before[2] = {is_first ? 0.0f : both.y, is_first ? 0.0f : both.w};
      float a[2], b[2], now[2], total[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        now[c] = fmaxf(tops[c], top_[h][c]);
        a[c] = shrink(tops[c], now[c]);
        b[c] = shrink(top_[h][c], now[c]);
        total[c] = fold(before[c], a[c], total_[h][c], b[c]);
      }
      __syncwarp();  // all threads of the columns have read it
      *rows = make_float4(now[0], total[0], now[1], total[1]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float* const sum = totals.sums + 32 * ((h * kCount + i) * 4 + j) + lane_;
          *sum = fold(is_first ? 0.0f : *sum, a[j & 1], split[h][i][j], b[j & 1]);
        }
      }
    }
    __syncwarp();
  }

  /// The results of kCount steps from `from` on.
  template <int kCount>
  __device__ void store_folded(const KeptSums& totals, int from) const {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      const float4 both = *rows_of(totals, h);
      const float total[2] = {both.y, both.w};
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int query = 8 * h + 2 * (lane_ & 3) + odd;
        if (!exists(query)) continue;
        Bf16* const to = p_.out + row(query) * p_.out_stride + head(query) * kDim +
                         (lane_ >> 2) * (kDim / 8) + 2 * from;
#pragma unroll
        for (int i = 0; i < 2 * kCount; ++i) {
          const float sum = totals.sums[32 * ((h * kCount + i / 2) * 4 + i % 2 * 2 + odd) + lane_];
          to[i] = to_bf16(__fdiv_rn(__fmul_rn(sum, p_.value_scale), total[odd]));
        }
      }
    }
  }

 private:
  /// Of 16 keys each: of the thread row's in the first 8 the thread's two queries, then of that in
  /// the others.
  using Scores = float[kTiles / 2][kGroups][4];

  /// Tops and totals of the thread's two queries of a group.
  __device__ float4* rows_of(const KeptSums& kept, int h) const {
    return reinterpret_cast<float4*>(kept.rows + 8 * h + 2 * (lane_ & 3));
  }
  /// The row and the head of a query; no row where there is no such query.
  __device__ bool exists(int query) const { return first_ + query < tile_.rows * p_.group; }
  __device__ std::int64_t row(int query) const { return tile_.first + (first_ + query) / p_.group; }
  __device__ int head(int query) const { return kv_head_ * p_.group + (first_ + query) % p_.group; }
  __device__ std::int64_t slot(int query, int split) const {
    return (row(query) * p_.heads + head(query)) * p_.splits + split;
  }
  /// The earlier keys' part before that of the later ones.
  template <int kHalf>
  static __device__ float in_order(float mine, float by, float others, float others_by) {
    return kHalf == 0 ? fold(mine, by, others, others_by) : fold(others, others_by, mine, by);
  }
  /// From the threads that have a number of a query as a row to those that have it as a column.
  __device__ void of_columns(float x, float (&column)[2]) const {
    column[0] = __shfl_sync(kAll, x, 8 * (lane_ & 3));
    column[1] = __shfl_sync(kAll, x, 8 * (lane_ & 3) + 4);
  }

  /// Queries of thread row g of group h: operands and the factor of their scores.
  __device__ void load(int h, unsigned char* shared) {
    const int query = 8 * h + (lane_ >> 2);
    const bool there = exists(query);
    const Bf16* const q =
        there ? p_.q + row(query) * p_.q_stride + head(query) * std::int64_t{kDim} : nullptr;
    float most = 0.0f;
    std::uint32_t words[kSteps / 2][4];  // 8 channels that follow each other, of two steps
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      const int channel = first_query_channel<kFormat, kDim>(lane_ & 3, j);
      const uint4 x = there ? *reinterpret_cast<const uint4*>(q + channel) : make_uint4(0, 0, 0, 0);
      words[j][0] = x.x;
      words[j][1] = x.y;
      words[j][2] = x.z;
      words[j][3] = x.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        most = fmaxf(most, fmaxf(fabsf(low_bf16(words[j][i])), fabsf(high_bf16(words[j][i]))));
      }
    }
    float factor = p_.score_scale;
    float up = 1.0f;
    if constexpr (kFp16) {  // the greatest comes to 2^14, so that FP16 loses nothing that counts
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      int shift = 14 + 127 - static_cast<int>(float_bits(most) >> 23);
      shift = most == 0.0f ? 0 : max(-100, min(100, shift));
      up = float_of(static_cast<std::uint32_t>(127 + shift) << 23);
      factor *= float_of(static_cast<std::uint32_t>(127 - shift) << 23);
    }
    of_columns(factor, factor_[h]);
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      std::uint32_t two[2][2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int reg = 0; reg < 2; ++reg) {
          const int low = query_channel<kFormat>(odd, reg, 0);
          const int high = query_channel<kFormat>(odd, reg, 1);
          two[odd][reg] =
              round_pair<kFp16>(channel_of(words[j], low) * up, channel_of(words[j], high) * up);
        }
      }
      if constexpr (kKeepsShared) {
        reinterpret_cast<uint4*>(shared)[32 * j + lane_] =
            make_uint4(two[0][0], two[0][1], two[1][0], two[1][1]);
      } else {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          q_[h][2 * j + odd][0] = two[odd][0];
          q_[h][2 * j + odd][1] = two[odd][1];
        }
      }
    }
  }

  /// The operands of group h for steps 2 j and 2 j + 1.
  __device__ void queries(int h, int j, std::uint32_t (&q)[2][2]) const {
    if constexpr (kKeepsShared) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(q[0][0]), "=r"(q[0][1]), "=r"(q[1][0]), "=r"(q[1][1])
                   : "r"(shared_ + 512 * j + 16 * lane_)
                   : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int reg = 0; reg < 2; ++reg) q[i][reg] = q_[h][2 * j + i][reg];
      }
    }
  }

  /// Even and odd steps apart. A product's rows are 16 keys, its columns 8 queries.
  template <typename Block>
  __device__ void scores(const Block& block, Scores& s) const {
#pragma unroll
    for (int u = 0; u < kTiles / 2; ++u) {
      const auto low = block.key(2 * u);
      const auto high = block.key(2 * u + 1);
      float d[kGroups][2][4] = {};
#pragma unroll
      for (int j = 0; j < kSteps / 2; ++j) {
        std::uint32_t a[2][2], b[2][2];
        low.part(j, a);
        high.part(j, b);
#pragma unroll
        for (int h = 0; h < kGroups; ++h) {
          std::uint32_t q[2][2];
          queries(h, j, q);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply_add<kFp16>(d[h][i], a[i][0], b[i][0], a[i][1], b[i][1], q[i][0], q[i][1]);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kGroups; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[u][h][i] = d[h][0][i] + d[h][1][i];
      }
    }
  }

  /// Scores become probabilities relative to 2^top_.
  template <typename Seen>
  __device__ void softmax(const Seen& seen, Scores& s) {
    float most[kGroups][2];
    if (!seen.all(kKeys)) hide_unseen(seen, s);
    bool exceeds = false;
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        most[h][c] = s[0][h][c];
#pragma unroll
        for (int i = 1; i < kTiles; ++i) {
          most[h][c] = fmaxf(most[h][c], s[i / 2][h][i % 2 * 2 + c]);
        }
        most[h][c] *= factor_[h][c];
        exceeds = exceeds || most[h][c] > top_[h][c] + kSlack;
      }
    }
    if (__any_sync(kAll, exceeds)) move_tops(most);
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float top = top_[h][c] == minus_infinity() ? 0.0f : top_[h][c];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          float& x = s[i / 2][h][i % 2 * 2 + c];
          x = exp2_of(__fmaf_rn(x, factor_[h][c], -top));
          total_[h][c] += x;
        }
      }
    }
  }

  template <typename Seen>
  __device__ void hide_unseen(const Seen& seen, Scores& s) const {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int query = 8 * h + 2 * (lane_ & 3) + c;
        const int end = seen.by(query);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const int key = 8 * i + key_of_column<kFormat>(lane_ >> 2);
          if (key >= end) s[i / 2][h][i % 2 * 2 + c] = minus_infinity();
        }
      }
    }
  }

  /// `most`: of the thread's keys.
  __device__ void move_tops(const float (&most)[kGroups][2]) {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      float by[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float now = most[h][c];
#pragma unroll
        for (int x = 4; x < 32; x *= 2) now = fmaxf(now, __shfl_xor_sync(kAll, now, x));
        by[c] = 1.0f;
        if (now > top_[h][c] + kSlack) {
          by[c] = shrink(top_[h][c], now);
          top_[h][c] = now;
        }
        total_[h][c] *= by[c];
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums_[h][i][j] *= by[j & 1];
      }
    }
  }

  template <typename Block, typename Turns>
  __device__ void add_values(const Block& block, const Scores& p, const Turns& turns) {
    using Parts = ValueParts<kFormat, kDim>;
#pragma unroll
    for (int u = 0; u < kTiles / 2; ++u) {
      std::uint32_t high[kGroups][2], low[kGroups][2];
#pragma unroll
      for (int h = 0; h < kGroups; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          split(p[u][h][2 * i], p[u][h][2 * i + 1], high[h][i], low[h][i]);
          high[h][i] = transposed(high[h][i]);
          low[h][i] = transposed(low[h][i]);
        }
      }
      const auto values = block.values(u);
      if (u == kTiles / 2 - 1) turns.leave_values();
#pragma unroll
      for (int j = 0; j < Parts::kParts; ++j) {
        constexpr int kProducts = Parts::kProducts;
        std::uint32_t a[kProducts][4];
        values.part(j, a);
#pragma unroll
        for (int h = 0; h < kGroups; ++h) {
          auto* const sums = sums_[h] + j * kProducts;
#pragma unroll
          for (int i = 0; i < kProducts; ++i) add(sums[i], a[i], low[h]);
#pragma unroll
          for (int i = 0; i < kProducts; ++i) add(sums[i], a[i], high[h]);
        }
      }
    }
  }
  static __device__ void add(float (&sums)[4], const std::uint32_t (&a)[4],
                             const std::uint32_t (&b)[2]) {
    multiply_add<kFp16>(sums, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
  /// Probabilities in two parts, so that their rounding does not count; the small part is added
  /// first.
  static __device__ void split(float x, float y, std::uint32_t& high, std::uint32_t& low) {
    high = round_pair<kFp16>(x, y);
    float x_high = 0.0f;
    float y_high = 0.0f;
    widen_pair<kFp16>(high, x_high, y_high);
    low = round_pair<kFp16>(x - x_high, y - y_high);
  }

  const AttentionParams& p_;
  RowTile tile_;
  int kv_head_;
  int first_;  // of the tile's queries
  int lane_;
  float factor_[kGroups][2];
  std::uint32_t shared_;  // where the operands lie, or
  std::uint32_t q_[kGroups][kKeepsShared ? 1 : kSteps][2];
  float top_[kGroups][2], total_[kGroups][2];
  float sums_[kGroups][kSteps][4];
};

}  // namespace lockstep::kernels
