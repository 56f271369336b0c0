/// What the ops of this folder require of their arguments.
#pragma once

#include "base/error.h"
#include "base/text.h"
#include "device/view.h"

namespace lockstep::kernels {

/// Throws unless `view` is on the CPU, has that shape and its rows are contiguous.
template <typename T>
void require_shape(const char* op, const char* name, const TensorView<T, 2>& view,
                   std::int64_t rows, std::int64_t cols) {
  if (view.device != Device{}) {
    throw Error(cat({op, ": ", name,
                     " lies on a device that this op has no kernel for; move it "
                     "to the CPU"}));
  }
  const bool whole = view.shape[0] == rows && view.shape[1] == cols;
  if (!whole || (cols > 1 && view.stride[1] != 1) || (rows > 0 && cols > 0 && view.empty())) {
    throw Error(cat({op, ": ", name, " is [", view.shape[0], ", ", view.shape[1], "] with strides ",
                     view.stride[0], ", ", view.stride[1], "; expected [", rows, ", ", cols,
                     "] with contiguous rows"}));
  }
}

/// A view of contiguous rows.
template <typename T>
TensorView<T, 2> rows_of(T* data, std::int64_t rows, std::int64_t cols) {
  return {data, {rows, cols}, {cols, 1}};
}

}  // namespace lockstep::kernels
