/// Under which names what a rollout reads is recorded: spans begin, are opened, cut off and ended.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "record/agreement.h"
#include "record/trace.h"
#include "rollout/capture.h"
#include "rollout/kv_cache.h"
#include "rollout/scheduler.h"
#include "rollout/sequence.h"

namespace lockstep::rollout {

class SpanBook {
 public:
  /// A null sink: names are given all the same, and nothing is recorded.
  SpanBook(const Agreement& agreement, const Options& options, TraceSink* sink, std::int32_t rank,
           KvCache& cache, Capture& capture)
      : contract_(agreement.contract.id()),
        drifts_(options.drift.noise != 0.0f),
        sink_(sink),
        rank_(rank),
        cache_(&cache),
        capture_(&capture) {}

  bool records() const { return sink_ != nullptr; }

  /// Spans are named after prompt and sample: two alike at a time would write into one. Throws
  /// Error where one of them is under way.
  void admit(const Trajectory& t, std::int32_t samples);
  void release(PromptId prompt, std::int32_t sample) { under_way_.erase({prompt, sample}); }

  /// The span that begins behind the path, of what `sample` reads under weights of `version`.
  Span next(const Sequence& s, std::int32_t sample, WeightVersion version) const;

  /// Under which names the cache remembers positions 0 .. end-1. Where records or noise hang on a
  /// span's id, only the same span will do.
  std::vector<std::uint64_t> tags(const Sequence& s, std::int32_t end) const;

  /// The sink learns of the spans in which the chunks are the first rows.
  void open(std::span<const Chunk> chunks);
  /// The span under way ends again behind what was read, because a pass failed: that is what to
  /// tell, not that a sink cannot cut either.
  void cut(const Sequence& s) const noexcept;
  /// It goes to the path, if anything was read in it; close() comes before its pages change.
  void end(Sequence& s);
  /// It never was. It is sealed even where that cannot be written.
  void give_up(const Sequence& s) const;
  /// K and V of what ended go to the sink, and the spans are sealed.
  void close();

 private:
  ContractId contract_;
  bool drifts_;
  TraceSink* sink_;
  std::int32_t rank_;
  KvCache* cache_;
  Capture* capture_;
  std::set<std::pair<PromptId, std::int32_t>> under_way_;  // prompts and samples that record
  std::vector<Capture::Held> ended_;
};

}  // namespace lockstep::rollout
