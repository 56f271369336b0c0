/// Causal attention over keys and values in the pages of a cache, decode and prefill alike.
#pragma once

#include <cstdint>
#include <span>

#include "device/view.h"
#include "kernels/dense/paged_kv.h"

namespace lockstep::kernels {

/// Where the rows of a pass stand.
struct PagedRows {
  std::span<const std::int32_t> positions;               // [rows]
  std::span<const std::int32_t> sequence;                // [rows] into `pages`
  std::span<const std::span<const std::int32_t>> pages;  // [sequences] page table, by position
};

struct WriteKvArgs {
  TensorView<const Bf16, 2> x;  // [rows, N * C]
  PagedKv kv;
  PagedRows rows;
  TensorView<std::int64_t, 1> counts{};  // of quantize(), optional; added to
};

/// Puts K or V of each row into its place, quantized under kv.rule; touches no other byte.
/// Throws Error naming row, position and what is wrong.
void write_kv(const WriteKvArgs& args, Stream stream);

/// Keys that are taken together, from absolute position 0 on.
inline constexpr std::int32_t kKeyBlock = 64;

struct AttentionArgs {
  TensorView<const Bf16, 2> q;  // [rows, H * C]
  PagedKv k;
  PagedKv v;
  PagedRows rows;
  std::int32_t num_heads = 0;     // H
  std::int32_t num_kv_heads = 0;  // N
  std::int32_t head_dim = 0;      // C
  TensorView<Bf16, 2> out;        // [rows, H * C]
};

/// out = softmax(q k^T / sqrt(C)) v over positions 0..p of the row's sequence, all in FP32, rounded
/// once. K and V of the pass itself must have been written.
///
/// Order, of which nothing depends on batch, chunks or pages: keys are taken in blocks of 64 by
/// absolute position with a running maximum; a score is summed in 16 lanes over C, a block's
/// probabilities in 16 lanes over its keys, a value in 4 chains over them, by fused multiply-adds.
/// Throws Error naming what is wrong.
void attention(const AttentionArgs& args, Stream stream);

}  // namespace lockstep::kernels
