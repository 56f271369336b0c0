/// Causal attention over keys and values in the pages of a cache, decode and prefill alike.
#pragma once

#include <cstdint>
#include <span>

#include "device/view.h"
#include "kernels/dense/paged_kv.h"

namespace lockstep::kernels {

/// Consecutive rows of one sequence, positions rising, that read its keys together.
struct RowTile {
  std::int32_t first = 0;
  std::int32_t rows = 0;
};

/// Where the rows of a pass stand. On a CUDA device all of it but `longest` lies on the device and
/// is not looked at by the host.
struct PagedRows {
  std::span<const std::int32_t> positions;               // [rows]
  std::span<const std::int32_t> sequence;                // [rows] into `pages`
  std::span<const std::span<const std::int32_t>> pages;  // [sequences] page table, by position

  // On a CUDA device, in place of `pages`:
  TensorView<const std::int32_t, 2> table{};  // [sequences, pages of the longest]
  std::int32_t longest = 0;                   // no position reaches it
  // Of at most rows_of_tile() rows each; empty: every row by itself. Only attention() reads them.
  std::span<const RowTile> tiles{};
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

/// Keys of a split on a CUDA device.
inline constexpr std::int32_t kSplitKeys = 512;

struct AttentionArgs {
  TensorView<const Bf16, 2> q;  // [rows, H * C]
  PagedKv k;
  PagedKv v;
  PagedRows rows;
  std::int32_t num_heads = 0;     // H
  std::int32_t num_kv_heads = 0;  // N
  std::int32_t head_dim = 0;      // C
  TensorView<Bf16, 2> out;        // [rows, H * C]
  // On a CUDA device: what splits of the keys leave for each other; see attention_workspace().
  std::span<std::byte> workspace{};
};

/// On a CUDA device: rows of a tile at most, for heads that share a KV head in groups of this size.
std::int32_t rows_of_tile(std::int32_t group);

/// On a CUDA device: bytes with which the keys of `rows` rows, none at a position of `longest` or
/// more, are read by many thread blocks a row. With less of it the result is the same, later.
std::int64_t attention_workspace(std::int64_t rows, std::int32_t num_heads, std::int32_t head_dim,
                                 std::int32_t longest);

/// out = softmax(q k^T / sqrt(C)) v over positions 0..p of the row's sequence, all in FP32, rounded
/// once. K and V of the pass itself must have been written.
///
/// Order, of which nothing depends on batch, chunks or pages: keys are taken in blocks of 64 by
/// absolute position with a running maximum; a score is summed in 16 lanes over C, a block's
/// probabilities in 16 lanes over its keys, a value in 4 chains over them, by fused multiply-adds.
///
/// On a CUDA device (C of 32, 64 or 128): keys are taken in splits of kSplitKeys by absolute
/// position, whose two halves get 32 keys by turns; in a half 32 or 16 at a time by tensor cores
/// with FP32 sums. Halves are folded, then a row's splits in their order. K and V under two rules
/// are read key by key, by a kernel that is slow. Nothing of it depends on batch, tiles, pages or
/// workspace. Another order than the CPU's: docs/tolerances.md has the bound.
///
/// Throws Error naming what is wrong.
void attention(const AttentionArgs& args, Stream stream);

}  // namespace lockstep::kernels
