#include "rollout/capture_device.h"

#include <algorithm>
#include <bit>

#include "kernels/dense/elementwise.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kPieceAlignment = 256;
constexpr std::int64_t kLateRows = 512;  // of passes that keep all codes
constexpr std::size_t kForms = 4, kSites = 8;

constexpr std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

/// Codes that lie in rows, a token's slots in one.
TensorView<const std::uint8_t, 2> by_token(const TensorView<const std::uint8_t, 2>& rows,
                                           std::int64_t slots) {
  const std::int64_t cols = rows.shape[1] * slots;
  return {rows.data, {rows.shape[0] / slots, cols}, {cols, 1}, rows.device};
}

}  // namespace

DeviceCapture::DeviceCapture(Workplace& at, std::int32_t layers, std::vector<Wanted> wanted)
    : at_(&at),
      wanted_(std::move(wanted)),
      index_(static_cast<std::size_t>(layers) * kForms * kSites, -1),
      behind_{at.device, at.stream},
      upload_(at),
      late_upload_(behind_),
      arena_(at),
      codes_(at),
      copies_(at.device),
      done_(at.device),
      copied_(at.device) {}

std::size_t DeviceCapture::slot_of(Form form, Place place) {
  return (static_cast<std::size_t>(place.layer.value) * kForms + static_cast<std::size_t>(form)) *
             kSites +
         static_cast<std::size_t>(place.site);
}

const DeviceCapture::Kept* DeviceCapture::find(Form form, Place place) const {
  const std::int32_t at = index_[slot_of(form, place)];
  return at < 0 ? nullptr : &now_.places[static_cast<std::size_t>(at)];
}

void DeviceCapture::begin(std::int64_t rows, const KeptRows& kept, const KeptRows& audited) {
  std::fill(index_.begin(), index_.end(), -1);
  now_.kept = kept;
  now_.audited = audited;
  now_.places.clear();
  now_.bytes = 0;
  is_now_ = false;
  // Filled up to a number of which there are few, with a row that nobody reads there.
  audit_rows_ = audited.rows;
  if (!audit_rows_.empty()) {
    audit_rows_.resize(std::bit_ceil(std::max<std::size_t>(audit_rows_.size(), 4)));
  }
  rows_ = rows;
  code_bytes_ = 0;
  gathers_ = false;
  if (kept.empty()) return;
  bool numbers = false;
  for (const Wanted& wanted : wanted_) {
    switch (wanted.form) {
      case Form::kRecords:
      case Form::kRoutes: add(wanted, rows); break;
      case Form::kNumbers:
        numbers = true;
        add(wanted, std::ssize(kept.keys));
        break;
      case Form::kAudits: break;
    }
  }
  // Behind the others, whose places a graph knows.
  for (const Wanted& wanted : wanted_) {
    if (wanted.form == Form::kAudits) add_audits(wanted);
  }
  copied_.hold_back(at_->stream);
  there_ = static_cast<std::byte*>(arena_.take(now_.bytes));
  codes_.take(code_bytes_);
  if (!numbers && !gathers_) return;
  upload_.begin();
  // First, so that its place follows from its own size, of which a graph knows: how many rows are
  // kept changes under one graph.
  audit_index_ = upload_.add(
      std::span<const std::int32_t>(audit_rows_.data(), gathers_ ? audit_rows_.size() : 0));
  kept_index_ = upload_.add(
      std::span<const std::int32_t>(now_.kept.rows.data(), numbers ? now_.kept.rows.size() : 0));
  upload_.send();
}

/// Codes are kept in every pass that may: with audit tokens or without, it is one graph.
void DeviceCapture::add_audits(const Wanted& wanted) {
  const bool late = wanted.late && rows_ <= kLateRows;
  const std::int64_t codes = code_bytes_;
  if (late) {
    code_bytes_ += aligned(rows_ * wanted.cols) + aligned(rows_ * wanted.scale_bytes) +
                   aligned(rows_ * std::int64_t{sizeof(float)});
  }
  if (audit_rows_.empty() && !late) return;
  add(wanted, std::ssize(audit_rows_));
  if (late) now_.places.back().codes = codes;
  gathers_ |= !late;
}

std::int64_t DeviceCapture::reserve(std::int64_t bytes) {
  const std::int64_t offset = now_.bytes;
  now_.bytes += aligned(bytes);
  return offset;
}

void DeviceCapture::add(const Wanted& wanted, std::int64_t rows) {
  index_[slot_of(wanted.form, wanted.place)] = static_cast<std::int32_t>(now_.places.size());
  Kept& kept = now_.places.emplace_back();
  kept = {.wanted = &wanted, .rows = rows, .offset = reserve(rows * wanted.cols)};
  if (wanted.form != Form::kAudits) return;
  kept.scales = reserve(rows * wanted.slots * wanted.scale_bytes);
  kept.global = reserve(rows * wanted.slots * std::int64_t{sizeof(float)});
}

TensorView<std::uint8_t, 2> DeviceCapture::records(Place place) const {
  const Kept* kept = find(Form::kRecords, place);
  if (kept == nullptr) return {};
  const std::int64_t cols = kept->wanted->cols;
  return {reinterpret_cast<std::uint8_t*>(of(*kept)), {kept->rows, cols}, {cols, 1}, at_->device};
}

TensorView<std::int32_t, 2> DeviceCapture::routes(Place place) const {
  const Kept* kept = find(Form::kRoutes, place);
  if (kept == nullptr) return {};
  const std::int64_t slots = kept->wanted->cols / std::int64_t{sizeof(std::int32_t)};
  return {reinterpret_cast<std::int32_t*>(of(*kept)), {kept->rows, slots}, {slots, 1}, at_->device};
}

PackedView<std::uint8_t> DeviceCapture::codes(Place place) const {
  const Kept* kept = find(Form::kAudits, place);
  if (kept == nullptr || kept->codes < 0) return {};
  return codes_of(*kept->wanted, kept->codes);
}

/// Of all rows of the pass.
PackedView<std::uint8_t> DeviceCapture::codes_of(const Wanted& wanted, std::int64_t offset) const {
  auto* const codes = codes_.data<std::uint8_t>() + offset;
  auto* const scales = codes + aligned(rows_ * wanted.cols);
  auto* const global = scales + aligned(rows_ * wanted.scale_bytes);
  return {.codes = {codes, {rows_, wanted.cols}, {wanted.cols, 1}, at_->device},
          .scales = {scales, {rows_, wanted.scale_bytes}, {wanted.scale_bytes, 1}, at_->device},
          .global = {reinterpret_cast<float*>(global), {rows_}, {1}, at_->device}};
}

void DeviceCapture::take_numbers(Place place, TensorView<const Bf16, 2> x) {
  const Kept* kept = find(Form::kNumbers, place);
  if (kept == nullptr) return;
  const std::int64_t width = x.shape[1];
  kernels::gather_rows(
      x, upload_.get<std::int32_t>(kept_index_),
      {reinterpret_cast<Bf16*>(of(*kept)), {kept->rows, width}, {width, 1}, at_->device},
      at_->stream);
}

void DeviceCapture::take_audits(Place place, const PackedView<const std::uint8_t>& codes) {
  const Kept* kept = find(Form::kAudits, place);
  if (kept == nullptr || kept->codes >= 0) return;
  std::vector<kernels::GatherArgs> all;
  add_gathers(*kept, codes, all);
  kernels::gather_rows(all, upload_.get<std::int32_t>(audit_index_), at_->stream);
}

/// Of the audit tokens' codes, scales and exponents.
void DeviceCapture::add_gathers(const Kept& kept, const PackedView<const std::uint8_t>& codes,
                                std::vector<kernels::GatherArgs>& all) const {
  const std::int64_t slots = kept.wanted->slots;
  const auto gather = [&](const TensorView<const std::uint8_t, 2>& rows, std::int64_t offset) {
    const TensorView<const std::uint8_t, 2> from = by_token(rows, slots);
    const std::int64_t cols = from.shape[1];
    auto* const to = reinterpret_cast<std::uint8_t*>(there_ + offset);
    all.push_back({from, {to, {kept.rows, cols}, {cols, 1}, at_->device}});
  };
  gather(codes.codes, kept.offset);
  if (kept.wanted->scale_bytes > 0) gather(codes.scales, kept.scales);
  constexpr std::int64_t kFloat = sizeof(float);
  gather({reinterpret_cast<const std::uint8_t*>(codes.global.data),
          {codes.codes.shape[0], kFloat},
          {kFloat, 1},
          at_->device},
         kept.global);
}

/// What audit tokens have in codes that outlived their layers.
void DeviceCapture::gather_late() {
  std::vector<kernels::GatherArgs> all;
  if (audit_rows_.empty()) return;
  for (const Kept& kept : now_.places) {
    if (kept.wanted->form != Form::kAudits || kept.codes < 0) continue;
    add_gathers(kept, codes_of(*kept.wanted, kept.codes), all);
  }
  if (all.empty()) return;
  late_upload_.begin();
  const std::size_t index = late_upload_.add(audit_rows_);
  late_upload_.send();
  for (std::size_t i = 0; i < all.size(); i += kernels::kMostGathers) {
    kernels::gather_rows(std::span(all).subspan(i, std::min(kernels::kMostGathers, all.size() - i)),
                         late_upload_.get<std::int32_t>(index), at_->stream);
  }
}

void DeviceCapture::send() {
  if (now_.places.empty() || underway_) return;
  gather_late();
  done_.record(at_->stream);
  done_.hold_back(copies_);
  if (here_.bytes() < now_.bytes) here_ = PinnedBuffer(with_headroom(now_.bytes), at_->device);
  copy_bytes(here_.as<void>(), {}, there_, at_->device, now_.bytes, copies_);
  copied_.record(copies_);
  std::swap(sent_, now_);
  underway_ = is_now_ = true;
}

void DeviceCapture::drop() noexcept {
  if (is_now_ && underway_) {
    try {
      copied_.wait();  // its room may be taken anew
    } catch (...) {    // the device has failed, and that is told already
    }
    underway_ = false;
  }
  is_now_ = false;
}

void DeviceCapture::flush(RowWriter& writer) {
  if (!underway_) return;
  underway_ = false;
  copied_.wait();
  sent_.audited.in_order = true;
  try {
    for (const Kept& place : sent_.places) {
      if (place.rows > 0) put(writer, place);
    }
  } catch (...) {
    writer.forget();
    throw;
  }
  writer.hand_on(sent_.kept.keys, sent_.audited.keys);
}

void DeviceCapture::put(RowWriter& writer, const Kept& kept) {
  const Wanted& wanted = *kept.wanted;
  const std::int64_t cols = wanted.cols;
  const std::byte* data = here_.as<>() + kept.offset;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
  switch (wanted.form) {
    case Form::kRecords:
      return writer.records(sent_.kept, wanted.place, wanted.layout,
                            {bytes, {kept.rows, cols}, {cols, 1}});
    case Form::kRoutes: {
      const std::int64_t slots = cols / std::int64_t{sizeof(std::int32_t)};
      return writer.routes(
          sent_.kept, wanted.place,
          {reinterpret_cast<const std::int32_t*>(data), {kept.rows, slots}, {slots, 1}});
    }
    case Form::kNumbers: {
      const std::int64_t width = cols / std::int64_t{sizeof(Bf16)};
      sent_.kept.in_order = true;  // these were gathered on the device
      writer.numbers(sent_.kept, wanted.place,
                     {reinterpret_cast<const Bf16*>(data), {kept.rows, width}, {width, 1}});
      sent_.kept.in_order = false;
      return;
    }
    case Form::kAudits: break;
  }
  const std::int64_t items = kept.rows * wanted.slots;
  const std::int64_t code_bytes = cols / wanted.slots;
  const auto* scales = reinterpret_cast<const std::uint8_t*>(here_.as<>() + kept.scales);
  writer.audits(sent_.audited, wanted.place,
                {{bytes, {items, code_bytes}, {code_bytes, 1}},
                 {scales, {items, wanted.scale_bytes}, {wanted.scale_bytes, 1}},
                 {reinterpret_cast<const float*>(here_.as<>() + kept.global), {items}, {1}}},
                wanted.slots);
}

}  // namespace lockstep::rollout
