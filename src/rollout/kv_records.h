/// The records of K and V of spans that have ended, from their pages to the sink.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "record/trace.h"
#include "rollout/kv_rows.h"
#include "rollout/rows.h"
#include "rollout/upload.h"

namespace lockstep::rollout {

/// Rows of a span in the cache: `pages` [..] by position, where each page's bytes lie now, on the
/// device or swapped out.
struct HeldSpan {
  Span span;
  std::vector<const std::byte*> pages;
};

/// A place of K or V whose codes are recorded, of every token or of audit tokens alone.
struct KvPlace {
  Place place;
  RowLayout layout;
  std::int64_t offset = 0;     // of its rows within a page
  std::int64_t row_bytes = 0;  // from one position to the next
  bool wide = false;           // a code is a byte
  bool audits = false;
};

class KvRecords {
 public:
  /// Is a token audited? Several threads ask.
  using Audited = std::function<bool(TokenKey)>;

  /// `batch_bytes` of records are made at a time, audits among them, or a token's. A device makes
  /// one batch while the sink keeps the one before.
  KvRecords(std::vector<KvPlace> places, std::int32_t page_tokens, Audited audited, Device device,
            Stream stream, std::int64_t batch_bytes);
  KvRecords(const KvRecords&) = delete;
  KvRecords& operator=(const KvRecords&) = delete;

  /// Gives `sink` all rows of the spans, which are open there. Where it throws, the sink may have
  /// some.
  void hand_on(std::span<const HeldSpan> spans, TraceSink& sink);

 private:
  struct Batch {
    explicit Batch(Workplace& at) : upload(at), there(at), arrived(at.device) {}
    std::vector<TokenKey> keys, audited_keys;  // what some place has a record of, no more
    std::vector<PageSlot> slots, audited_slots;
    std::int64_t planned = 0;  // bytes of their records
    std::vector<KvRows> rows;  // by place
    std::int64_t bytes = 0;
    Upload upload;
    Room there;  // of records, on the device
    PinnedBuffer here;
    Event arrived;
    bool underway = false;
  };

  std::vector<std::uint8_t> audits_of(std::span<const HeldSpan> spans) const;
  void add(Batch& batch, TokenKey key, const HeldSpan& span, bool audited) const;
  void make(Batch& batch);
  void give(Batch& batch, TraceSink& sink) const;

  std::vector<KvPlace> places_;
  std::int32_t page_tokens_;
  Audited audited_;
  Workplace at_;  // its own: no graph knows what memory it takes
  std::int64_t batch_bytes_;
  std::int64_t each_ = 0, audit_ = 0;  // bytes of any token, and of an audited one beside
  std::array<Batch, 2> batches_;
};

}  // namespace lockstep::rollout
