/// What a pass on a CUDA device leaves, from there to the sink.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "kernels/dense/elementwise.h"
#include "rollout/capture_rows.h"
#include "rollout/upload.h"

namespace lockstep::rollout {

class DeviceCapture {
 public:
  enum class Form : std::uint8_t { kRecords, kRoutes, kNumbers, kAudits };
  /// What a pass leaves at a place.
  struct Wanted {
    Form form;
    Place place;
    std::int64_t cols;             // bytes a row; of audits the codes'
    RowLayout layout{};            // of records
    std::int64_t slots = 1;        // of audits
    std::int64_t scale_bytes = 0;  // of a slot
    bool late = false;  // of audits: small passes keep all codes, and are looked at behind them
  };

  /// `wanted` of every pass; audits only where rows are audited.
  DeviceCapture(Workplace& at, std::int32_t layers, std::vector<Wanted> wanted);

  /// Before a pass of so many rows: its room is there afterwards. Numbers and audited codes are of
  /// the rows that are kept, the rest of all rows. What the last pass left has been copied, or is
  /// copied first.
  void begin(std::int64_t rows, const KeptRows& kept, const KeptRows& audited);

  TensorView<std::uint8_t, 2> records(Place place) const;
  TensorView<std::int32_t, 2> routes(Place place) const;
  /// Empty where codes need not outlive the layer.
  PackedView<std::uint8_t> codes(Place place) const;
  void take_numbers(Place place, TensorView<const Bf16, 2> x);
  void take_audits(Place place, const PackedView<const std::uint8_t>& codes);

  /// Of audits, within the pass.
  std::int64_t gathered() const { return gathers_ ? std::ssize(audit_rows_) : 0; }

  /// The pass has been given: it will be copied beside what follows.
  void send();
  /// Waits for what was sent and puts it into the sink.
  void flush(RowWriter& writer);
  /// Was a pass sent that has not come to the sink?
  bool holds() const { return underway_; }
  /// Forgets the pass that was begun last; waits for its copy where it was sent.
  void drop() noexcept;

 private:
  struct Kept {
    const Wanted* wanted = nullptr;
    std::int64_t rows = 0;
    std::int64_t offset = 0;
    std::int64_t scales = 0, global = 0;  // where the rest of an audit's is
    std::int64_t codes = -1;              // of a late audit: where all rows' are
  };
  struct Rows {
    KeptRows kept, audited;
    std::vector<Kept> places;
    std::int64_t bytes = 0;
  };

  void add(const Wanted& wanted, std::int64_t rows);
  void add_audits(const Wanted& wanted);
  std::int64_t reserve(std::int64_t bytes);
  std::byte* of(const Kept& kept) const { return there_ + kept.offset; }
  const Kept* find(Form form, Place place) const;
  static std::size_t slot_of(Form form, Place place);
  PackedView<std::uint8_t> codes_of(const Wanted& wanted, std::int64_t offset) const;
  void add_gathers(const Kept& kept, const PackedView<const std::uint8_t>& codes,
                   std::vector<kernels::GatherArgs>& all) const;
  void gather_late();
  void put(RowWriter& writer, const Kept& kept);

  Workplace* at_;
  const std::vector<Wanted> wanted_;
  Rows now_;
  Rows sent_;  // on its way, or there
  bool underway_ = false;
  bool is_now_ = false;              // what is underway is what begin() began
  std::vector<std::int32_t> index_;  // of now_.places, by form and place; -1: none
  std::size_t kept_index_ = 0, audit_index_ = 0;
  std::vector<std::int32_t> audit_rows_;  // of now_.audited, and more
  bool gathers_ = false;                  // within the pass
  std::int64_t rows_ = 0;                 // of the pass
  std::int64_t code_bytes_ = 0;           // of late audits' codes
  Workplace behind_;                      // the same; no graph knows what memory it takes
  Upload upload_, late_upload_;
  Room arena_, codes_;
  std::byte* there_ = nullptr;
  PinnedBuffer here_;
  OwnedStream copies_;
  Event done_, copied_;
};

}  // namespace lockstep::rollout
