/// For .cu files alone: rows of the cache on their way into shared memory.
#pragma once

#include <cstdint>

#include "kernels/dense/attention_block_cuda.h"

namespace lockstep::kernels {

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
  /// A thread's eight bytes at a time.
  static __device__ void copy_word(void* to, const std::byte* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address_of(to)), "l"(from)
                 : "memory");
  }
  /// Arrives once what copy_word() of this thread began is there.
  __device__ void arrive_with_words() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at_) : "memory");
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

/// Of a block that comes in words: all lanes with theirs, and one for the warp.
inline constexpr int kWordArrivals = 33;

/// Where things lie in shared memory; sizes are the host's too.
struct SharedLayout {
  int walks;     // of the threads that take keys
  int offsets;   // LaneOffsets
  int queries;   // of the warps
  int meetings;  // of those that have a half of a split each
  int stages;
  int stage_bytes;
  int totals;  // of the folded splits
  int pages;   // of the split on its way
  int bytes;

  /// `query_bytes` of a warp, `meeting_bytes` of a head, `stage_size` of `stage_count` blocks of
  /// keys and values.
  __host__ __device__ SharedLayout(const AttentionParams& p, int heads, int query_bytes,
                                   int meeting_bytes, int stage_size, int stage_count) {
    walks = 128;  // after the barriers
    offsets = walks + 256 * 12;
    queries = offsets + static_cast<int>(sizeof(LaneOffsets));
    meetings = queries + 2 * heads * query_bytes;
    stages = (meetings + heads * meeting_bytes + 127) / 128 * 128;
    stage_bytes = stage_size;
    totals = stages + stage_count * stage_size;
    pages = totals + (p.sums == nullptr ? heads * meeting_bytes : 0);
    bytes = pages + (kSplitKeys / p.page_tokens + 2) * 4;
  }
};

/// Where a half of the splits is in its places for blocks of keys: each half has every other one,
/// and goes over them in turn. So whoever waits for a place has seen all that was there before, and
/// one bit tells what is there from what was.
struct RingPlace {
  int at;
  int parity = 0;

  __device__ explicit RingPlace(int half) : at(half) {}
  __device__ void next(int stages) {
    at += 2;
    if (at < stages) return;
    at -= stages;
    parity ^= 1;
  }
};

/// Places for blocks of keys, filled by one warp and emptied by others.
template <int kStages>
class Ring {
 public:
  static_assert(kStages % 2 == 0);

  __device__ Ring(unsigned char* shared, const SharedLayout& layout)
      : shared_(shared), stages_(shared + layout.stages), stage_bytes_(layout.stage_bytes) {}

  /// By all threads, before a barrier of theirs. `readers`: warps that read a block.
  __device__ void start(int readers, int arrivals) const {
    if (threadIdx.x < kStages) {
      full(static_cast<int>(threadIdx.x)).start(arrivals);
      empty(static_cast<int>(threadIdx.x)).start(readers);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __device__ unsigned char* stage(const RingPlace& place) const {
    return stages_ + place.at * stage_bytes_;
  }
  __device__ Barrier full(const RingPlace& place) const { return full(place.at); }
  /// Nothing is waited for the first time.
  __device__ void wait_empty(const RingPlace& place) const {
    empty(place.at).wait(place.parity ^ 1);
  }
  __device__ void wait_full(const RingPlace& place) const { full(place).wait(place.parity); }
  /// By a warp that has read the block.
  __device__ void release(const RingPlace& place, int lane) const {
    __syncwarp();
    if (lane == 0) empty(place.at).arrive();
  }

 private:
  __device__ Barrier full(int at) const {
    return Barrier(reinterpret_cast<std::uint64_t*>(shared_) + at);
  }
  __device__ Barrier empty(int at) const {
    return Barrier(reinterpret_cast<std::uint64_t*>(shared_) + kStages + at);
  }

  unsigned char* shared_;
  unsigned char* stages_;
  int stage_bytes_;
};

/// A place in a sequence's pages.
struct PagePlace {
  int page = 0;  // from the split's first
  int slot = 0;

  __device__ void advance(int tokens, int page_tokens) {
    slot += tokens;
    for (; slot >= page_tokens; slot -= page_tokens) ++page;
  }
};

/// The warp that brings keys and values into shared memory: rows `kStride` apart, or p.stride.
template <int kKeys, int kStages, int kStride>
class Loader {
 public:
  __device__ Loader(const AttentionParams& p, const Ring<kStages>& ring, unsigned char* shared,
                    const SharedLayout& layout)
      : p_(p),
        ring_(ring),
        pages_(reinterpret_cast<std::int32_t*>(shared + layout.pages)),
        lane_(static_cast<int>(threadIdx.x) & 31) {}

  /// Goes to a split of positions begin..end-1 of a sequence.
  __device__ void find(const std::int32_t* table, int begin, int end, int head_block) {
    head_block_ = head_block;
    first_page_ = begin / p_.page_tokens;
    const int count = (end - 1) / p_.page_tokens - first_page_ + 1;
    __syncwarp();
    for (int i = lane_; i < count; i += 32) pages_[i] = table[first_page_ + i];
    __syncwarp();
  }

  __device__ PagePlace place(int position) const {
    const int page = position / p_.page_tokens;
    return {page - first_page_, position - page * p_.page_tokens};
  }

  /// Copies `count` keys and values from a place on, once there is room at `to`.
  __device__ void start(const RingPlace& to, const PagePlace& from, int count) const {
    ring_.wait_empty(to);
    unsigned char* const keys = ring_.stage(to);
    unsigned char* const values = keys + kKeys * stride();
    const Barrier done = ring_.full(to);
    if (count < kKeys) clear(values + count * stride(), (kKeys - count) * stride());
    if (p_.copy == KvCopy::kWords) {
      copy_words(keys, values, from, count);
      done.arrive_with_words();
      __syncwarp();  // what was cleared
      if (lane_ == 0) done.arrive();
      return;
    }
    if (p_.copy == KvCopy::kBytes) {
      copy_bytes(keys, values, from, count);
      __syncwarp();
      if (lane_ == 0) done.arrive();
      return;
    }
    if (lane_ == 0) done.expect(2 * count * row_bytes());
    __syncwarp();
    if (p_.copy == KvCopy::kRuns) {
      copy_runs(done, keys, values, from, count);
    } else {
      copy_rows(done, keys, values, from, count);
    }
  }

 private:
  __device__ int stride() const { return kStride > 0 ? kStride : p_.stride; }
  __device__ int row_bytes() const { return p_.code_bytes + p_.scale_bytes; }
  __device__ const std::byte* row_of(const KvSide& side, int page, int slot) const {
    return side.pool + pages_[page] * side.page_bytes + slot * p_.row_bytes;
  }

  /// What lies past the last key: it meets probabilities of 0.
  __device__ void clear(unsigned char* at, int bytes) const {
    for (int i = 4 * lane_; i < bytes; i += 128) *reinterpret_cast<std::uint32_t*>(at + i) = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }

  /// Page by page, a lane each for keys and for values.
  __device__ void copy_runs(const Barrier& done, unsigned char* keys, unsigned char* values,
                            const PagePlace& from, int count) const {
    const int pages = (from.slot + count - 1 + p_.page_tokens) / p_.page_tokens;
    for (int i = lane_; i < 2 * pages; i += 32) {
      const int page = i / 2;
      const bool is_value = i % 2 != 0;
      const int slot = page == 0 ? from.slot : 0;
      const int to = page == 0 ? 0 : page * p_.page_tokens - from.slot;
      const int rows = min(p_.page_tokens - slot, count - to);
      done.copy((is_value ? values : keys) + to * stride(),
                row_of(is_value ? p_.v : p_.k, from.page + page, slot), rows * row_bytes());
    }
  }
  /// A lane a key.
  __device__ void copy_rows(const Barrier& done, unsigned char* keys, unsigned char* values,
                            const PagePlace& from, int count) const {
    for (int i = lane_; i < count; i += 32) {
      PagePlace at = from;
      at.advance(i, p_.page_tokens);
      copy_row(done, keys + i * stride(), row_of(p_.k, at.page, at.slot));
      copy_row(done, values + i * stride(), row_of(p_.v, at.page, at.slot));
    }
  }
  __device__ void copy_row(const Barrier& done, unsigned char* to, const std::byte* row) const {
    done.copy(to, row + head_block_ * p_.code_offset, p_.code_bytes);
    if (p_.scale_bytes == 0) return;
    done.copy(to + p_.code_bytes, row + p_.scales_at + head_block_ * p_.scale_offset,
              p_.scale_bytes);
  }
  /// A lane a key.
  __device__ void copy_words(unsigned char* keys, unsigned char* values, const PagePlace& from,
                             int count) const {
    for (int i = lane_; i < count; i += 32) {
      PagePlace at = from;
      at.advance(i, p_.page_tokens);
      copy_words_of_row(keys + i * stride(), row_of(p_.k, at.page, at.slot));
      copy_words_of_row(values + i * stride(), row_of(p_.v, at.page, at.slot));
    }
  }
  __device__ void copy_words_of_row(unsigned char* to, const std::byte* row) const {
    const std::byte* const codes = row + head_block_ * p_.code_offset;
    const std::byte* const scales = row + p_.scales_at + head_block_ * p_.scale_offset;
    for (int i = 0; i < p_.code_bytes; i += 8) Barrier::copy_word(to + i, codes + i);
    for (int i = 0; i < p_.scale_bytes; i += 8) {
      Barrier::copy_word(to + p_.code_bytes + i, scales + i);
    }
  }
  __device__ void copy_bytes(unsigned char* keys, unsigned char* values, PagePlace at,
                             int count) const {
    for (int key = 0; key < count; ++key) {
      const std::byte* const k = row_of(p_.k, at.page, at.slot);
      const std::byte* const v = row_of(p_.v, at.page, at.slot);
      for (int i = lane_; i < row_bytes(); i += 32) {
        const int from = i < p_.code_bytes
                             ? head_block_ * p_.code_offset + i
                             : p_.scales_at + head_block_ * p_.scale_offset + i - p_.code_bytes;
        keys[key * stride() + i] = static_cast<unsigned char>(k[from]);
        values[key * stride() + i] = static_cast<unsigned char>(v[from]);
      }
      at.advance(1, p_.page_tokens);
    }
  }

  const AttentionParams& p_;
  const Ring<kStages>& ring_;
  std::int32_t* pages_;
  int lane_;
  int head_block_ = 0;
  int first_page_ = 0;
};

}  // namespace lockstep::kernels
