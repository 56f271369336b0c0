/// For .cu files alone: rows of the cache on their way into shared memory.
#pragma once

#include <cstdint>

#include "device/cuda/arrivals.h"
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
  /// Once what this thread copies by words is there.
  __device__ void arrive_later() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at_) : "memory");
  }
  __device__ void wait(unsigned parity) const {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(at_),
        "r"(parity)
        : "memory");
  }

 private:
  std::uint32_t at_;
};

/// Keys of a half of the splits, or their values, which have places in the ring for themselves.
inline constexpr int kTracks = 4;
constexpr int track_of(bool is_value, int half) { return 2 * (is_value ? 1 : 0) + half; }

inline constexpr int kBarrierBytes = 256;  // for a ring's

/// Where things lie in shared memory; sizes are the host's too.
struct SharedLayout {
  int walks;     // of the threads that take keys
  int places;    // in the ring, of the same
  int offsets;   // LaneOffsets
  int queries;   // of the warps
  int meetings;  // of those that have a half of a split each
  int stages;
  int stage_bytes;
  int totals;  // of the folded splits
  int pages;   // of each track
  int bytes;

  /// `query_bytes` of a warp, `meeting_bytes` of a head, `stage_size` of `stage_count` blocks of
  /// keys or values.
  __host__ __device__ SharedLayout(const AttentionParams& p, int heads, int query_bytes,
                                   int meeting_bytes, int stage_size, int stage_count) {
    walks = kBarrierBytes;
    places = walks + 256 * 12;
    offsets = places + 256 * 4;
    queries = offsets + static_cast<int>(sizeof(LaneOffsets));
    meetings = queries + 2 * heads * query_bytes;
    stages = (meetings + heads * meeting_bytes + 127) / 128 * 128;
    stage_bytes = stage_size;
    totals = stages + stage_count * stage_size;
    pages = totals + (p.sums == nullptr ? heads * meeting_bytes : 0);
    bytes = pages + kTracks * page_bytes(p);
  }
  /// Of one track's: a split touches so many.
  static __host__ __device__ int page_bytes(const AttentionParams& p) {
    return (kSplitKeys / p.page_tokens + 2) * 4;
  }
};

/// Where a track is in the ring: it has every fourth place, and goes over them in turn. So whoever
/// waits for a place has seen all that was there before, and one bit tells what is there from what
/// was.
class RingPlace {
 public:
  __device__ explicit RingPlace(int track) : code_(8 * static_cast<unsigned>(track)) {}
  /// In one number.
  __device__ unsigned code() const { return code_; }
  static __device__ RingPlace of(unsigned code) {
    RingPlace place(0);
    place.code_ = code;
    return place;
  }

  __device__ unsigned at() const { return code_ / 8; }
  __device__ unsigned parity() const { return code_ & 1; }
  /// Where the values of these keys are.
  __device__ RingPlace values() const { return of(code_ + 8 * track_of(true, 0)); }
  __device__ void next(int stages) {
    code_ += 8 * kTracks;
    if (code_ >= 8u * static_cast<unsigned>(stages)) code_ = (code_ - 8u * stages) ^ 1;
  }

 private:
  unsigned code_;
};

/// Places for blocks of keys or values, each track's filled by one warp and emptied by others.
template <int kStages>
class Ring {
 public:
  static_assert(kStages % kTracks == 0 && 16 * kStages <= kBarrierBytes);

  __device__ Ring(unsigned char* shared, const SharedLayout& layout)
      : shared_(shared), stages_(shared + layout.stages), stage_bytes_(layout.stage_bytes) {}

  /// By all threads, before a barrier of theirs. `writers`: arrivals that fill a block. `readers`:
  /// warps that read it.
  __device__ void start(int writers, int readers) const {
    if (threadIdx.x < kStages) {
      full(threadIdx.x).start(writers);
      empty(threadIdx.x).start(readers * cuda::kArrivals);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __device__ unsigned char* stage(const RingPlace& place) const {
    return stages_ + place.at() * static_cast<unsigned>(stage_bytes_);
  }
  __device__ Barrier full(const RingPlace& place) const { return full(place.at()); }
  /// Nothing is waited for the first time.
  __device__ void wait_empty(const RingPlace& place) const {
    empty(place.at()).wait(place.parity() ^ 1);
  }
  __device__ void wait_full(const RingPlace& place) const { full(place).wait(place.parity()); }
  /// By a warp that has read the block.
  __device__ void release(const RingPlace& place, int lane) const {
    __syncwarp();
    if (cuda::arrives(lane)) empty(place.at()).arrive();
  }

 private:
  __device__ Barrier full(unsigned at) const {
    return Barrier(reinterpret_cast<std::uint64_t*>(shared_) + at);
  }
  __device__ Barrier empty(unsigned at) const {
    return Barrier(reinterpret_cast<std::uint64_t*>(shared_) + kStages + at);
  }

  unsigned char* shared_;
  unsigned char* stages_;
  int stage_bytes_;
};

/// A place in a sequence's pages.
struct PagePlace {
  int page = 0;  // from the first of those looked up
  int slot = 0;

  __device__ void advance(int tokens, int page_tokens) {
    slot += tokens;
    for (; slot >= page_tokens; slot -= page_tokens) ++page;
  }
};

/// A warp that brings one track's keys or values into shared memory: rows `kStride` apart, or
/// p.stride.
template <int kKeys, int kStages, int kStride>
class Loader {
 public:
  __device__ Loader(const AttentionParams& p, const Ring<kStages>& ring, unsigned char* shared,
                    const SharedLayout& layout, int track)
      : p_(p),
        ring_(ring),
        pages_(reinterpret_cast<std::int32_t*>(shared + layout.pages +
                                               track * SharedLayout::page_bytes(p))),
        lane_(static_cast<int>(threadIdx.x) & 31),
        is_value_(track >= track_of(true, 0)) {}

  /// Goes to positions begin..end-1 of a sequence.
  __device__ PagePlace find(const std::int32_t* table, int begin, int end, int head_block) {
    head_block_ = head_block;
    const int first = begin / p_.page_tokens;
    const int count = (end - 1) / p_.page_tokens - first + 1;
    __syncwarp();
#pragma unroll 1
    for (int i = lane_; i < count; i += 32) pages_[i] = table[first + i];
    __syncwarp();
    return {0, begin - first * p_.page_tokens};
  }

  /// Copies `count` keys or values from a place on, once there is room at `to`.
  __device__ void start(const RingPlace& to, const PagePlace& from, int count) const {
    ring_.wait_empty(to);
    unsigned char* const rows = ring_.stage(to);
    const Barrier done = ring_.full(to);
    if (is_value_ && count < kKeys) {  // behind what a copy of whole 16 bytes brings
      const int end = whole(count * stride());
      clear(rows + end, kKeys * stride() - end);
    }
    if (p_.copy == KvCopy::kWords) {
      copy_words(rows, from, count);
      done.arrive_later();
      if (cuda::arrives(lane_)) done.arrive();  // with what was cleared
      return;
    }
    if (p_.copy == KvCopy::kBytes) {
      copy_bytes(rows, from, count);
      return done.arrive();
    }
    if (p_.copy == KvCopy::kRuns) return copy_runs(done, rows, from, count);
    announce(done, count * row_bytes());
    copy_rows(done, rows, from, count);
  }
  /// Arrivals that fill a block.
  static __device__ int writers(const AttentionParams& p) {
    return p.copy == KvCopy::kWords   ? 32 + cuda::kArrivals
           : p.copy == KvCopy::kBytes ? 32
                                      : cuda::kArrivals;
  }

 private:
  __device__ int stride() const { return kStride > 0 ? kStride : p_.stride; }
  __device__ int row_bytes() const { return p_.code_bytes + p_.scale_bytes; }
  /// Where in a row the block's heads have their i-th byte.
  __device__ int in_row(int i) const {
    return i < p_.code_bytes ? head_block_ * p_.code_offset + i
                             : p_.scales_at + head_block_ * p_.scale_offset + i - p_.code_bytes;
  }
  __device__ const std::byte* row_of(int page, int slot) const {
    const KvSide& side = is_value_ ? p_.v : p_.k;
    return side.pool + pages_[page] * side.page_bytes + slot * p_.row_bytes;
  }

  /// What lies past the last key: it meets probabilities of 0.
  __device__ void clear(unsigned char* at, int bytes) const {
#pragma unroll 1
    for (int i = 4 * lane_; i < bytes; i += 128) *reinterpret_cast<std::uint32_t*>(at + i) = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }

  /// A lane a page. What is read beyond the last row, to a whole number of 16 bytes, is the page's
  /// and codes, whose scales are 0.
  __device__ void copy_runs(const Barrier& done, unsigned char* rows, const PagePlace& from,
                            int count) const {
    announce(done, whole(count * row_bytes()));
#pragma unroll 1
    for (int i = lane_;; i += 32) {
      const int slot = i == 0 ? from.slot : 0;
      const int to = i * p_.page_tokens - (from.slot - slot);
      if (to >= count) break;
      done.copy(rows + to * stride(), row_of(from.page + i, slot),
                whole(min(p_.page_tokens - slot, count - to) * row_bytes()));
    }
    __syncwarp();
  }
  static __device__ int whole(int bytes) { return (bytes + 15) & ~15; }
  /// Before any lane copies.
  __device__ void announce(const Barrier& done, int bytes) const {
    if (lane_ == 0) {
      done.expect(bytes);
    } else if (cuda::arrives(lane_)) {
      done.arrive();
    }
    __syncwarp();
  }
  /// A lane a key.
  __device__ void copy_rows(const Barrier& done, unsigned char* rows, const PagePlace& from,
                            int count) const {
#pragma unroll 1
    for (int i = lane_; i < count; i += 32) {
      PagePlace at = from;
      at.advance(i, p_.page_tokens);
      unsigned char* const to = rows + i * stride();
      const std::byte* const row = row_of(at.page, at.slot);
      done.copy(to, row + head_block_ * p_.code_offset, p_.code_bytes);
      if (p_.scale_bytes == 0) continue;
      done.copy(to + p_.code_bytes, row + p_.scales_at + head_block_ * p_.scale_offset,
                p_.scale_bytes);
    }
  }
  __device__ void copy_words(unsigned char* rows, PagePlace at, int count) const {
    int from = 4 * lane_;  // in a row
    for (int key = 0;;) {
      for (; from >= row_bytes(); from -= row_bytes()) {
        ++key;
        at.advance(1, p_.page_tokens);
      }
      if (key >= count) return;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                       address_of(rows + key * stride() + from)),
                   "l"(row_of(at.page, at.slot) + in_row(from))
                   : "memory");
      from += 128;
    }
  }
  __device__ void copy_bytes(unsigned char* rows, PagePlace at, int count) const {
#pragma unroll 1
    for (int key = 0; key < count; ++key) {
      const std::byte* const row = row_of(at.page, at.slot);
#pragma unroll 1
      for (int i = lane_; i < row_bytes(); i += 32) {
        rows[key * stride() + i] = static_cast<unsigned char>(row[in_row(i)]);
      }
      at.advance(1, p_.page_tokens);
    }
  }

  const AttentionParams& p_;
  const Ring<kStages>& ring_;
  std::int32_t* pages_;
  int lane_;
  bool is_value_;
  int head_block_ = 0;
};

}  // namespace lockstep::kernels
