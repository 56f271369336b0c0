#pragma once

#include <cstdint>
#include <span>

#include "device/view.h"

namespace lockstep::kernels {

struct DispatchArgs {
  TensorView<const std::int32_t, 2> experts;  // [rows, K], each of 0 .. num_experts - 1
  std::int32_t num_experts = 0;
  std::span<std::int32_t> offsets;  // [num_experts + 1]
  std::span<std::int32_t> row_of;   // [rows * K]
  std::span<std::int32_t> slot_of;  // [rows * K]
  // On a CUDA device dispatch_room() numbers of scratch, for thousands of items: many blocks of
  // threads in three launches, where without it there is one. The result is the same.
  std::span<std::int32_t> room{};
};

inline constexpr std::int64_t kDispatchItems = 2048;  // of a block, where there are many

constexpr std::int64_t dispatch_room(std::int64_t items, std::int64_t num_experts) {
  return (items + kDispatchItems - 1) / kDispatchItems * num_experts;
}

/// Sorts the items, pairs of a row and a slot, by expert, rows in order within each: items
/// offsets[e] .. offsets[e + 1] - 1 are expert e's, item i is of row row_of[i], and slot_of[i] is
/// row * K + slot. All of it lies where `experts` does; on a CUDA device nothing is
/// allocated and nobody waits. Throws Error naming what is wrong.
void dispatch(const DispatchArgs& args, Stream stream);

}  // namespace lockstep::kernels
