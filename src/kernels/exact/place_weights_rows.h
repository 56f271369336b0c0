/// What stands behind place_weights.h. Inside kernels/exact/ only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

// A unit is 16 outputs of 64 columns; a warp has one of a step, which is as many matrices as fit.
inline constexpr int kPlacers = 24;     // warps of a block
inline constexpr int kMostOfStep = 16;  // matrices
inline constexpr int kUnitBits = 12;    // of a unit's number in its matrix
inline constexpr int kUnitNumbers = 1024;

/// A matrix on its way, as the kernel reads it.
struct PlacedMatrix {
  const float* master = nullptr;
  std::byte* expert = nullptr;
  unsigned long long* flips = nullptr;
  unsigned long long* bad = nullptr;
  std::uint32_t* sum = nullptr;
  const std::uint32_t* powers =
      nullptr;                  // [out, 2] x once for every bit behind a row: of codes, of scales
  std::byte* sample = nullptr;  // PlacedWeight's, or nullptr
  std::int32_t sample_step = 0;
  std::int32_t sample_rows = 0;
  std::int32_t chunks = 0;  // of 64 columns
  std::int32_t first = 0;   // its first unit in the step
  std::int32_t units = 0;
  float per_chunks = 0;  // 1 / chunks
};

struct PlaceStep {
  std::int32_t first = 0, count = 0;  // matrices
  std::int32_t units = 0;
  std::int32_t unused = 0;
};

struct PlaceArgs {
  const PlacedMatrix* matrices = nullptr;
  const PlaceStep* steps = nullptr;
  std::int32_t num_steps = 0;
  std::int32_t blocks = 0;
  float per_blocks = 0;
  std::uint32_t* seen = nullptr;  // [matrices, blocks] zero before: the amax of each block's units
  // By how many chunks follow in a row, [.., 2, 32] of four words and [.., 32] of one.
  const std::uint32_t* code_bits = nullptr;
  const std::uint32_t* scale_bits = nullptr;
  Quantizer rule{};
  double* parts = nullptr;  // [blocks, 2]
};

std::int32_t place_blocks(Device device);
void place_weights_cuda(const PlaceArgs& args, Device device, Stream stream);

/// Words of the tables for rows of up to so many chunks: code_bits, then scale_bits.
constexpr std::int64_t bit_words(std::int32_t chunks) { return std::int64_t{chunks} * 288; }
void place_bits_cuda(std::uint32_t* bits, std::int32_t chunks, Device device, Stream stream);

}  // namespace lockstep::kernels
