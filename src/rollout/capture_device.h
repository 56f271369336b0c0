/// What a pass on a CUDA device leaves, from there to the sink.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "rollout/capture_rows.h"
#include "rollout/upload.h"

namespace lockstep::rollout {

class DeviceCapture {
 public:
  DeviceCapture(Workplace& at, std::int32_t layers);

  /// Forgets the places of the last pass.
  void begin(std::int64_t rows, const KeptRows& kept, const KeptRows& audited);

  /// Room for the rows of a place; all of it before commit(). Numbers and audited codes are of the
  /// rows that are kept, the rest of all rows.
  void want_records(Place place, const RowLayout& layout);
  void want_routes(Place place, std::int32_t slots);
  void want_numbers(Place place, std::int64_t width);
  void want_audits(Place place, std::int64_t slots, std::int64_t code_bytes,
                   std::int64_t scale_bytes);
  /// The room is there. What the last pass left has been copied, or is copied first.
  void commit();

  TensorView<std::uint8_t, 2> records(Place place) const;
  TensorView<std::int32_t, 2> routes(Place place) const;
  void take_numbers(Place place, TensorView<const Bf16, 2> x);
  void take_audits(Place place, const PackedView<const std::uint8_t>& codes);

  /// Of audits.
  std::int64_t gathered() const { return std::ssize(audit_rows_); }

  /// The pass has been given: it will be copied beside what follows.
  void send();
  /// Waits for what was sent and puts it into the sink.
  void flush(RowWriter& writer);
  /// Was a pass sent that has not come to the sink?
  bool holds() const { return underway_; }
  /// Forgets the pass that was begun last; waits for its copy where it was sent.
  void drop() noexcept;

 private:
  enum class Form : std::uint8_t { kRecords, kRoutes, kNumbers, kAudits };
  struct Kept {
    Form form;
    Place place;
    std::int64_t rows, cols;  // bytes a row
    std::int64_t offset;
    RowLayout layout{};                   // of records
    std::int64_t slots = 1;               // of audits, whose codes come first
    std::int64_t scales = 0, global = 0;  // where the rest of an audit's is
    std::int64_t scale_bytes = 0;         // of a slot
  };
  struct Rows {
    KeptRows kept, audited;
    std::int64_t count = 0;
    std::vector<Kept> places;
    std::int64_t bytes = 0;
  };

  Kept& add(Form form, Place place, std::int64_t rows, std::int64_t cols);
  std::int64_t reserve(std::int64_t bytes);
  const Kept* find(Form form, Place place) const;
  static std::size_t slot_of(Form form, Place place);
  void put(RowWriter& writer, const Kept& place) const;

  Workplace* at_;
  Rows now_;
  Rows sent_;  // on its way, or there
  bool underway_ = false;
  bool is_now_ = false;              // what is underway is what begin() began
  std::vector<std::int32_t> index_;  // of now_.places, by form and place; -1: none
  std::size_t kept_index_ = 0, audit_index_ = 0;
  std::vector<std::int32_t> audit_rows_;  // of now_.audited, and more
  Upload upload_;
  Room arena_;
  std::byte* there_ = nullptr;
  PinnedBuffer here_;
  OwnedStream copies_;
  Event done_, copied_;
};

}  // namespace lockstep::rollout
