#include "rollout/capture_rows.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "numerics/exponent.h"

namespace lockstep::rollout {
namespace {

/// kCodes of one token from `slots` packed rows that start at `row`: codes, scales, exponents if
/// `own` says that rows have some.
void pack_row(const PackedView<const std::uint8_t>& codes, std::int64_t row, std::int64_t slots,
              bool own, std::byte* out) {
  for (std::int64_t s = row; s < row + slots; ++s) {
    const auto bytes = static_cast<std::size_t>(codes.codes.shape[1]);
    std::memcpy(out, codes.codes.data + s * codes.codes.stride[0], bytes);
    out += bytes;
  }
  for (std::int64_t s = row; s < row + slots; ++s) {
    const auto bytes = static_cast<std::size_t>(codes.scales.shape[1]);
    std::memcpy(out, codes.scales.data + s * codes.scales.stride[0], bytes);
    out += bytes;
  }
  for (std::int64_t s = row; own && s < row + slots; ++s) {
    const float global =
        codes.global.empty() ? 1.0f : codes.global.data[s * codes.global.stride[0]];
    *out++ = static_cast<std::byte>(static_cast<std::int8_t>(exponent_of(global)));
  }
}

}  // namespace

void RowWriter::records(const KeptRows& kept, Place place, const RowLayout& layout,
                        TensorView<const std::uint8_t, 2> from) {
  const auto width = static_cast<std::size_t>(layout.bytes());
  const auto* data = reinterpret_cast<const std::byte*>(from.data);
  if (kept.all && from.stride[0] == layout.bytes()) {
    kept_.push_back({place, layout, {data, kept.keys.size() * width}});
    return;
  }
  const std::span<std::byte> out = room(kept.keys.size(), layout.bytes());
  for (std::size_t i = 0; i < kept.keys.size(); ++i) {
    std::memcpy(&out[i * width], data + kept.row(i) * from.stride[0], width);
  }
  kept_.push_back({place, layout, out});
}

void RowWriter::audits(const KeptRows& audited, Place place,
                       const PackedView<const std::uint8_t>& from, std::int64_t slots) {
  const RowLayout full = agreement_->layout(place, Encoding::kCodes);
  const std::span<std::byte> out = room(audited.keys.size(), full.bytes());
  for (std::size_t i = 0; i < audited.keys.size(); ++i) {
    pack_row(from, audited.row(i) * slots, slots, full.exponents > 0,
             &out[i * static_cast<std::size_t>(full.bytes())]);
  }
  audits_.push_back({place, full, out});
}

void RowWriter::numbers(const KeptRows& kept, Place place, TensorView<const Bf16, 2> from) {
  const RowLayout layout = agreement_->layout(place, Encoding::kBf16);
  const auto width = static_cast<std::size_t>(layout.bytes());
  const std::span<std::byte> out = room(kept.keys.size(), layout.bytes());
  for (std::size_t i = 0; i < kept.keys.size(); ++i) {
    std::memcpy(&out[i * width], from.data + kept.row(i) * from.stride[0], width);
  }
  kept_.push_back({place, layout, out});
}

void RowWriter::routes(const KeptRows& kept, Place place, TensorView<const std::int32_t, 2> from) {
  const RowLayout layout = agreement_->layout(place, agreement_->encoding(place));
  const std::int32_t count = agreement_->model.num_experts;
  const bool wide = layout.encoding == Encoding::kExperts16;
  const std::span<std::byte> out = room(kept.keys.size(), layout.bytes());
  std::byte* next = out.data();
  for (std::size_t i = 0; i < kept.keys.size(); ++i) {
    const std::int32_t* chosen = from.data + kept.row(i) * from.stride[0];
    for (std::int32_t k = 0; k < layout.width; ++k) {
      const std::int32_t expert = chosen[k];
      if (expert < 0 || expert >= count || std::find(chosen, chosen + k, expert) != chosen + k) {
        throw Error(cat({"layer ", place.layer.value, ", position ", kept.keys[i].position,
                         ": the router's choice ", k, " is expert ", expert,
                         ", which repeats or is none of ", count}));
      }
      *next++ = static_cast<std::byte>(expert & 0xff);
      if (wide) *next++ = static_cast<std::byte>(expert >> 8);
    }
  }
  kept_.push_back({place, layout, out});
}

std::span<std::byte> RowWriter::room(std::size_t rows, std::int32_t row_bytes) {
  if (used_ == rooms_.size()) rooms_.emplace_back();
  std::vector<std::byte>& room = rooms_[used_++];
  room.resize(rows * static_cast<std::size_t>(row_bytes));
  return room;
}

void RowWriter::forget() {
  kept_.clear();
  audits_.clear();
  used_ = 0;
}

void RowWriter::hand_on(std::span<const TokenKey> kept, std::span<const TokenKey> audited) {
  try {
    if (!kept_.empty()) sink_->append_all(kept, kept_);
    if (!audits_.empty()) sink_->append_all(audited, audits_);
  } catch (...) {
    forget();
    throw;
  }
  forget();
}

}  // namespace lockstep::rollout
