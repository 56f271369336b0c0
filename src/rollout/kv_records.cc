#include "rollout/kv_records.h"

#include <algorithm>
#include <utility>

#include "base/parallel.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kRecordAlignment = 256;
constexpr std::int64_t kTokensALook = 2048;  // at least, of a task

}  // namespace

KvRecords::KvRecords(std::vector<KvPlace> places, std::int32_t page_tokens, Audited audited,
                     Device device, Stream stream, std::int64_t batch_bytes)
    : places_(std::move(places)),
      page_tokens_(page_tokens),
      audited_(std::move(audited)),
      at_{device, stream},
      batch_bytes_(batch_bytes),
      batches_{Batch(at_), Batch(at_)} {
  for (const KvPlace& place : places_) {
    (place.audits ? audit_ : each_) += place.layout.bytes();
  }
}

void KvRecords::add(Batch& batch, TokenKey key, const HeldSpan& span, bool audited) const {
  const PageSlot slot = {span.pages[static_cast<std::size_t>(key.position / page_tokens_)],
                         key.position % page_tokens_};
  if (each_ > 0) {
    batch.keys.push_back(key);
    batch.slots.push_back(slot);
    batch.planned += each_;
  }
  if (!audited || audit_ == 0) return;
  batch.planned += audit_;
  batch.audited_keys.push_back(key);
  batch.audited_slots.push_back(slot);
}

/// On a CUDA device nothing here waits.
void KvRecords::make(Batch& batch) {
  batch.rows.clear();
  batch.bytes = 0;
  const std::int64_t tokens = std::ssize(batch.keys);
  std::int64_t most = 0;
  for (const KvPlace& place : places_) {
    const std::int64_t count = place.audits ? std::ssize(batch.audited_keys) : tokens;
    const std::int64_t bytes = count * place.layout.bytes();
    batch.rows.push_back({.offset = place.offset,
                          .row_bytes = place.row_bytes,
                          .layout = place.layout,
                          .wide = place.wide,
                          .first = place.audits ? tokens : 0,
                          .count = count,
                          .to = batch.bytes});
    batch.bytes += (bytes + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
    most = std::max(most, bytes);
  }
  batch.slots.insert(batch.slots.end(), batch.audited_slots.begin(), batch.audited_slots.end());
  if (batch.here.bytes() < batch.bytes) {
    batch.here = PinnedBuffer(with_headroom(batch.bytes), at_.device);
  }
  batch.upload.begin();
  const std::size_t slots = batch.upload.add(batch.slots), rows = batch.upload.add(batch.rows);
  batch.upload.send();
  std::byte* const to = at_.on_cuda() ? static_cast<std::byte*>(batch.there.take(batch.bytes))
                                      : batch.here.as<std::byte>();
  records_from_pages(batch.upload.get<PageSlot>(slots), batch.upload.get<KvRows>(rows), most, to,
                     at_.device, at_.stream);
  batch.underway = true;
  if (!at_.on_cuda()) return;
  copy_bytes(batch.here.as<void>(), {}, to, at_.device, batch.bytes, at_.stream);
  batch.arrived.record(at_.stream);
}

void KvRecords::give(Batch& batch, TraceSink& sink) const {
  batch.underway = false;
  batch.arrived.wait();
  std::vector<Rows<const std::byte>> kept, audits;
  for (std::size_t p = 0; p < places_.size(); ++p) {
    const KvRows& rows = batch.rows[p];
    const std::size_t bytes = static_cast<std::size_t>(rows.count * rows.layout.bytes());
    (places_[p].audits ? audits : kept)
        .push_back({places_[p].place, rows.layout, {batch.here.as<>() + rows.to, bytes}});
  }
  if (!kept.empty()) sink.append_all(batch.keys, kept);
  if (!audits.empty() && !batch.audited_keys.empty()) sink.append_all(batch.audited_keys, audits);
}

/// Of each token of the spans, one behind the other.
std::vector<std::uint8_t> KvRecords::audits_of(std::span<const HeldSpan> spans) const {
  std::vector<std::int64_t> first = {0};
  for (const HeldSpan& held : spans) first.push_back(first.back() + held.span.count);
  std::vector<std::uint8_t> audits(static_cast<std::size_t>(first.back()));
  if (audit_ == 0) return audits;
  parallel_for(first.back(), kTokensALook, [&](std::int64_t begin, std::int64_t end) {
    auto at = static_cast<std::size_t>(std::ranges::upper_bound(first, begin) - first.begin() - 1);
    for (std::int64_t i = begin; i < end; ++i) {
      while (i >= first[at + 1]) ++at;
      const Span& span = spans[at].span;
      const TokenKey key = {span.id, span.first + static_cast<std::int32_t>(i - first[at])};
      audits[static_cast<std::size_t>(i)] = audited_(key) ? 1 : 0;
    }
  });
  return audits;
}

void KvRecords::hand_on(std::span<const HeldSpan> spans, TraceSink& sink) {
  if (places_.empty()) return;
  std::size_t now = 0;
  for (Batch& batch : batches_) {
    // What a sink refused is not given to it later; its room may be taken anew once it is there.
    if (std::exchange(batch.underway, false)) batch.arrived.wait();
  }
  const auto begin = [](Batch& batch) {
    batch.keys.clear();
    batch.slots.clear();
    batch.audited_keys.clear();
    batch.audited_slots.clear();
    batch.planned = 0;
  };
  const auto turn = [&] {
    make(batches_[now]);
    now = 1 - now;
    if (batches_[now].underway) give(batches_[now], sink);
    begin(batches_[now]);
  };
  begin(batches_[now]);
  const std::vector<std::uint8_t> audits = audits_of(spans);
  auto next = audits.begin();
  for (const HeldSpan& held : spans) {
    for (std::int32_t i = 0; i < held.span.count; ++i) {
      const TokenKey key = {held.span.id, held.span.first + i};
      const bool audited = *next++ != 0;
      const std::int64_t planned = batches_[now].planned;
      if (planned > 0 && planned + each_ + (audited ? audit_ : 0) > batch_bytes_) turn();
      add(batches_[now], key, held, audited);
    }
  }
  if (batches_[now].planned > 0) turn();
  if (batches_[1 - now].underway) give(batches_[1 - now], sink);
}

}  // namespace lockstep::rollout
