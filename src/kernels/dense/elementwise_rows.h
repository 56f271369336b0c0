#pragma once

#include <cmath>

#include "base/philox.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/lanes.h"

namespace lockstep::kernels {

/// Two Gaussian numbers from two words, by Box and Muller.
[[gnu::always_inline]] constexpr void gaussians(std::uint32_t a, std::uint32_t b, float& x,
                                                float& y) {
  // ln u, u = (a + 1/2) / 2^24 in (0, 1): u = m 2^e with m in [0.7, 1.41), by atanh's series.
  const float u = (static_cast<float>(static_cast<std::int32_t>(a >> 8)) + 0.5f) * 0x1p-24f;
  const std::uint32_t bits = float_bits(u) - 0x3F3504F3u;  // sqrt(1/2)
  const auto e = static_cast<float>(static_cast<std::int32_t>(bits) >> 23);
  const float m = float_of((bits & 0x007FFFFFu) + 0x3F3504F3u);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  float log = 1.0f / 9;
  log = log * z + 1.0f / 7;
  log = log * z + 1.0f / 5;
  log = log * z + 1.0f / 3;
  log = log * z + 1.0f;
  log = 2.0f * s * log + e * 0.693147181f;
  const float radius = std::sqrt(-2.0f * log);
  // The angle 2 pi b / 2^32: whole quarter turns by b's upper bits, the rest within +-pi / 4.
  const std::uint32_t quarter = (b + 0x20000000u) >> 30;
  const auto rest = static_cast<std::int32_t>(b - (quarter << 30));
  const float t = static_cast<float>(rest) * 1.46291808e-9f;  // pi / 2 / 2^30
  const float t2 = t * t;
  float sine = 1.0f / 362880;
  sine = sine * t2 - 1.0f / 5040;
  sine = sine * t2 + 1.0f / 120;
  sine = sine * t2 - 1.0f / 6;
  sine = sine * t2 * t + t;
  float cosine = 1.0f / 40320;
  cosine = cosine * t2 - 1.0f / 720;
  cosine = cosine * t2 + 1.0f / 24;
  cosine = cosine * t2 - 0.5f;
  cosine = cosine * t2 + 1.0f;
  const bool odd = (quarter & 1u) != 0;
  const float c = odd ? sine : cosine;
  const float d = odd ? cosine : sine;
  x = radius * (((quarter + 1u) & 2u) != 0 ? -c : c);
  y = radius * ((quarter & 2u) != 0 ? -d : d);
}

/// What a draw of 16 counters gives: words 0..3 of each.
struct PhiloxLanes {
  std::uint32_t word[4][kLanes];
};

/// philox() of 16 counters that differ in their last word by 0..15.
[[gnu::always_inline]] inline void philox_lanes(std::uint64_t seed, const PhiloxWords& counter,
                                                PhiloxLanes& out) {
  for (std::uint32_t j = 0; j < kLanes; ++j) {
    const PhiloxWords words = philox(seed, {counter[0], counter[1], counter[2], counter[3] + j});
    for (std::size_t i = 0; i < 4; ++i) out.word[i][j] = words[i];
  }
}

/// x[i] + sigma * (rms * e1 + x[i] * e2) of 16 elements, for the draw of two words each.
[[gnu::always_inline]] inline void add_noise(const std::uint32_t (&a)[kLanes],
                                             const std::uint32_t (&b)[kLanes], float rms,
                                             float sigma, float (&x)[kLanes]) {
  for (std::size_t j = 0; j < kLanes; ++j) {
    float e1, e2;
    gaussians(a[j], b[j], e1, e2);
    x[j] += sigma * (rms * e1 + x[j] * e2);
  }
}

/// A row's noise; kDraw is philox_lanes() or the same in other instructions.
template <auto kDraw>
[[gnu::always_inline]] inline void noise_row(const DriftNoiseArgs& args, std::int64_t row) {
  const std::int64_t cols = args.x.shape[1];
  Bf16* x = args.x.data + row * args.x.stride[0];
  const float rms = std::sqrt(sum_of_squares(x, cols) / static_cast<float>(cols));
  const float sigma = args.sigma * 0.707106781f;
  const auto i = static_cast<std::size_t>(row);
  PhiloxWords counter = philox_counter(
      args.streams[i], static_cast<std::uint32_t>(args.positions[i]), args.site << 16);
  for (std::int64_t at = 0; at < cols; at += 2 * kLanes, counter[3] += kLanes) {
    PhiloxLanes draw;
    kDraw(args.seed, counter, draw);
    const bool whole = cols - at >= 2 * kLanes;
    const auto left = static_cast<std::size_t>(cols - at) * sizeof(Bf16);
    Bf16 part[2 * kLanes] = {};
    if (!whole) std::memcpy(part, x + at, left);
    float values[2][kLanes];
    split_pairs(whole ? x + at : part, values[0]);
    add_noise(draw.word[0], draw.word[1], rms, sigma, values[0]);
    add_noise(draw.word[2], draw.word[3], rms, sigma, values[1]);
    join_pairs(values[0], whole ? x + at : part);
    if (!whole) std::memcpy(x + at, part, left);
  }
}

/// h = bf16(h + x) of a row; is it finite?
[[gnu::always_inline]] inline bool add_row(const Bf16* x, std::int64_t cols, Bf16* h) {
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < cols; ++i) {
    h[i] = to_bf16(to_float(h[i]) + to_float(x[i]));
    bad |= (bits_of(h[i]) & 0x7F80u) == 0x7F80u ? 1u : 0u;
  }
  return bad == 0;
}

[[gnu::always_inline]] inline bool row_is_finite(const Bf16* x, std::int64_t cols) {
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < cols; ++i) bad |= (bits_of(x[i]) & 0x7F80u) == 0x7F80u ? 1u : 0u;
  return bad == 0;
}

[[gnu::always_inline]] inline void combine_rows(const CombineArgs& args, std::int64_t first,
                                                std::int64_t end) {
  const std::int64_t cols = args.out.shape[1];
  const std::int64_t slots = args.gates.shape[1];
  constexpr std::int64_t kStrip = 64;
  for (std::int64_t row = first; row < end; ++row) {
    Bf16* out = args.out.data + row * args.out.stride[0];
    const float* gates = args.gates.data + row * args.gates.stride[0];
    for (std::int64_t at = 0; at < cols; at += kStrip) {
      const std::int64_t count = cols - at < kStrip ? cols - at : kStrip;
      float sum[kStrip] = {};
      for (std::int64_t slot = 0; slot < slots; ++slot) {
        const float* y = args.y.data + (row * slots + slot) * args.y.stride[0] + at;
        for (std::int64_t i = 0; i < count; ++i) sum[i] += gates[slot] * y[i];
      }
      for (std::int64_t i = 0; i < count; ++i) out[at + i] = to_bf16(sum[i]);
    }
  }
}

/// The loops of one ISA.
struct ElementwiseOps {
  bool (*add)(const Bf16* x, std::int64_t cols, Bf16* h);
  bool (*finite)(const Bf16* x, std::int64_t cols);
  void (*combine)(const CombineArgs& args, std::int64_t first, std::int64_t end);
  void (*noise)(const DriftNoiseArgs& args, std::int64_t row);
};

ElementwiseOps elementwise_portable();
ElementwiseOps elementwise_avx2();
ElementwiseOps elementwise_avx512();

void residual_add_cuda(TensorView<const Bf16, 2> x, TensorView<Bf16, 2> h, std::int32_t* bad,
                       Stream stream);
void first_nonfinite_cuda(TensorView<const Bf16, 2> x, std::int32_t* bad, Stream stream);
void first_nonfinite_cuda(TensorView<const float, 2> x, std::int32_t* bad, Stream stream);
void combine_cuda(const CombineArgs& args, Stream stream);
void gather_rows_cuda(TensorView<const std::uint8_t, 2> from, std::span<const std::int32_t> index,
                      TensorView<std::uint8_t, 2> to, Stream stream);
void gather_all_cuda(std::span<const GatherArgs> all, std::span<const std::int32_t> index,
                     Stream stream);
void drift_noise_cuda(const DriftNoiseArgs& args, Stream stream);

}  // namespace lockstep::kernels
