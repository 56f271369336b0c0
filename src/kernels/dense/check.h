/// What the ops of this folder require of their arguments.
#pragma once

#include <cstdint>
#include <span>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "device/view.h"

namespace lockstep::kernels {

inline const char* name_of_kind(Device device) {
  return device.kind == Device::Kind::kCuda ? "a CUDA device" : "the CPU";
}

/// Throws unless `view` is on `device`, has that shape and its rows are contiguous.
template <typename T>
void require_shape(const char* op, const char* name, const TensorView<T, 2>& view,
                   std::int64_t rows, std::int64_t cols, Device device = {}) {
  if (view.device != device) {
    throw Error(
        cat({op, ": ", name, " lies on ", name_of_kind(view.device), ", expected ",
             name_of_kind(device), ", for all operands of an op lie on one device that it has ",
             "a kernel for"}));
  }
  const bool whole = view.shape[0] == rows && view.shape[1] == cols;
  if (!whole || (cols > 1 && view.stride[1] != 1) || (rows > 0 && cols > 0 && view.empty())) {
    throw Error(cat({op, ": ", name, " is [", view.shape[0], ", ", view.shape[1], "] with strides ",
                     view.stride[0], ", ", view.stride[1], "; expected [", rows, ", ", cols,
                     "] with contiguous rows"}));
  }
}

/// Throws unless there is somewhere to put what is found of `rows` rows.
inline void require_bad(const char* op, const std::int32_t* bad, std::int64_t rows) {
  if (bad != nullptr || rows == 0) return;
  throw Error(cat({op, ": bad is null for ", rows, " rows; expected a number on their device"}));
}

/// Throws unless each of a list on the CPU lies in [0, end). A device's own are its kernel's
/// affair.
inline void require_below(const char* op, const char* name, std::span<const std::int32_t> list,
                          std::int64_t end) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i] >= 0 && list[i] < end) continue;
    throw Error(cat({op, ": ", name, "[", i, "] is ", list[i], "; expected 0..", end - 1}));
  }
}

/// A view of contiguous rows.
template <typename T>
TensorView<T, 2> rows_of(T* data, std::int64_t rows, std::int64_t cols, Device device = {}) {
  return {data, {rows, cols}, {cols, 1}, device};
}

/// Whether an op's operands lie on a CUDA device. Throws where this build has no kernels for one.
inline bool on_cuda(const char* op, Device device) {
  if (device.kind != Device::Kind::kCuda) return false;
  if (!build::has_cuda) {
    throw Error(cat({op, ": this build has no CUDA backend; build with -DLOCKSTEP_CUDA=ON or use ",
                     "device = \"cpu\""}));
  }
  return true;
}

}  // namespace lockstep::kernels
