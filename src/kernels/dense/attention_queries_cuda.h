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
    least_ = p.positions[tile.first];
#pragma unroll
    for (int h = 0; h < kGroups; ++h) load(h, shared);
    __syncwarp();
  }

  __device__ int lane() const { return lane_; }
  __device__ bool any() const { return exists(0); }

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      top_[h] = minus_infinity();
      total_[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums_[h][i][j] = 0.0f;
      }
    }
  }

  /// Keys at positions first...
  template <typename Block>
  __device__ void take(const Block& block, int first) {
    float s[kTiles][2 * kGroups];
    scores(block, s);
    softmax(first, s);
    add_values(block, s);
  }

  /// What is left of the totals of threads that share a query.
  __device__ void finish_totals() {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      total_[h] += __shfl_xor_sync(kAll, total_[h], 1);
      total_[h] += __shfl_xor_sync(kAll, total_[h], 2);
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

  /// The sums of this split's first half and of its second become one. Two warps, each with a half,
  /// meet at `here` and `there`, which has what this one gives away; each gets its channels of the
  /// sums, and the tops and totals in place of its own. `barrier` is the two warps'.
  template <int kHalf>
  __device__ void meet(const KeptSums& here, const KeptSums& there, int barrier, Sums<kOwn>& own) {
    const auto wait = [&] { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); };
    wait();  // the other has read what lay there
    keep<kOwn>(there, (1 - kHalf) * kOwn);
    wait();
    join<kHalf, kOwn>(here, own);
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
      to.rows[8 * h + (lane_ >> 2)] = make_float2(top_[h], total_[h]);
    }
  }

  /// This warp's half and one that was kept become their split.
  template <int kHalf, int kCount>
  __device__ void join(const KeptSums& kept, Sums<kCount>& split) {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      const float2 other = kept.rows[8 * h + (lane_ >> 2)];
      const float now = fmaxf(top_[h], other.x);
      const float mine = shrink(top_[h], now);
      const float others = shrink(other.x, now);
      total_[h] = in_order<kHalf>(total_[h], mine, other.y, others);
      top_[h] = now;
      float by[2], others_by[2];
      of_columns(mine, by);
      of_columns(others, others_by);
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
      if (half == 0 && t == 0 && exists(8 * h + g)) {
        float* const tops = p_.tops + 2 * slot(8 * h + g, split);
        tops[0] = top_[h];
        tops[1] = total_[h];
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int query = 8 * h + 2 * t + odd;
        if (!exists(query)) continue;
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
      float2* const row = totals.rows + 8 * h + (lane_ >> 2);
      const float2 before = is_first ? make_float2(minus_infinity(), 0.0f) : *row;
      const float now = fmaxf(before.x, top_[h]);
      const float factor = shrink(before.x, now);
      const float more = shrink(top_[h], now);
      __syncwarp();  // all four threads of the row have read it
      *row = make_float2(now, fold(before.y, factor, total_[h], more));
      float a[2], b[2];
      of_columns(factor, a);
      of_columns(more, b);
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
      float total[2];
      of_columns(totals.rows[8 * h + (lane_ >> 2)].y, total);
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
    factor_[h] = p_.score_scale;
    float up = 1.0f;
    if constexpr (kFp16) {  // the greatest comes to 2^14, so that FP16 loses nothing that counts
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      int shift = 14 + 127 - static_cast<int>(float_bits(most) >> 23);
      shift = most == 0.0f ? 0 : max(-100, min(100, shift));
      up = float_of(static_cast<std::uint32_t>(127 + shift) << 23);
      factor_[h] *= float_of(static_cast<std::uint32_t>(127 - shift) << 23);
    }
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
            make_uint4(two[0][0], two[1][0], two[0][1], two[1][1]);
      } else {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          q_[2 * j + odd][2 * h] = two[odd][0];
          q_[2 * j + odd][2 * h + 1] = two[odd][1];
        }
      }
    }
  }

  /// The operands for the even and the odd step of 2 j, each a pair of registers a group; of eight
  /// queries both steps' in one.
  __device__ void queries(int j, std::uint32_t (&even)[4], std::uint32_t (&odd)[4]) const {
    if constexpr (kKeepsShared) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(even[0]), "=r"(even[1]), "=r"(even[2]), "=r"(even[3])
                   : "r"(shared_ + 512 * j + 16 * lane_)
                   : "memory");
#pragma unroll
      for (int i = 0; i < 4; ++i) odd[i] = even[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        even[i] = q_[2 * j][i % 2 * 2 + i / 2];
        odd[i] = q_[2 * j + 1][i % 2 * 2 + i / 2];
      }
    }
  }

  /// Even and odd steps apart. A product has room for 16 queries: with 8, those of an even step
  /// stand beside those of the next one, so that one operand serves both.
  template <typename Block>
  __device__ void scores(const Block& block, float (&s)[kTiles][2 * kGroups]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const auto key = block.key(tile);
      float d[2][4] = {};
#pragma unroll
      for (int j = 0; j < kSteps / 2; ++j) {
        std::uint32_t b[2][2];
        key.part(j, b);
        std::uint32_t q[2][4];
        queries(j, q[0], q[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_add<kFp16>(d[i], q[i][0], q[i][1], q[i][2], q[i][3], b[i][0], b[i][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) s[tile][i] = d[0][i] + d[1][kGroups == 2 ? i : 2 + i];
    }
  }

  /// Scores become probabilities relative to 2^top_.
  __device__ void softmax(int first, float (&s)[kTiles][2 * kGroups]) {
    float most[kGroups];
    if (first + kKeys - 1 > least_) hide_unseen(first, s);
    bool exceeds = false;
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      most[h] = s[0][2 * h];
#pragma unroll
      for (int i = 1; i < 2 * kTiles; ++i) most[h] = fmaxf(most[h], s[i / 2][2 * h + i % 2]);
      most[h] *= factor_[h];
      exceeds = exceeds || most[h] > top_[h] + kSlack;
    }
    if (__any_sync(kAll, exceeds)) move_tops(most);
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      const float top = top_[h] == minus_infinity() ? 0.0f : top_[h];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        float& x = s[i / 2][2 * h + i % 2];
        x = exp2_of(__fmaf_rn(x, factor_[h], -top));
        total_[h] += x;
      }
    }
  }

  __device__ void hide_unseen(int first, float (&s)[kTiles][2 * kGroups]) const {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      const int query = 8 * h + (lane_ >> 2);
      const int limit = exists(query) ? p_.positions[row(query)] : -1;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int key = first + i / 2 * 8 + key_of_column<kFormat>(2 * (lane_ & 3) + i % 2);
        if (key > limit) s[i / 2][2 * h + i % 2] = minus_infinity();
      }
    }
  }

  /// `most`: of the thread's keys.
  __device__ void move_tops(const float (&most)[kGroups]) {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      float now = fmaxf(most[h], __shfl_xor_sync(kAll, most[h], 1));
      now = fmaxf(now, __shfl_xor_sync(kAll, now, 2));
      float by = 1.0f;
      if (now > top_[h] + kSlack) {
        by = shrink(top_[h], now);
        top_[h] = now;
      }
      total_[h] *= by;
      float column[2];
      of_columns(by, column);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums_[h][i][j] *= column[j & 1];
      }
    }
  }

  template <typename Block>
  __device__ void add_values(const Block& block, const float (&p)[kTiles][2 * kGroups]) {
    using Parts = ValueParts<kFormat, kDim>;
#pragma unroll
    for (int u = 0; u < kTiles / 2; ++u) {
      std::uint32_t high[kGroups][2], low[kGroups][2];
#pragma unroll
      for (int h = 0; h < kGroups; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          split(p[2 * u + i][2 * h], p[2 * u + i][2 * h + 1], high[h][i], low[h][i]);
        }
      }
      const auto values = block.values(u);
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
  int least_;  // position of a query: rows' positions rise
  float factor_[kGroups];
  std::uint32_t shared_;  // where the operands lie, or
  std::uint32_t q_[kKeepsShared ? 1 : kSteps][2 * kGroups];
  float top_[kGroups], total_[kGroups];
  float sums_[kGroups][kSteps][4];
};

}  // namespace lockstep::kernels
