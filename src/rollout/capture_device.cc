#include "rollout/capture_device.h"

#include <algorithm>
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

DeviceCapture::DeviceCapture(Workplace& at, std::int32_t layers)
    : at_(&at),
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
  for (const Kept& place : now_.places) index_[slot_of(place.form, place.place)] = -1;
  now_ = {.kept = kept, .audited = audited, .count = rows, .places = {}, .bytes = 0};
  is_now_ = false;
  // Filled up to a number of which there are few, with a row that nobody reads there.
  audit_rows_ = audited.rows;
  if (!audit_rows_.empty())
    audit_rows_.resize(std::bit_ceil(std::max<std::size_t>(audit_rows_.size(), 4)));
}

std::int64_t DeviceCapture::reserve(std::int64_t bytes) {
  const std::int64_t offset = now_.bytes;
  now_.bytes += (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  return offset;
}

DeviceCapture::Kept& DeviceCapture::add(Form form, Place place, std::int64_t rows,
                                        std::int64_t cols) {
  index_[slot_of(form, place)] = static_cast<std::int32_t>(now_.places.size());
  now_.places.push_back(
      {.form = form, .place = place, .rows = rows, .cols = cols, .offset = reserve(rows * cols)});
  return now_.places.back();
}

void DeviceCapture::want_records(Place place, const RowLayout& layout) {
  add(Form::kRecords, place, now_.count, layout.bytes()).layout = layout;
}

void DeviceCapture::want_routes(Place place, std::int32_t slots) {
  add(Form::kRoutes, place, now_.count, slots * std::int64_t{sizeof(std::int32_t)});
}

void DeviceCapture::want_numbers(Place place, std::int64_t width) {
  add(Form::kNumbers, place, std::ssize(now_.kept.keys), width * std::int64_t{sizeof(Bf16)});
}

void DeviceCapture::want_audits(Place place, std::int64_t slots, std::int64_t code_bytes,
                                std::int64_t scale_bytes) {
  const std::int64_t rows = std::ssize(audit_rows_);
  Kept& kept = add(Form::kAudits, place, rows, slots * code_bytes);
  kept.slots = slots;
  kept.scale_bytes = scale_bytes;
  kept.scales = reserve(rows * slots * scale_bytes);
  kept.global = reserve(rows * slots * std::int64_t{sizeof(float)});
}

void DeviceCapture::commit() {
  copied_.hold_back(at_->stream);
  there_ = static_cast<std::byte*>(arena_.take(now_.bytes));
  upload_.begin();
  // First, so that its place follows from its own size, of which a graph knows: how many rows are
  // kept changes under one graph.
  audit_index_ = upload_.add(audit_rows_);
  kept_index_ = upload_.add(now_.kept.rows);
  upload_.send();
}

TensorView<std::uint8_t, 2> DeviceCapture::records(Place place) const {
  const Kept* kept = find(Form::kRecords, place);
  if (kept == nullptr) return {};
  return {reinterpret_cast<std::uint8_t*>(there_ + kept->offset),
          {kept->rows, kept->cols},
          {kept->cols, 1},
          at_->device};
}

TensorView<std::int32_t, 2> DeviceCapture::routes(Place place) const {
  const Kept* kept = find(Form::kRoutes, place);
  if (kept == nullptr) return {};
  const std::int64_t slots = kept->cols / std::int64_t{sizeof(std::int32_t)};
  return {reinterpret_cast<std::int32_t*>(there_ + kept->offset),
          {kept->rows, slots},
          {slots, 1},
          at_->device};
}

void DeviceCapture::take_numbers(Place place, TensorView<const Bf16, 2> x) {
  const Kept* kept = find(Form::kNumbers, place);
  if (kept == nullptr) return;
  const std::int64_t width = x.shape[1];
  kernels::gather_rows(x, upload_.get<std::int32_t>(kept_index_),
                       {reinterpret_cast<Bf16*>(there_ + kept->offset),
                        {kept->rows, width},
                        {width, 1},
                        at_->device},
                       at_->stream);
}

void DeviceCapture::take_audits(Place place, const PackedView<const std::uint8_t>& codes) {
  const Kept* kept = find(Form::kAudits, place);
  if (kept == nullptr) return;
  const auto gather = [&](const TensorView<const std::uint8_t, 2>& from, std::int64_t offset) {
    kernels::gather_rows(from, upload_.get<std::int32_t>(audit_index_),
                         {reinterpret_cast<std::uint8_t*>(there_ + offset),
                          {kept->rows, from.shape[1]},
                          {from.shape[1], 1},
                          at_->device},
                         at_->stream);
  };
  gather(by_token(codes.codes, kept->slots), kept->offset);
  if (kept->scale_bytes > 0) gather(by_token(codes.scales, kept->slots), kept->scales);
  constexpr std::int64_t kFloat = sizeof(float);
  gather(by_token({reinterpret_cast<const std::uint8_t*>(codes.global.data),
                   {codes.codes.shape[0], kFloat},
                   {kFloat, 1},
                   at_->device},
                  kept->slots),
         kept->global);
}

void DeviceCapture::send() {
  if (now_.places.empty() || underway_) return;
  done_.record(at_->stream);
  done_.hold_back(copies_);
  if (here_.bytes() < now_.bytes) here_ = PinnedBuffer(now_.bytes, at_->device);
  copy_bytes(here_.as<void>(), {}, there_, at_->device, now_.bytes, copies_);
  copied_.record(copies_);
  sent_ = now_;
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
  for (const Kept& place : sent_.places) put(writer, place);
}

void DeviceCapture::put(RowWriter& writer, const Kept& place) const {
  const std::byte* data = here_.as<>() + place.offset;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
  // Rows that were gathered on the device lie in their order.
  const auto in_order = [](const KeptRows& kept) {
    KeptRows all = kept;
    for (std::size_t i = 0; i < all.rows.size(); ++i) all.rows[i] = static_cast<std::int32_t>(i);
    return all;
  };
  switch (place.form) {
    case Form::kRecords:
      return writer.records(sent_.kept, place.place, place.layout,
                            {bytes, {place.rows, place.cols}, {place.cols, 1}});
    case Form::kRoutes: {
      const std::int64_t slots = place.cols / std::int64_t{sizeof(std::int32_t)};
      return writer.routes(
          sent_.kept, place.place,
          {reinterpret_cast<const std::int32_t*>(data), {place.rows, slots}, {slots, 1}});
    }
    case Form::kNumbers: {
      const std::int64_t width = place.cols / std::int64_t{sizeof(Bf16)};
      return writer.numbers(in_order(sent_.kept), place.place,
                            {reinterpret_cast<const Bf16*>(data), {place.rows, width}, {width, 1}});
    }
    case Form::kAudits: break;
  }
  const std::int64_t items = place.rows * place.slots;
  const std::int64_t code_bytes = place.cols / place.slots;
  const auto* scales = reinterpret_cast<const std::uint8_t*>(here_.as<>() + place.scales);
  writer.audits(in_order(sent_.audited), place.place,
                {{bytes, {items, code_bytes}, {code_bytes, 1}},
                 {scales, {items, place.scale_bytes}, {place.scale_bytes, 1}},
                 {reinterpret_cast<const float*>(here_.as<>() + place.global), {items}, {1}}},
                place.slots);
}

}  // namespace lockstep::rollout
