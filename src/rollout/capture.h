#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/view.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "rollout/kv_records.h"
#include "rollout/pass.h"

namespace lockstep::rollout {

class KvCache;

/// Takes what a pass reveals to the TraceSink: routes and activation records while it runs. K and V
/// are read from the pages when a sequence is released.
///
/// On a CUDA device the rows of a pass stay there until send(), are copied beside what follows, and
/// come to the sink with flush(), while the next pass runs. Spans are cut off, given up or sealed
/// behind it alone: it comes before the first of them, and close() of some begins with it.
class Capture {
 public:
  /// A null sink captures nothing. `bf16`: numbers() are wanted. Passes run on `device` in the
  /// order of `stream`.
  Capture(const Agreement& agreement, TraceSink* sink, bool bf16 = false, Device device = {},
          Stream stream = {});
  ~Capture();

  /// Before each pass: which rows are recorded and which of them are audited.
  void begin(const Pass& pass);

  /// The layout in which quantize() is to write the records of a site; kNone: none are wanted.
  RowLayout layout(Layer layer, Site site) const;

  /// Where they are written, [n, layout.bytes()]; empty where none are wanted.
  TensorView<std::uint8_t, 2> record_room(const Pass& pass, Layer layer, Site site);
  /// Where their codes are wanted, for audits to find them behind the pass; empty: wherever they
  /// like.
  PackedView<std::uint8_t> code_room(Layer layer, Site site);
  /// Where the router's choice [n, K] is wanted; empty: wherever it likes.
  TensorView<std::int32_t, 2> route_room(const Pass& pass, Layer layer);

  /// `records` [n, layout.bytes()], one row a token of the pass; `codes` are what they were taken
  /// from, [n, ...] for w13_in, [n * K, ...] for w2_in (a token's slots in a row), for the audit
  /// slice. Call once a layer and site, layout or not: audit tokens are kept wherever the contract
  /// quantizes.
  void activations(const Pass& pass, Layer layer, Site site,
                   TensorView<const std::uint8_t, 2> records, PackedView<const std::uint8_t> codes);

  /// `x` [n, width], what the pass has there before it is quantized: w13_in, K or V. Call once a
  /// layer and site.
  void numbers(const Pass& pass, Layer layer, Site site, TensorView<const Bf16, 2> x);

  /// `experts` [n, K], in the order of the router's choice. Throws where they are not K different
  /// ones: what a router never chose must not be replayed.
  void routes(const Pass& pass, Layer layer, TensorView<const std::int32_t, 2> experts);

  /// The pass has been given: its rows go to the host once it is done. On a CPU they are there.
  void send();
  /// Hands what was sent to the sink, waiting for it. Where that throws, the sink may have some of
  /// the pass, and the rest is forgotten: cut its spans off before it.
  void flush();
  /// Would flush() have something to hand on?
  bool holds() const;
  /// Forgets the rows of the pass that begin() began: it failed.
  void drop();
  /// On a CUDA device: what the work that it gave for a pass depends on beside the number of rows.
  /// Where two passes differ in it, one cannot be repeated for the other.
  std::array<std::int64_t, 3> shape() const;

  using Held = HeldSpan;

  /// Leaves the K and V records of finished spans and seals them. Of no spans it does nothing.
  /// Where it throws, those that were not sealed yet are sealed without any record.
  void close(std::span<const Held> spans, const KvCache& cache);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::rollout
