/// The rollout's expert product, exact: FP4 codes times FP4 codes in int64, one rounding at the
/// end. Any tiling, batch, thread or rank split gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/view.h"
#include "kernels/exact/isa.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

/// NVFP4 matrices in the order the product reads: `experts` of [out, cols], one after another.
/// A view; whoever owns the bytes keeps their address over refits.
///
/// An expert is a header of 64 bytes, then a tile for every 16 outputs, padded with zeros: for each
/// block of 16 columns 128 bytes of codes and 16 scale bytes, in the order that the device's
/// product reads. docs/formats/w4a4.md.
struct W4a4Weights {
  std::byte* data = nullptr;  // 64-byte aligned, experts * expert_bytes(out, cols)
  std::int32_t experts = 0;
  std::int32_t out = 0;
  std::int32_t cols = 0;
  Device device{};
  bool scaled = false;  // may an expert's global scale be no power of two? Read on a CUDA device

  static constexpr std::int64_t kHeaderBytes = 64;
  static constexpr std::int64_t tile_bytes(std::int32_t cols) {
    return (std::int64_t{cols} + 63) / 64 * 576;
  }
  static constexpr std::int64_t expert_bytes(std::int32_t out, std::int32_t cols) {
    return kHeaderBytes + (std::int64_t{out} + 15) / 16 * tile_bytes(cols);
  }
  constexpr std::byte* expert(std::int32_t index) const {
    return data + index * expert_bytes(out, cols);
  }
};

/// Writes rows [first_row, first_row + rows.codes.shape[0]) of one expert; gate and up go to one
/// matrix of 2F rows by two calls, which must agree on the exponent. Bytes that the call does not
/// name stay as they are, so zero the memory once before the first fill. Not for use beside a
/// product that reads the same expert.
///
/// `rule` says what rows.global holds (Quantizer::stored_global); by default the factor itself, as
/// under every power of two.
///
/// Throws Error if cols is not a multiple of 16, a scale byte is above 0x7E, or the global scale is
/// not one finite number for all rows: nothing is written then. On a CUDA device the numbers are
/// not looked at, quantize() wrote them; a rule whose global scale is no power of two wants weights
/// that say so.
void w4a4_fill(const W4a4Weights& weights, std::int32_t expert, std::int32_t first_row,
               const PackedView<const std::uint8_t>& rows, Stream stream = {},
               const Quantizer& rule = {});

/// What w4a4_fill asks of numbers that lie on the host; for such as are on their way to a device.
void w4a4_require(const PackedView<const std::uint8_t>& rows, const Quantizer& rule = {});

/// Reads a row of one expert back as w4a4_fill took it: codes [cols / 2], scales [cols / 16]. On a
/// CPU.
void w4a4_read(const W4a4Weights& weights, std::int32_t expert, std::int32_t row,
               std::span<std::uint8_t> codes, std::span<std::uint8_t> scales);

struct W4a4Args {
  // Codes [rows, cols / 2], scales [rows, cols / 16], global [rows]; from quantize().
  PackedView<const std::uint8_t> a;
  // Residual compensation: codes of Q(a) - a under 2^(n - 2), of a's shape; from residual(). Its
  // `global` is not read. Empty: none.
  PackedView<const std::uint8_t> residual{};
  W4a4Weights w;
  // Items: item i is row from[i] of `a` times the expert whose range [offsets[e], offsets[e + 1])
  // holds i, and goes to row to[i] of `out`. Empty offsets: all items belong to expert 0. Empty
  // from or to: i itself.
  TensorView<const std::int32_t, 1> offsets{};  // [experts + 1]
  TensorView<const std::int32_t, 1> from{};     // [items]
  TensorView<const std::int32_t, 1> to{};       // [items], each row of `out` at most once
  TensorView<float, 2> out;                     // [>= items, w.out]; rows no item names stay
  // The residual counts half, so many times: 0, 1 or 2. An alpha of one half is 1.
  std::int32_t residual_halvings = 0;
  Quantizer rule{};  // of a: what its global holds; by default the factor itself
  // On a CUDA device, where a's or w's global scale is no power of two: a number for each row of a.
  std::span<float> room{};
};

/// out[to[i]] = a[from[i]] . w[expert of i]:
///   ldexpf(RNE_f32(acc), n_a + n_w - 20), or with a residual
///   ldexpf(RNE_f32(4 * acc_a - acc_residual), n_a + n_w - 22), and with h halvings
///   ldexpf(RNE_f32(2^(2 + h) * acc_a - acc_residual), n_a + n_w - 22 - h).
/// where 2^n is the global scale, or its largest power of two: a scale g = m 2^n that is none
/// (1 < m < 2) leaves m to two more roundings, out * (m_a * m_w), the product in brackets first.
/// Under powers of two it rounds a second time only below 2^-126; overflow is +-Inf; acc = 0 gives
/// +0.
///
/// A residual needs a power of two on the activations' side, on a CUDA device on both. Every
/// backend returns the same bytes. On a CUDA device offsets, from and to lie there, and what stands
/// in them is not looked at. Throws Error naming the argument.
void w4a4(const W4a4Args& args, Stream stream = {});

/// The same on a CPU by named instructions, for tests and benchmarks.
void w4a4_on(const W4a4Args& args, Isa isa);

}  // namespace lockstep::kernels
