/// What stands behind place_numbers.h. Inside kernels/exact/ only.
#pragma once

#include <cstdint>

#include "device/view.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {

// A unit is a warp's: so many rows of so many numbers, as if a weight were a matrix of such. Its
// first unit lacks what is missing at its beginning.
inline constexpr int kNumberRows = 16;
inline constexpr int kNumberCols = 256;
inline constexpr int kNumbersOfUnit = kNumberRows * kNumberCols;

struct NumbersItem {
  const float* from = nullptr;
  Bf16* to = nullptr;
  unsigned long long* bad = nullptr;
  std::uint32_t* sum = nullptr;
  std::int64_t numbers = 0;
  std::int64_t units_before = 0;  // of other items
};

struct NumbersTables {
  // What bits are worth in their row: of a lane's first two words and last two in each segment of
  // 32 numbers, of each word bits 8 t + g of it in word t.
  std::uint32_t bits[2][kNumberCols / 32][2][32][4];
  std::uint32_t of_rows[kNumberRows];  // x once for every bit of the rows that follow
  std::uint32_t of_units[256];         // ... of so many units
  std::uint32_t of_many[4096];         // ... of so many times 256 units
};
inline constexpr std::int64_t kMostNumberUnits = 256 * 4096;

void numbers_tables_cuda(NumbersTables* tables, Device device, Stream stream);
void place_numbers_cuda(const NumbersItem* items, std::int32_t count, std::int64_t units,
                        const NumbersTables* tables, Device device, Stream stream);

}  // namespace lockstep::kernels
