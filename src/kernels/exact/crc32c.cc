#include "kernels/exact/crc32c.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "base/build.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/crc32c_rows.h"
#include "kernels/exact/gf2.h"
#include "numerics/exponent.h"

namespace lockstep::kernels {
namespace {

// A unit is a warp's; each costs as much as a kilobyte does, and all of a device's should have one.
constexpr std::int64_t kMostUnitBytes = 32 << 10;
constexpr std::int64_t kLeastUnitBytes = 2 << 10;
constexpr std::int64_t kUnits = 4096;
constexpr std::int64_t kGlobalBytes = 4;

/// Units of a row, or of rows that lie without gaps. The first is the one that is not whole.
void cut(const std::byte* data, std::int64_t bytes, std::uint32_t item, std::int64_t unit_bytes,
         std::vector<CrcUnit>& units) {
  for (std::int64_t first = 0; first < bytes;) {
    const std::int64_t rest = (bytes - first) % unit_bytes, some = rest > 0 ? rest : unit_bytes;
    units.push_back({data + first, static_cast<std::uint32_t>(some), 0, item, 0});
    first += some;
  }
}

/// x once for every bit of so many whole units, kept: lists of a refit are as those of the last.
std::uint32_t power_of_units(std::int64_t unit_bytes, std::size_t count) {
  thread_local std::map<std::int64_t, std::vector<std::uint32_t>> powers_of;
  std::vector<std::uint32_t>& powers = powers_of[unit_bytes];
  if (powers.empty()) powers.push_back(gf2::kOne);
  const std::uint32_t whole =
      count < powers.size() ? 0 : gf2::power(8 * static_cast<std::uint64_t>(unit_bytes));
  while (powers.size() <= count) powers.push_back(gf2::times(powers.back(), whole));
  return powers[count];
}

/// What the header says: m 2^n.
float global_of(const W4a4Weights& weights, std::int32_t expert) {
  std::int32_t exponent = 0;
  float less_one = 0.0f;
  std::memcpy(&exponent, weights.expert(expert), sizeof exponent);
  std::memcpy(&less_one, weights.expert(expert) + sizeof exponent, sizeof less_one);
  return std::ldexp(1.0f + less_one, exponent);
}

/// Puts the bytes of `values` behind those that are there, at a multiple of 16.
template <typename T>
std::int64_t append(std::vector<std::byte>& bytes, const std::vector<T>& values) {
  const std::size_t at = (bytes.size() + 15) / 16 * 16;
  bytes.resize(at + values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data() + at, values.data(), values.size() * sizeof(T));
  return static_cast<std::int64_t>(at);
}

}  // namespace

std::int64_t Crc32cList::add(std::span<const Rows> parts) {
  Item item;
  for (const Rows& part : parts) {
    if (part.shape[0] == 0 || part.shape[1] == 0) continue;
    if (part.device != device_ || part.stride[1] != 1) {
      throw Error("crc32c: the bytes must lie on the list's device, contiguous along a row");
    }
    item.bytes += part.shape[0] * part.shape[1];
    item.rows.push_back(part);
  }
  items_.push_back(std::move(item));
  return size() - 1;
}

std::int64_t Crc32cList::add(const W4a4Weights& weights, std::int32_t expert) {
  if (weights.device != device_) throw Error("crc32c: the weights must lie on the list's device");
  const std::int64_t elements = std::int64_t{weights.out} * weights.cols;
  items_.push_back(
      {.weights = weights, .expert = expert, .bytes = elements / 2 + elements / 16 + kGlobalBytes});
  return size() - 1;
}

std::uint32_t Crc32cList::crc_on_cpu(const Item& item) const {
  std::uint32_t crc = 0;
  if (item.weights.data == nullptr) {
    for (const Rows& part : item.rows) {
      for (std::int64_t row = 0; row < part.shape[0]; ++row) {
        const std::span bytes(part.data + row * part.stride[0],
                              static_cast<std::size_t>(part.shape[1]));
        crc = crc32c(std::as_bytes(bytes), crc);
      }
    }
    return crc;
  }
  const auto blocks = static_cast<std::size_t>(item.weights.cols / 16);
  std::vector<std::uint8_t> codes(8 * blocks);
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(item.weights.out) * blocks);
  for (std::int32_t row = 0; row < item.weights.out; ++row) {
    w4a4_read(item.weights, item.expert, row, codes,
              std::span(scales).subspan(static_cast<std::size_t>(row) * blocks, blocks));
    crc = crc32c(std::as_bytes(std::span(codes)), crc);
  }
  const float global = global_of(item.weights, item.expert);
  return crc32c(std::as_bytes(std::span(&global, 1)),
                crc32c(std::as_bytes(std::span(scales)), crc));
}

/// Units with the powers of what follows them, on the device.
void Crc32cList::prepare() {
  if (prepared_items_ == size()) return;
  std::int64_t all = 0;
  for (const Item& item : items_) all += item.weights.data == nullptr ? item.bytes : 0;
  const std::int64_t unit_bytes =
      std::clamp((all / kUnits + 1023) / 1024 * 1024, kLeastUnitBytes, kMostUnitBytes);
  std::vector<CrcUnit> units;
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<CrcExpert>> experts;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const auto number = static_cast<std::uint32_t>(i);
    const Item& item = items_[i];
    if (item.weights.data != nullptr) {
      const W4a4Weights& w = item.weights;
      experts[{w.out, w.cols}].push_back({w.expert(item.expert), number, 0});
      continue;
    }
    const std::size_t first = units.size();
    for (const Rows& part : item.rows) {
      const auto* data = reinterpret_cast<const std::byte*>(part.data);
      const auto [rows, cols] = part.shape;
      if (part.stride[0] == cols || rows == 1) {
        cut(data, rows * cols, number, unit_bytes, units);
        continue;
      }
      for (std::int64_t row = 0; row < rows; ++row) {
        cut(data + row * part.stride[0], cols, number, unit_bytes, units);
      }
    }
    std::uint32_t others = gf2::kOne;  // of what follows and is not whole
    std::size_t whole = 0;
    for (std::size_t u = units.size(); u-- > first;) {
      const std::uint32_t power = power_of_units(unit_bytes, whole);
      units[u].power = others == gf2::kOne ? power : gf2::times(others, power);
      if (units[u].bytes == unit_bytes) {
        ++whole;
      } else {
        others = gf2::times(others, gf2::power(8ull * units[u].bytes));
      }
    }
  }
  units_ = static_cast<std::int64_t>(units.size());
  if (!bytes_.empty()) synchronize(device_, stream_);
  bytes_.clear();
  append(bytes_, units);
  shapes_.clear();
  for (const auto& [shape, of_shape] : experts) {
    const auto [out, cols] = shape;
    Shape& made =
        shapes_.emplace_back(Shape{out, cols, append(bytes_, of_shape), std::ssize(of_shape),
                                   Buffer(device_, 4 * tile_bit_words(cols), stream_),
                                   Buffer(device_, 8 * std::int64_t{out}, stream_)});
    if constexpr (build::has_cuda) {
      tile_tables_cuda(made.bits.as<std::uint32_t>(), made.powers.as<std::uint32_t>(), out, cols,
                       device_, stream_);
    }
  }
  prepared_ = Buffer(device_, std::ssize(bytes_), stream_);
  copy_bytes(prepared_.as<void>(), device_, bytes_.data(), {}, std::ssize(bytes_), stream_);
  prepared_items_ = size();
}

void Crc32cList::launch(std::uint32_t* sums, Stream stream) {
  prepare();
  if constexpr (build::has_cuda) {
    const auto* base = prepared_.as<>();
    if (units_ > 0) {
      crc_rows_cuda(reinterpret_cast<const CrcUnit*>(base), units_, sums, device_, stream);
    }
    for (const Shape& shape : shapes_) {
      crc_tiles_cuda({.experts = reinterpret_cast<const CrcExpert*>(base + shape.first),
                      .count = shape.count,
                      .bits = shape.bits.as<std::uint32_t>(),
                      .powers = shape.powers.as<std::uint32_t>(),
                      .tile_bytes = W4a4Weights::tile_bytes(shape.cols),
                      .out = shape.out,
                      .chunks = (shape.cols + 63) / 64},
                     sums, device_, stream);
    }
    return;
  }
  throw Error("crc32c: the bytes are on a CUDA device, this build has no CUDA backend");
}

std::uint32_t Crc32cList::finish(std::int64_t item, std::uint32_t sum) const {
  return crc_of_sum(sum, items_[static_cast<std::size_t>(item)].bytes);
}

std::uint32_t crc_of_sum(std::uint32_t sum, std::int64_t bytes) {
  // Lengths are few and their powers dear: some microseconds each, of ten thousand weights.
  thread_local std::map<std::int64_t, std::uint32_t> of_zero;
  const auto [found, is_new] = of_zero.try_emplace(bytes);
  if (is_new) found->second = gf2::crc_of(0, static_cast<std::uint64_t>(bytes));
  return found->second ^ sum;
}

std::vector<std::uint32_t> Crc32cList::run() {
  std::vector<std::uint32_t> crcs(items_.size());
  if (items_.empty()) return crcs;
  if (device_.kind == Device::Kind::kCpu) {
    parallel_for(size(), 1, [&](std::int64_t first, std::int64_t end) {
      for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(end); ++i) {
        crcs[i] = crc_on_cpu(items_[i]);
      }
    });
    return crcs;
  }
  const Buffer sums(device_, 4 * size(), stream_);
  fill_bytes(sums.as<void>(), device_, 0, sums.bytes(), stream_);
  launch(sums.as<std::uint32_t>(), stream_);
  copy_bytes(crcs.data(), {}, sums.as<void>(), device_, sums.bytes(), stream_);
  synchronize(device_, stream_);
  for (std::int64_t i = 0; i < size(); ++i) {
    std::uint32_t& crc = crcs[static_cast<std::size_t>(i)];
    crc = finish(i, crc);
  }
  return crcs;
}

}  // namespace lockstep::kernels
