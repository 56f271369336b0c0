#include "cli/record_text.h"

#include <cmath>
#include <cstdint>

#include "base/bytes.h"
#include "base/text.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"

namespace lockstep::cli {
namespace {

constexpr int kNvBlock = 16;  // only NVFP4 has blocks of so many, others have E8M0 scales

std::uint32_t byte_at(std::span<const std::byte> bytes, std::int32_t i) {
  return static_cast<std::uint32_t>(bytes[static_cast<std::size_t>(i)]);
}

std::string hex_byte(std::uint32_t value) {
  constexpr const char* kDigits = "0123456789abcdef";
  return std::string("0x") + kDigits[value >> 4] + kDigits[value & 15];
}

/// The scale of block j: byte and value, or its two known bits.
std::string scale_text(const RowLayout& layout, std::span<const std::byte> scales, std::int32_t j) {
  if (layout.encoding == Encoding::kLsbScaleMod4 || layout.encoding == Encoding::kLsbScaleMod4Map) {
    const std::uint32_t residue = byte_at(scales, j / 4) >> 2 * (j % 4) & 3;
    if (layout.map_bytes() == 0) return cat({"scale = ", residue, " mod 4"});
    const bool four = (byte_at(scales, layout.scale_bytes() + j / 8) >> j % 8 & 1) != 0;
    return cat({"scale = ", residue, " mod 4, mapped to ", four ? 4 : 6});
  }
  const auto byte = static_cast<std::uint8_t>(byte_at(scales, j));
  const bool nvfp4 = layout.block == kNvBlock;
  const float value = nvfp4 ? to_float(static_cast<E4m3>(byte)) : to_float(static_cast<E8m0>(byte));
  const bool damaged = nvfp4 ? byte > kE4m3Max : byte == 0xff;
  return "scale " + hex_byte(byte) + " = " + (damaged ? "damaged" : cat({value}));
}

/// Element i: its code with the value beside, or its bit.
std::string element_text(const RowLayout& layout, std::span<const std::byte> row, std::int32_t i) {
  if (layout.encoding == Encoding::kCodes) {
    const std::uint32_t code = byte_at(row, i / 2) >> 4 * (i % 2) & 15;
    return cat({" ", to_float(static_cast<E2m1>(static_cast<std::uint8_t>(code)))});
  }
  if (layout.encoding == Encoding::kCodes8) {
    return cat({" ", to_float(static_cast<E4m3>(static_cast<std::uint8_t>(byte_at(row, i))))});
  }
  return byte_at(row, i / 8) >> (i % 8) & 1 ? "1" : "0";
}

std::string plain_text(const RowLayout& layout, std::span<const std::byte> row) {
  std::string text;
  for (std::int32_t i = 0; i < layout.width; ++i) {
    const auto at = static_cast<std::size_t>(i);
    text += layout.encoding == Encoding::kExperts8 ? cat({" ", byte_at(row, i)})
            : layout.encoding == Encoding::kExperts16
                ? cat({" ", get_le<std::uint16_t>(row, 2 * at)})
                : cat({" ", to_float(static_cast<Bf16>(get_le<std::uint16_t>(row, 2 * at)))});
  }
  return text;
}

}  // namespace

const char* site_name(Site site) {
  switch (site) {
    case Site::kW13In: return "w13_in";
    case Site::kW2In: return "w2_in";
    case Site::kK: return "k";
    case Site::kV: return "v";
    case Site::kRouter: return "router";
  }
  return "";
}

const char* encoding_name(Encoding encoding) {
  switch (encoding) {
    case Encoding::kNone: return "none";
    case Encoding::kScale: return "scale";
    case Encoding::kLsbScaleMod4: return "lsb_scale_mod4";
    case Encoding::kLsbScaleMod4Map: return "lsb_scale_mod4_map";
    case Encoding::kLsb: return "lsb";
    case Encoding::kCodes: return "codes";
    case Encoding::kExperts8: return "experts8";
    case Encoding::kExperts16: return "experts16";
    case Encoding::kBf16: return "bf16";
    case Encoding::kCodes8: return "codes8";
  }
  return "";
}

std::string record_text(const RowLayout& layout, std::span<const std::byte> row) {
  std::string text = encoding_name(layout.encoding);
  const bool codes = layout.encoding == Encoding::kCodes || layout.encoding == Encoding::kCodes8;
  if (layout.block == 0 && layout.encoding != Encoding::kBf16) {
    text += cat(
        {": ", layout.width, " elements whose scale stands in the contract\n ", codes ? "" : " "});
    for (std::int32_t i = 0; i < layout.width; ++i) text += element_text(layout, row, i);
    return text + "\n";
  }
  if (layout.scale_bytes() == 0) return text + ":" + plain_text(layout, row) + "\n";
  text += cat({": ", layout.width, " elements in blocks of ", layout.block});
  const auto exponents = row.subspan(
      static_cast<std::size_t>(layout.element_bytes() + layout.scale_bytes() + layout.map_bytes()));
  for (std::int32_t i = 0; i < layout.exponent_bytes(); ++i) {
    text += cat({i == 0 ? ", n = " : ", ", static_cast<std::int8_t>(byte_at(exponents, i))});
  }
  if (layout.exponents == 0 && layout.block == kNvBlock) text += ", n stands in the contract";
  text += '\n';
  const auto scales = row.subspan(static_cast<std::size_t>(layout.element_bytes()));
  for (std::int32_t j = 0; j < layout.blocks(); ++j) {
    text += cat({"  block ", j, ": ", scale_text(layout, scales, j)});
    if (layout.element_bytes() > 0) text += codes ? "; codes" : "; bits ";
    for (std::int32_t i = j * layout.block;
         layout.element_bytes() > 0 && i < (j + 1) * layout.block; ++i) {
      text += element_text(layout, row, i);
    }
    text += '\n';
  }
  return text;
}

}  // namespace lockstep::cli
