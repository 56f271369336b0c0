/// Products of BF16 operands with FP32 sums, and the layout in which they read a weight.
#pragma once

#include <cstdint>
#include <span>

#include "device/view.h"

namespace lockstep::kernels {

/// Outputs that lie side by side in a packed matrix.
inline constexpr std::int64_t kPanel = 32;

/// A matrix [out, in] as the products read it: panels of 32 outputs; in a panel, pairs of inputs;
/// in a pair, output by output, even input first. Element (o, i) lies at
///   (o / 32 * in + i / 2 * 2) * 32 + o % 32 * 2 + i % 2
/// and what the last panel lacks in outputs is 0.
///
/// On a CUDA device the rows lie as they are, element (o, i) at o * in + i, with the same padding.
struct PackedMatrix {
  Bf16* data = nullptr;
  std::int64_t out = 0;
  std::int64_t in = 0;  // even
  Device device{};
};

/// Elements of a packed matrix, padding included.
std::int64_t packed_elements(std::int64_t out, std::int64_t in);

/// Writes `rows` [n, in] as the outputs first..first+n-1 of `into`, and zeros past its last output.
/// Onto a CUDA device rows may come from the CPU: then the call waits.
void pack_rows(TensorView<const Bf16, 2> rows, std::int64_t first, const PackedMatrix& into,
               Stream stream = {});

/// Reads output `row` of `from` back, to the CPU.
void unpack_row(const PackedMatrix& from, std::int64_t row, std::span<Bf16> into);

struct LinearArgs {
  TensorView<const Bf16, 2> x;   // [rows, in]
  PackedMatrix weight;           // [out, in]
  TensorView<float, 2> y{};      // [rows, out], or
  TensorView<Bf16, 2> y_bf16{};  // [rows, out] rounded once
  bool split_k = false;          // the declared drift: see below
  bool settled = false;          // the weight: see below
};

/// y = x * weight^T.
///
/// Each output is one chain of FP32 fused multiply-adds over its inputs, pair after pair, the odd
/// one of a pair first, so that it depends on its own row and K alone: not on how many rows there
/// are, nor on tiles or threads. With split_k the inputs are summed in two halves (the first of
/// in / 2 rounded down to even), each sum rounded to BF16, and the two added in FP32.
///
/// On a CUDA device an output is the sum, in order, of 4 such sums over a quarter of the inputs
/// each (8 before and after Hopper), by tensor cores: another order than the CPU's, and as
/// independent of everything else. `in` is a multiple of 32 there, with split_k of 64; spans lie on
/// the device and are not looked at. Where the weight is settled, so that the stream's launch
/// before this one does not write it, it may be read while that one still runs. Tolerance class.
/// The ISAs give the same bits except where vdpbf16ps flushes a subnormal. Throws Error naming the
/// argument, its value and what was expected.
void linear_bf16(const LinearArgs& args, Stream stream);

struct GroupedLinearArgs {
  TensorView<const Bf16, 2> x;  // [rows, in], the rows of a group together
  std::span<const std::int32_t>
      offsets;  // [groups + 1] group g has rows offsets[g]..offsets[g+1]-1
  // [groups, packed_elements(out, in)]; `weights` has the shape of one of them
  PackedMatrix weights;
  std::span<const std::int32_t> to{};  // [rows] of y, each once; empty: row i of x gives row i of y
  TensorView<float, 2> y;              // [rows, out]
  bool split_k = false;
};

/// The same product with a weight for each group of rows; a group may be empty.
void grouped_linear_bf16(const GroupedLinearArgs& args, Stream stream);

}  // namespace lockstep::kernels
