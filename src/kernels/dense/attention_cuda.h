/// Between attention.cc and the CUDA backend, and between its files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/dense/attention.h"

namespace lockstep::kernels {

void attention_cuda(const AttentionArgs& args, Stream stream);
void attention_mixed_cuda(const AttentionArgs& args, Stream stream);
void write_kv_cuda(const WriteKvArgs& args, Stream stream);

enum class KvFormat : std::uint8_t { kNvfp4, kMxfp4, kE4m3, kBf16 };

/// How rows of the cache come into shared memory.
enum class KvCopy : std::uint8_t {
  kRuns,   // whole rows, as many as follow each other in a page, by the copy engine
  kRows,   // a row's codes and scales of the block's heads, by the copy engine
  kWords,  // the same by the threads, four bytes at a time
  kBytes,  // byte by byte: any alignment, any shape
};

struct KvSide {
  const std::byte* pool;  // with the layer's offset
  std::int64_t page_bytes;
};

/// Decoding, a block of threads takes one row's queries against `block_heads` KV heads, two warps
/// each; with `tiles`, those of a tile against one KV head, 16 to a warp.
struct AttentionParams {
  const Bf16* q;
  Bf16* out;
  std::int64_t q_stride;
  std::int64_t out_stride;
  KvSide k;
  KvSide v;
  const std::int32_t* positions;
  const std::int32_t* sequence;
  const std::int32_t* table;
  std::int64_t table_stride;
  const RowTile* tiles;  // or null: a row each
  float* sums;  // [rows, heads, splits, dim], or null: a block folds all splits of what it has
  float* tops;  // [rows, heads, splits, 2]: the greatest score and the total
  std::int32_t heads;
  std::int32_t group;  // heads that share a KV head
  std::int32_t splits;
  std::int32_t page_tokens;
  std::int32_t row_bytes;
  std::int32_t stride;        // of rows in shared memory
  std::int32_t code_bytes;    // of a row, for the block's heads
  std::int32_t scale_bytes;   // likewise
  std::int32_t code_offset;   // from one block of heads to the next
  std::int32_t scale_offset;  // likewise
  std::int32_t scales_at;     // in a row of the cache
  std::int32_t block_heads;
  std::int32_t head_blocks;
  std::int32_t rows;
  std::int32_t tile_count;
  std::int32_t items;  // tiles by KV heads; or rows by blocks of heads, by splits that go apart
  float score_scale;   // to the base-2 logarithm
  float value_scale;
  KvCopy copy;
};

/// Starts the kernel for one format; `dim` is 32, 64 or 128, `groups` of 8 queries a row 1 or 2.
void launch_attention_nvfp4(const AttentionParams& p, int dim, int groups, int device,
                            void* stream);
void launch_attention_mxfp4(const AttentionParams& p, int dim, int groups, int device,
                            void* stream);
void launch_attention_e4m3(const AttentionParams& p, int dim, int groups, int device, void* stream);
void launch_attention_bf16(const AttentionParams& p, int dim, int groups, int device, void* stream);

inline constexpr std::int32_t kMostGroup = 16;    // heads that share a KV head
inline constexpr std::int32_t kTileQueries = 64;  // of a tile's rows, at most
/// A split's keys go to its two halves by turns, so many at a time.
inline constexpr std::int32_t kTurnKeys = 32;

constexpr std::int32_t splits_of(std::int32_t longest) {
  return (std::max(longest, 1) + kSplitKeys - 1) / kSplitKeys;
}

/// Keys that a warp takes at a time.
constexpr int keys_at_once(KvFormat format) {
  return format == KvFormat::kNvfp4 || format == KvFormat::kMxfp4 ? 32 : 16;
}

}  // namespace lockstep::kernels
