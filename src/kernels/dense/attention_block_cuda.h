/// For .cu files alone: keys and values as rows in shared memory, and how threads read them.
#pragma once

#include <cstdint>

#include "kernels/dense/attention_cuda.h"
#include "kernels/dense/attention_mma_cuda.h"

namespace lockstep::kernels {

__device__ inline std::uint32_t address_of(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// A block's heads of a row in shared memory: all codes, then all scales.
template <KvFormat kFormat, int kDim>
struct HeadBytes {
  static constexpr int kCodes = kFormat == KvFormat::kBf16   ? 2 * kDim
                                : kFormat == KvFormat::kE4m3 ? kDim
                                                             : kDim / 2;
  static constexpr int kScales = kFormat == KvFormat::kNvfp4   ? kDim / 16
                                 : kFormat == KvFormat::kMxfp4 ? kDim / 32
                                                               : 0;
  static constexpr int stride_of(int heads) { return (heads * (kCodes + kScales) + 15) / 16 * 16; }
};

/// From where on a thread reads in a block of keys, and in one of values, for a head whose codes
/// and scales begin at 0. Kept in shared memory: there are no registers for it.
struct ReadOffsets {
  int key, key_scales, even, even_scales;  // the value of an even column
  int odd, odd_scales;
};
struct LaneOffsets {
  int4 first[32];
  int2 second[32];

  /// By the threads of one warp.
  template <KvFormat kFormat, int kDim>
  __device__ void fill(int lane, int stride) {
    using HeadKey = Key<kFormat, kDim>;
    using HeadValues = Values<kFormat, kDim>;
    const int g = lane >> 2;
    const int t = lane & 3;
    const int key = key_of_column<kFormat>(g) * stride;
    const int even = key_of_column<kFormat>(2 * t) * stride;
    const int odd = key_of_column<kFormat>(2 * t + 1) * stride;
    first[lane] = make_int4(key + HeadKey::codes_of(t), key + HeadKey::scales_of(t),
                            even + HeadValues::codes_of(g), even + HeadValues::scales_of(g));
    second[lane] = make_int2(odd + HeadValues::codes_of(g), odd + HeadValues::scales_of(g));
  }
  __device__ ReadOffsets of(int lane) const {
    ReadOffsets x;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.key), "=r"(x.key_scales), "=r"(x.even), "=r"(x.even_scales)
                 : "r"(address_of(first + lane)));
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(x.odd), "=r"(x.odd_scales)
                 : "r"(address_of(second + lane)));
    return x;
  }
};

/// So many blocks behind its keys a block's values lie.
inline constexpr int kValuesBehind = 2;

/// A block of keys and their values as rows of a thread block's heads, of which one is read.
/// kHeads: of the block, or 0: p.block_heads.
template <KvFormat kFormat, int kDim, int kHeads>
class RowsOfBlock {
 public:
  using Bytes = HeadBytes<kFormat, kDim>;

  __device__ RowsOfBlock(const AttentionParams& p, const unsigned char* keys, int head,
                         const ReadOffsets& offsets)
      : p_(p), offsets_(offsets), codes_(keys + head * Bytes::kCodes) {
    scales_ = keys + (kHeads > 0 ? kHeads : p.block_heads) * Bytes::kCodes + head * Bytes::kScales;
  }

  __device__ Key<kFormat, kDim> key(int tile) const {
    Key<kFormat, kDim> key;
    key.read(codes_ + offsets_.key + 8 * tile * stride(),
             scales_ + offsets_.key_scales + 8 * tile * stride());
    return key;
  }

  /// Of tiles 2 u and 2 u + 1.
  __device__ Values<kFormat, kDim> values(int u) const {
    const int at = (kValuesBehind * keys_at_once(kFormat) + 16 * u) * stride();
    const int next = at + 8 * stride();
    const unsigned char* const even = codes_ + offsets_.even;
    const unsigned char* const odd = codes_ + offsets_.odd;
    const unsigned char* const even_scales = scales_ + offsets_.even_scales;
    const unsigned char* const odd_scales = scales_ + offsets_.odd_scales;
    Values<kFormat, kDim> values;
    values.read({even + at, odd + at, even + next, odd + next},
                {even_scales + at, odd_scales + at, even_scales + next, odd_scales + next});
    return values;
  }

 private:
  __device__ int stride() const { return kHeads > 0 ? Bytes::stride_of(kHeads) : p_.stride; }

  const AttentionParams& p_;
  ReadOffsets offsets_;
  const unsigned char* codes_;
  const unsigned char* scales_;
};

}  // namespace lockstep::kernels
