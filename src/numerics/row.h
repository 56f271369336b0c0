/// A record: what the rollout keeps of one token at one site, and what the trainer does with it.
///
/// A record is one row of bytes: elements, block scales, map bits where there are any, then the
/// row's global exponents.
/// The layout is defined here and not in record/, because a CUDA kernel writes it while it
/// quantizes. docs/formats/record.md draws it, with an example that a test reads.
#pragma once

#include <cstdint>

#include "numerics/quantizer.h"

namespace lockstep {

/// The trainer's rounding at a guided site. These six are the ablation arms of one kernel.
enum class Guidance : std::uint8_t {
  kOwnScale,      // round to nearest at the trainer's own scale; reads no record
  kRolloutScale,  // round to nearest at the rollout's scale
  kLsbScaleMod4,  // guided by the code's mantissa bit; two bits identify the scale
  kLsb,           // guided by the code's mantissa bit, at the rollout's scale (TRACE)
  kFullGuided,    // the end of the bracket that is nearer to the rollout's code
  kFullForced,    // the rollout's code itself
};

enum class Encoding : std::uint8_t {
  kNone,
  kScale,
  kLsbScaleMod4,
  kLsb,
  kCodes,
  kExperts8,   // ids of the chosen experts, where there are at most 256
  kExperts16,  // little-endian
  kBf16,
  kLsbScaleMod4Map,  // kLsbScaleMod4 and, of each block, whether its largest element became 4
  kCodes8,           // of E4M3 elements, a byte each
};

constexpr Encoding encoding_for(Guidance guidance) {
  switch (guidance) {
    case Guidance::kOwnScale: return Encoding::kNone;
    case Guidance::kRolloutScale: return Encoding::kScale;
    case Guidance::kLsbScaleMod4: return Encoding::kLsbScaleMod4;
    case Guidance::kLsb: return Encoding::kLsb;
    case Guidance::kFullGuided:
    case Guidance::kFullForced: return Encoding::kCodes;
  }
  return Encoding::kNone;
}

/// Four over six makes a residue ambiguous: the record says which map it belongs to. Codes of E4M3
/// are bytes.
constexpr Encoding encoding_for(Guidance guidance, const Quantizer& rule) {
  const bool maps = guidance == Guidance::kLsbScaleMod4 && rule.four_over_six != FourOverSix::kOff;
  const Encoding encoding = maps ? Encoding::kLsbScaleMod4Map : encoding_for(guidance);
  return rule.is_wide() && encoding == Encoding::kCodes ? Encoding::kCodes8 : encoding;
}

struct RowLayout {
  Encoding encoding = Encoding::kNone;
  std::int32_t width = 0;   // elements in the row; for kExperts*, experts per token
  std::int32_t block = 16;  // elements that share a scale; 0: the contract has their scale
  // Global scales of the row's own, 2^n, n as an int8 each: one for w13_in, one a slot for w2_in,
  // none for K and V, whose exponents stand in the contract.
  std::int32_t exponents = 1;

  constexpr std::int32_t element_bytes() const { return (width * element_bits() + 7) / 8; }
  constexpr std::int32_t blocks() const { return block > 0 ? width / block : 0; }
  constexpr std::int32_t scale_bytes() const { return (blocks() * scale_bits() + 7) / 8; }
  constexpr std::int32_t map_bytes() const {
    return encoding == Encoding::kLsbScaleMod4Map ? (blocks() + 7) / 8 : 0;
  }
  constexpr std::int32_t exponent_bytes() const { return scale_bits() > 0 ? exponents : 0; }
  constexpr std::int32_t bytes() const {
    return element_bytes() + scale_bytes() + map_bytes() + exponent_bytes();
  }
  friend constexpr bool operator==(const RowLayout&, const RowLayout&) = default;

 private:
  constexpr std::int32_t element_bits() const {
    switch (encoding) {
      case Encoding::kLsb:
      case Encoding::kLsbScaleMod4:
      case Encoding::kLsbScaleMod4Map: return 1;
      case Encoding::kCodes: return 4;
      case Encoding::kCodes8:
      case Encoding::kExperts8: return 8;
      case Encoding::kExperts16:
      case Encoding::kBf16: return 16;
      case Encoding::kNone:
      case Encoding::kScale: return 0;
    }
    return 0;
  }
  constexpr std::int32_t scale_bits() const {
    switch (encoding) {
      case Encoding::kScale:
      case Encoding::kLsb:
      case Encoding::kCodes:
      case Encoding::kCodes8: return 8;
      case Encoding::kLsbScaleMod4:
      case Encoding::kLsbScaleMod4Map: return 2;
      case Encoding::kNone:
      case Encoding::kExperts8:
      case Encoding::kExperts16:
      case Encoding::kBf16: return 0;
    }
    return 0;
  }
};

// The sizes of docs/formats/record.md for a row of 2048: 1.5, 1.125 and 4.5 bits an element.
static_assert(RowLayout{Encoding::kLsb, 2048}.bytes() == 2048 * 3 / 2 / 8 + 1);
static_assert(RowLayout{Encoding::kLsbScaleMod4, 2048}.bytes() == 2048 * 9 / 8 / 8 + 1);
static_assert(RowLayout{Encoding::kCodes, 2048}.bytes() == 2048 * 9 / 2 / 8 + 1);
// MXFP4: 1.25, 1.0625 and 4.25 bits; MXFP8 in full: 8.25.
static_assert(RowLayout{Encoding::kLsb, 2048, 32, 0}.bytes() == 2048 * 5 / 4 / 8);
static_assert(RowLayout{Encoding::kLsbScaleMod4, 2048, 32, 0}.bytes() == 2048 * 17 / 16 / 8);
static_assert(RowLayout{Encoding::kCodes, 2048, 32, 0}.bytes() == 2048 * 17 / 4 / 8);
static_assert(RowLayout{Encoding::kCodes8, 2048, 32, 0}.bytes() == 2048 * 33 / 4 / 8);

static_assert(RowLayout{Encoding::kLsbScaleMod4Map, 2048}.bytes() == 2048 * 19 / 16 / 8 + 1);

}  // namespace lockstep
