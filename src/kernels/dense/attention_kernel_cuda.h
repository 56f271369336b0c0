/// For .cu files alone: the attention kernel of one format.
#pragma once

#include <cstdint>

#include "kernels/dense/attention_loader_cuda.h"
#include "kernels/dense/attention_mma_cuda.h"

namespace lockstep::kernels {

inline constexpr int kMostHeads = 4;  // KV heads of a block of threads: a warp each

/// Key blocks in shared memory: those that warps read, which may be one apart, and those on their
/// way.
constexpr int stages_of(KvFormat format) {
  return format == KvFormat::kBf16 || format == KvFormat::kNvfp4 ? 3 : 4;
}
/// Blocks of threads that a multiprocessor holds at a time.
constexpr int residents_of(KvFormat format, int groups) {
  return groups > 1 ? 2 : format == KvFormat::kNvfp4 ? 4 : 3;
}

inline constexpr unsigned kAll = 0xFFFFFFFFu;

/// Scores are base-2 logarithms. The maximum that probabilities are relative to moves when it is
/// exceeded by more than this, so that sums seldom have to be scaled.
inline constexpr float kSlack = 8.0f;

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

/// A warp's queries against one KV head: kGroups times 8 of them, a row's heads side by side.
template <KvFormat kFormat, int kDim, int kGroups>
class Queries {
 public:
  static constexpr int kSteps = kDim / 16;
  static constexpr int kKeys = keys_at_once(kFormat);
  static constexpr int kTiles = kKeys / 8;
  static constexpr bool kFp16 = kRunsInFp16<kFormat>;

  __device__ Queries(const AttentionParams& p, const RowTile& tile, int kv_head)
      : p_(p), tile_(tile), kv_head_(kv_head), lane_(static_cast<int>(threadIdx.x) & 31) {
    least_ = 0x7FFFFFFF;
#pragma unroll
    for (int h = 0; h < kGroups; ++h) load(h);
    least_ = __reduce_min_sync(kAll, least_);
  }

  /// The row of tile_ and the head of a query; no row where there is no such query.
  __device__ bool exists(int query) const { return query < tile_.rows * p_.group; }
  __device__ std::int64_t row(int query) const { return tile_.first + query / p_.group; }
  __device__ int head(int query) const { return kv_head_ * p_.group + query % p_.group; }

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

  /// Keys at positions first.. of which rows lie `stride` apart.
  __device__ void take(const unsigned char* keys, const unsigned char* values, int scales_at,
                       int codes_at, int first) {
    float s[kTiles][2 * kGroups];
    scores(keys + codes_at, keys + scales_at, s);
    softmax(first, s);
    add_values(values + codes_at, values + scales_at, s);
  }

  /// What is left of the totals of threads that share a query.
  __device__ void finish_totals() {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      total_[h] += __shfl_xor_sync(kAll, total_[h], 1);
      total_[h] += __shfl_xor_sync(kAll, total_[h], 2);
    }
  }

  /// This split's sums where the combining kernel finds them.
  __device__ void store_split(int split) const {
    const int g = lane_ >> 2;
    const int t = lane_ & 3;
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      if (t == 0 && exists(8 * h + g)) {
        float* const tops = p_.tops + 2 * slot(8 * h + g, split);
        tops[0] = top_[h];
        tops[1] = total_[h];
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int query = 8 * h + 2 * t + odd;
        if (!exists(query)) continue;
        float* const to = p_.sums + slot(query, split) * kDim + g * (kDim / 8);
#pragma unroll
        for (int i = 0; i < kSteps; i += 2) {
          *reinterpret_cast<float4*>(to + 2 * i) =
              make_float4(sums_[h][i][odd], sums_[h][i][2 + odd], sums_[h][i + 1][odd],
                          sums_[h][i + 1][2 + odd]);
        }
      }
    }
  }

  /// Folds this split into `totals` [8 * kGroups, kDim], of which each thread touches its own.
  __device__ void fold_split(bool is_first, float* totals) {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      const float top = is_first ? minus_infinity() : row_top_[h];
      const float now = fmaxf(top, top_[h]);
      const float factor = shrink(top, now);
      const float more = shrink(top_[h], now);
      row_total_[h] = fold(is_first ? 0.0f : row_total_[h], factor, total_[h], more);
      row_top_[h] = now;
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int query = 2 * (lane_ & 3) + odd;
        const float a = __shfl_sync(kAll, factor, 4 * query);
        const float b = __shfl_sync(kAll, more, 4 * query);
        float* const to = totals + (8 * h + query) * kDim + (lane_ >> 2) * (kDim / 8);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float* const sum = to + 2 * i + j;
            *sum = fold(is_first ? 0.0f : *sum, a, sums_[h][i][2 * j + odd], b);
          }
        }
      }
    }
  }

  __device__ void store_folded(const float* totals) const {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int query = 2 * (lane_ & 3) + odd;
        const float total = __shfl_sync(kAll, row_total_[h], 4 * query);
        if (!exists(8 * h + query)) continue;
        const int channel = (lane_ >> 2) * (kDim / 8);
        const float* const from = totals + (8 * h + query) * kDim + channel;
        Bf16* const to =
            p_.out + row(8 * h + query) * p_.out_stride + head(8 * h + query) * kDim + channel;
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          to[i] = to_bf16(__fdiv_rn(__fmul_rn(from[i], p_.value_scale), total));
        }
      }
    }
  }

 private:
  __device__ std::int64_t slot(int query, int split) const {
    return (row(query) * p_.heads + head(query)) * p_.splits + split;
  }

  /// Queries of thread row g of group h: operands, limit, and the factor of their scores.
  __device__ void load(int h) {
    const int query = 8 * h + (lane_ >> 2);
    const bool there = exists(query);
    limit_[h] = there ? p_.positions[row(query)] : -1;
    if (there) least_ = min(least_, limit_[h]);
    const Bf16* const q =
        there ? p_.q + row(query) * p_.q_stride + head(query) * std::int64_t{kDim} : nullptr;
    float x[kSteps][2][2];
    float most = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int reg = 0; reg < 2; ++reg) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int channel = channel_of<kFormat, kDim>(lane_ & 3, step, reg, half);
          x[step][reg][half] = there ? to_float(q[channel]) : 0.0f;
          most = fmaxf(most, fabsf(x[step][reg][half]));
        }
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
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int reg = 0; reg < 2; ++reg) {
        q_[step][2 * h + reg] = round_pair<kFp16>(x[step][reg][0] * up, x[step][reg][1] * up);
      }
    }
  }

  __device__ void scores(const unsigned char* codes, const unsigned char* scales,
                         float (&s)[kTiles][2 * kGroups]) const {
    const int row = key_of_column<kFormat>(lane_ >> 2) * p_.stride;
    Key<kFormat, kDim> key[kTiles];
    // Even and odd steps apart. A product has room for 16 queries: with 8, those of an even step
    // stand beside those of the next one, so that one operand serves both.
    float d[kTiles][2][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int at = row + 8 * tile * p_.stride;
      key[tile].read(codes + at, scales + at, lane_ & 3);
    }
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      std::uint32_t b[kTiles][2][2];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) key[tile].part(j, b[tile]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto& q = kGroups == 2 ? q_[2 * j + i] : q_[2 * j];
        const auto& other = q_[2 * j + 1];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add<kFp16>(d[tile][i], q[0], kGroups == 2 ? q[2 * kGroups - 2] : other[0], q[1],
                              kGroups == 2 ? q[2 * kGroups - 1] : other[1], b[tile][i][0],
                              b[tile][i][1]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) {
        s[tile][i] = d[tile][0][i] + d[tile][1][kGroups == 2 ? i : 2 + i];
      }
    }
  }

  /// Scores become probabilities relative to 2^top_.
  __device__ void softmax(int first, float (&s)[kTiles][2 * kGroups]) {
    const int t = lane_ & 3;
    const bool all_seen = first + kKeys - 1 <= least_;
    bool moved = false;
    float shrinks[kGroups];
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      float most = minus_infinity();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& x = s[tile][2 * h + odd];
          x *= factor_[h];
          if (!all_seen) {
            const int key = first + 8 * tile + key_of_column<kFormat>(2 * t + odd);
            x = key <= limit_[h] ? x : minus_infinity();
          }
          most = fmaxf(most, x);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      shrinks[h] = 1.0f;
      if (most > top_[h] + kSlack) {
        shrinks[h] = shrink(top_[h], most);
        top_[h] = most;
        moved = true;
      }
    }
    if (__any_sync(kAll, moved)) scale_sums(shrinks);
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      const float top = top_[h] == minus_infinity() ? 0.0f : top_[h];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& x = s[tile][2 * h + odd];
          x = exp2_of(x - top);
          total_[h] += x;
        }
      }
    }
  }

  __device__ void scale_sums(const float (&shrinks)[kGroups]) {
#pragma unroll
    for (int h = 0; h < kGroups; ++h) {
      total_[h] *= shrinks[h];
      const float even = __shfl_sync(kAll, shrinks[h], 8 * (lane_ & 3));
      const float odd = __shfl_sync(kAll, shrinks[h], 8 * (lane_ & 3) + 4);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        sums_[h][i][0] *= even;
        sums_[h][i][1] *= odd;
        sums_[h][i][2] *= even;
        sums_[h][i][3] *= odd;
      }
    }
  }

  /// Probabilities in two parts, so that their rounding does not count; the small part first.
  __device__ void add_values(const unsigned char* codes, const unsigned char* scales,
                             const float (&p)[kTiles][2 * kGroups]) {
    const int t = lane_ & 3;
    const int even_row = key_of_column<kFormat>(2 * t) * p_.stride;
    const int odd_row = key_of_column<kFormat>(2 * t + 1) * p_.stride;
#pragma unroll
    for (int u = 0; u < kTiles / 2; ++u) {
      const int at = 16 * u * p_.stride;
      const int next = at + 8 * p_.stride;
      std::uint32_t a[kSteps][4];
      read_values<kFormat, kDim>({codes + at + even_row, codes + at + odd_row,
                                  codes + next + even_row, codes + next + odd_row},
                                 {scales + at + even_row, scales + at + odd_row,
                                  scales + next + even_row, scales + next + odd_row},
                                 lane_ >> 2, a);
#pragma unroll
      for (int h = 0; h < kGroups; ++h) {
        std::uint32_t high[2];
        std::uint32_t low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = p[2 * u + i][2 * h];
          const float y = p[2 * u + i][2 * h + 1];
          high[i] = round_pair<kFp16>(x, y);
          float x_high = 0.0f;
          float y_high = 0.0f;
          widen_pair<kFp16>(high[i], x_high, y_high);
          low[i] = round_pair<kFp16>(x - x_high, y - y_high);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          multiply_add<kFp16>(sums_[h][i], a[i][0], a[i][1], a[i][2], a[i][3], low[0], low[1]);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          multiply_add<kFp16>(sums_[h][i], a[i][0], a[i][1], a[i][2], a[i][3], high[0], high[1]);
        }
      }
    }
  }

  const AttentionParams& p_;
  RowTile tile_;
  int kv_head_;
  int lane_;
  int least_;  // position of a query
  int limit_[kGroups];
  float factor_[kGroups];
  std::uint32_t q_[kSteps][2 * kGroups];
  float top_[kGroups], total_[kGroups];
  float row_top_[kGroups], row_total_[kGroups];
  float sums_[kGroups][kSteps][4];
};

template <KvFormat kFormat, int kDim, int kGroups>
__global__ void __launch_bounds__(32 * kMostHeads, residents_of(kFormat, kGroups))
    attention_kernel(const __grid_constant__ AttentionParams p) {
  constexpr int kKeys = keys_at_once(kFormat);
  extern __shared__ __align__(128) unsigned char shared[];
  const bool folds = p.sums == nullptr;
  const std::int64_t index = folds ? blockIdx.x : blockIdx.x / static_cast<unsigned>(p.splits);
  const RowTile tile =
      p.tiles == nullptr ? RowTile{static_cast<std::int32_t>(index), 1} : p.tiles[index];
  const int last = p.positions[tile.first + tile.rows - 1];
  const int first_split =
      folds ? 0 : static_cast<int>(blockIdx.x % static_cast<unsigned>(p.splits));
  const int end_split = folds ? last / kSplitKeys + 1 : first_split + 1;
  if (first_split * kSplitKeys > last) return;

  constexpr int kStages = stages_of(kFormat);
  const SharedLayout layout(p, kDim, 8 * kGroups, kKeys, kStages);
  Loader<kKeys, kStages> loader(p, shared, layout);
  loader.start_barriers();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Queries<kFormat, kDim, kGroups> queries(p, tile,
                                          static_cast<int>(blockIdx.y) * p.block_heads + warp);
  const int codes_at = warp * (p.code_bytes / p.block_heads);
  const int scales_at = p.code_bytes + warp * (p.scale_bytes / p.block_heads);
  float* const totals =
      reinterpret_cast<float*>(shared + layout.totals) + warp * 8 * kGroups * kDim;
  const std::int32_t* const table = p.table + p.sequence[tile.first] * p.table_stride;

  int taken = 0;  // key blocks of the splits before
  for (int split = first_split; split < end_split; ++split) {
    const int begin = split * kSplitKeys;
    const int end = min(begin + kSplitKeys, last + 1);
    const int blocks = (end - begin + kKeys - 1) / kKeys;
    const auto start = [&](int block) {  // warps take turns
      if (p.copy == KvCopy::kBytes || block >= blocks || warp != block % p.block_heads) return;
      loader.start(taken + block, block, min(kKeys, end - begin - block * kKeys));
    };
    __syncthreads();
    loader.find(table, begin, end);
    __syncthreads();
    for (int block = 0; block < kStages - 2; ++block) start(block);
    queries.clear();
    for (int block = 0; block < blocks; ++block) {
      const int first = begin + block * kKeys;
      const int count = min(kKeys, end - first);
      const int at = taken + block;
      start(block + kStages - 2);
      if (p.copy == KvCopy::kBytes) {
        __syncthreads();
        loader.copy_now(at, first, count);
        __syncthreads();
      } else {
        loader.wait(at);
      }
      if (count < kKeys) loader.clear_values(at, count, codes_at, scales_at);
      queries.take(loader.keys(at), loader.values(at), scales_at, codes_at, first);
      loader.release(at);
    }
    taken += blocks;
    queries.finish_totals();
    if (folds) {
      queries.fold_split(split == 0, totals);
    } else {
      queries.store_split(split);
    }
  }
  if (folds) queries.store_folded(totals);
}

template <KvFormat kFormat, int kDim, int kGroups>
void launch_one(const AttentionParams& p, unsigned tiles, void* stream) {
  const auto kernel = attention_kernel<kFormat, kDim, kGroups>;
  const SharedLayout layout(p, kDim, 8 * kGroups, keys_at_once(kFormat), stages_of(kFormat));
  cuda::require(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.bytes),
      "cudaFuncSetAttribute");
  const unsigned splits = p.sums == nullptr ? 1u : static_cast<unsigned>(p.splits);
  const unsigned head_blocks = static_cast<unsigned>(p.heads / p.group / p.block_heads);
  kernel<<<dim3(tiles * splits, head_blocks), static_cast<unsigned>(32 * p.block_heads),
           static_cast<std::size_t>(layout.bytes), static_cast<cudaStream_t>(stream)>>>(p);
  cuda::require_launch("attention_kernel");
}

template <KvFormat kFormat>
void launch_format(const AttentionParams& p, int dim, int groups, unsigned tiles, void* stream) {
  const auto of_groups = [&]<int kDim>() {
    if constexpr (kFormat == KvFormat::kNvfp4 || kFormat == KvFormat::kBf16) {
      if (groups == 1) return launch_one<kFormat, kDim, 1>(p, tiles, stream);
    }
    launch_one<kFormat, kDim, 2>(p, tiles, stream);
  };
  switch (dim) {
    case 32: return of_groups.template operator()<32>();
    case 64: return of_groups.template operator()<64>();
    default: return of_groups.template operator()<128>();
  }
}

}  // namespace lockstep::kernels
