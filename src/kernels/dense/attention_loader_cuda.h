/// For .cu files alone: rows of the cache on their way into shared memory.
#pragma once

#include <cstdint>

#include "kernels/dense/attention_cuda.h"

namespace lockstep::kernels {

__device__ inline std::uint32_t address_of(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// Of some arrivals, one of which may come with bytes.
class Barrier {
 public:
  __device__ explicit Barrier(std::uint64_t* at) : at_(address_of(at)) {}
  __device__ void start(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at_), "r"(arrivals) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at_) : "memory");
  }
  __device__ void expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at_), "r"(bytes)
                 : "memory");
  }
  __device__ void copy(void* to, const std::byte* from, int bytes) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(address_of(to)),
        "l"(from), "r"(bytes), "r"(at_)
        : "memory");
  }
  __device__ void wait(int parity) const {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(at_),
        "r"(parity)
        : "memory");
  }

 private:
  std::uint32_t at_;
};

/// Rows of the cache that one copy brings, or two where codes and scales lie apart.
struct Piece {
  const std::byte* key;
  const std::byte* value;
  std::int32_t rows;  // 0: none
  std::int32_t to;    // row of the key block
};

/// Where things lie in shared memory; sizes are the host's too.
struct SharedLayout {
  int pieces_each;  // of a key block
  int pieces;       // of the split; or its page table, where threads copy
  int totals;       // of the folded splits
  int stages;
  int side;  // K or V of a stage
  int bytes;

  __host__ __device__ SharedLayout(const AttentionParams& p, int dim, int columns, int keys,
                                   int stage_count) {
    const int pages = (keys - 1) / p.page_tokens + 2;
    pieces_each = p.copy == KvCopy::kRows || pages > keys ? keys : pages;
    const int piece_bytes = pieces_each * (kSplitKeys / keys) * static_cast<int>(sizeof(Piece));
    const int table_bytes = (kSplitKeys / p.page_tokens + 2) * 4;
    pieces = 128;
    totals = (pieces + (p.copy == KvCopy::kBytes ? table_bytes : piece_bytes) + 127) / 128 * 128;
    stages = totals + (p.sums == nullptr ? p.block_heads * columns * dim * 4 : 0);
    side = keys * p.stride;
    bytes = stages + stage_count * 2 * side;
  }
};

/// Brings keys and values into shared memory. Key blocks are counted over all splits.
template <int kKeys, int kStages>
class Loader {
 public:
  __device__ Loader(const AttentionParams& p, unsigned char* shared, const SharedLayout& layout)
      : p_(p), layout_(layout), shared_(shared), head_block_(static_cast<int>(blockIdx.y)) {}

  __device__ void start_barriers() const {
    if (threadIdx.x < kStages) {
      full(static_cast<int>(threadIdx.x)).start(1);
      empty(static_cast<int>(threadIdx.x)).start(p_.block_heads);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  /// Where the rows of positions begin..end-1 lie. All threads, between two barriers of theirs.
  __device__ void find(const std::int32_t* table, int begin, int end) {
    begin_ = begin;
    const int thread = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x);
    if (p_.copy == KvCopy::kBytes) {
      const int first = begin / p_.page_tokens;
      for (int i = thread; i <= (end - 1) / p_.page_tokens - first; i += threads) {
        pages()[i] = table[first + i];
      }
      return;
    }
    const int each = layout_.pieces_each;
    const int count = (end - begin + kKeys - 1) / kKeys * each;
    for (int i = thread; i < count; i += threads) {
      const int first = begin + i / each * kKeys;
      pieces()[i] = piece(table, first, min(first + kKeys, end), i % each);
    }
  }

  __device__ unsigned char* keys(int block) const {
    return shared_ + layout_.stages + block % kStages * 2 * layout_.side;
  }
  __device__ unsigned char* values(int block) const { return keys(block) + layout_.side; }

  /// By one warp: starts to copy `count` keys of a block, the `local`-th of the split, once its
  /// place is free.
  __device__ void start(int block, int local, int count) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    if (block >= kStages) empty(block).wait((block / kStages - 1) & 1);
    const Barrier done = full(block);
    const int row = p_.code_bytes + p_.scale_bytes;
    if (lane == 0) done.expect(2 * count * row);
    __syncwarp();
    const Piece* const here = pieces() + local * layout_.pieces_each;
    for (int i = lane; i < layout_.pieces_each; i += 32) {
      const Piece one = here[i];
      if (one.rows == 0) continue;
      unsigned char* const key = keys(block) + one.to * p_.stride;
      unsigned char* const value = values(block) + one.to * p_.stride;
      if (p_.copy == KvCopy::kRuns) {
        done.copy(key, one.key, one.rows * row);
        done.copy(value, one.value, one.rows * row);
      } else {
        copy_row(done, key, one.key);
        copy_row(done, value, one.value);
      }
    }
  }

  __device__ void wait(int block) const { full(block).wait(block / kStages & 1); }
  /// By a warp that has read the block.
  __device__ void release(int block) const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) empty(block).arrive();
  }

  /// By all threads, byte by byte.
  __device__ void copy_now(int block, int first, int count) const {
    const int row = p_.code_bytes + p_.scale_bytes;
    for (int i = static_cast<int>(threadIdx.x); i < count * row;
         i += static_cast<int>(blockDim.x)) {
      const int position = first + i / row;
      const int at = i % row;
      const std::int64_t from =
          std::int64_t{position % p_.page_tokens} * p_.row_bytes +
          (at < p_.code_bytes ? head_block_ * p_.code_offset + at
                              : p_.scales_at + head_block_ * p_.scale_offset + at - p_.code_bytes);
      const std::int64_t id = pages()[position / p_.page_tokens - begin_ / p_.page_tokens];
      const int to = i / row * p_.stride + at;
      keys(block)[to] = static_cast<unsigned char>(p_.k.pool[id * p_.k.page_bytes + from]);
      values(block)[to] = static_cast<unsigned char>(p_.v.pool[id * p_.v.page_bytes + from]);
    }
  }

  /// By a warp: its head's values past the last key are 0, whatever lay there.
  __device__ void clear_values(int block, int count, int codes_at, int scales_at) const {
    const int codes = p_.code_bytes / p_.block_heads;
    const int scales = p_.scale_bytes / p_.block_heads;
    for (int key = count; key < kKeys; ++key) {
      unsigned char* const row = values(block) + key * p_.stride;
      for (int i = static_cast<int>(threadIdx.x) & 31; i < codes; i += 32) row[codes_at + i] = 0;
      for (int i = static_cast<int>(threadIdx.x) & 31; i < scales; i += 32) row[scales_at + i] = 0;
    }
    __syncwarp();
  }

 private:
  __device__ Barrier full(int block) const {
    return Barrier(reinterpret_cast<std::uint64_t*>(shared_) + block % kStages);
  }
  __device__ Barrier empty(int block) const {
    return Barrier(reinterpret_cast<std::uint64_t*>(shared_) + kStages + block % kStages);
  }
  __device__ Piece* pieces() const { return reinterpret_cast<Piece*>(shared_ + layout_.pieces); }
  __device__ std::int32_t* pages() const {
    return reinterpret_cast<std::int32_t*>(shared_ + layout_.pieces);
  }
  /// The index-th piece of positions first..end-1.
  __device__ Piece piece(const std::int32_t* table, int first, int end, int index) const {
    int begin = first + index;
    int until = min(begin + 1, end);
    int page = begin / p_.page_tokens;
    if (p_.copy == KvCopy::kRuns && layout_.pieces_each < kKeys) {
      page = first / p_.page_tokens + index;
      begin = max(first, page * p_.page_tokens);
      until = min(end, (page + 1) * p_.page_tokens);
    }
    if (begin >= until) return {};
    const std::int64_t id = table[page];
    const std::int64_t from = std::int64_t{begin - page * p_.page_tokens} * p_.row_bytes;
    return {p_.k.pool + id * p_.k.page_bytes + from, p_.v.pool + id * p_.v.page_bytes + from,
            until - begin, begin - first};
  }
  __device__ void copy_row(const Barrier& done, unsigned char* to, const std::byte* row) const {
    done.copy(to, row + head_block_ * p_.code_offset, p_.code_bytes);
    if (p_.scale_bytes == 0) return;
    done.copy(to + p_.code_bytes, row + p_.scales_at + head_block_ * p_.scale_offset,
              p_.scale_bytes);
  }

  const AttentionParams& p_;
  const SharedLayout& layout_;
  unsigned char* shared_;
  int head_block_;
  int begin_ = 0;
};

}  // namespace lockstep::kernels
