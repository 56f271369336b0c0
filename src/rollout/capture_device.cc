#include "rollout/capture_device.h"

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/dense/elementwise.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kPieceAlignment = 256;
constexpr std::size_t kForms = 4, kSites = 8;

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
      upload_(at),
      arena_(at),
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
      case Form::kAudits:
        if (!audit_rows_.empty()) add(wanted, std::ssize(audit_rows_));
        break;
    }
  }
  copied_.hold_back(at_->stream);
  there_ = static_cast<std::byte*>(arena_.take(now_.bytes));
  if (!numbers && audit_rows_.empty()) return;
  upload_.begin();
  // First, so that its place follows from its own size, of which a graph knows: how many rows are
  // kept changes under one graph.
  audit_index_ = upload_.add(audit_rows_);
  kept_index_ = upload_.add(
      std::span<const std::int32_t>(now_.kept.rows.data(), numbers ? now_.kept.rows.size() : 0));
  upload_.send();
}

std::int64_t DeviceCapture::reserve(std::int64_t bytes) {
  const std::int64_t offset = now_.bytes;
  now_.bytes += (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
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
  if (kept == nullptr) return;
  const std::int64_t slots = kept->wanted->slots;
  std::array<kernels::GatherArgs, 3> all{};
  std::size_t count = 0;
  const auto gather = [&](const TensorView<const std::uint8_t, 2>& rows, std::int64_t offset) {
    const TensorView<const std::uint8_t, 2> from = by_token(rows, slots);
    const std::int64_t cols = from.shape[1];
    auto* const to = reinterpret_cast<std::uint8_t*>(there_ + offset);
    all[count++] = {from, {to, {kept->rows, cols}, {cols, 1}, at_->device}};
  };
  gather(codes.codes, kept->offset);
  if (kept->wanted->scale_bytes > 0) gather(codes.scales, kept->scales);
  constexpr std::int64_t kFloat = sizeof(float);
  gather({reinterpret_cast<const std::uint8_t*>(codes.global.data),
          {codes.codes.shape[0], kFloat},
          {kFloat, 1},
          at_->device},
         kept->global);
  kernels::gather_rows(std::span(all).first(count), upload_.get<std::int32_t>(audit_index_),
                       at_->stream);
}

void DeviceCapture::send() {
  if (now_.places.empty() || underway_) return;
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
    for (const Kept& place : sent_.places) put(writer, place);
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
