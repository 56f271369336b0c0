/// Between linear.cc and its backends: a block of rows against one panel.
#pragma once

#include "kernels/dense/linear.h"

namespace lockstep::kernels {

struct PanelArgs {
  const Bf16* x;  // [rows, in]
  std::int64_t x_stride;
  std::int64_t rows;
  const Bf16* panel;   // [in / 2, 32, 2]
  std::int64_t pairs;  // in / 2
  std::int64_t split;  // 0, or the pairs of the first half
  float* y;            // [rows, columns], or null
  Bf16* y_bf16;
  std::int64_t y_stride;
  const std::int32_t* to;  // [rows] of y, or null: in order
  std::int64_t columns;    // <= 32, the outputs that exist
};

/// Where row `row` of the block goes, in elements of y.
inline std::int64_t offset_of(const PanelArgs& args, std::int64_t row) {
  return (args.to == nullptr ? row : args.to[row]) * args.y_stride;
}

/// Throws Error unless the weight is a packed matrix.
void require_packed(const char* op, const PackedMatrix& weight);

/// `grouped`: by args.offsets, which lie on the device.
void linear_cuda(const GroupedLinearArgs& args, bool grouped, TensorView<Bf16, 2> y_bf16,
                 bool settled, Stream stream);
/// The same in the way of devices other than Hopper's, on any.
void linear_of_warps_cuda(const GroupedLinearArgs& args, bool grouped, TensorView<Bf16, 2> y_bf16,
                          Stream stream);

void linear_panel_portable(const PanelArgs& args);
void linear_panel_avx2(const PanelArgs& args);
void linear_panel_avx512_bf16(const PanelArgs& args);

}  // namespace lockstep::kernels
