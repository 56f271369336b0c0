/// What runs in the next pass. Decoding rows come first, then chunks of prompts; who came first is
/// served first. When pages run out, the last to come is moved to host memory, and comes back with
/// the same bytes: nothing is ever read twice.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "record/agreement.h"
#include "record/trace.h"
#include "rollout/engine.h"
#include "rollout/kv_cache.h"
#include "rollout/sequence.h"

namespace lockstep::rollout {

/// Positions of one sequence in a pass.
struct Chunk {
  Sequence* sequence = nullptr;
  Order order;  // of the sequence, which may be gone after the pass
  std::int32_t first = 0;
  std::int32_t count = 0;
};

class Scheduler {
 public:
  /// What is asked for at first. A group is admitted as a whole, or, when nothing else runs and it
  /// is larger than all memory or than the room for records, as many of its samples as fit.
  struct Waiting {
    Request request;
    std::int64_t number = 0;        // of the request
    std::int32_t first_sample = 0;  // those before are admitted
    bool scored = false;
    std::shared_ptr<std::vector<Span>> prompt_path{};  // of the samples before, once known
  };

  /// `begin` prepares a new sequence (its path, its recalled pages) when it is admitted.
  Scheduler(const Agreement& agreement, const Options& options, KvCache& cache,
            const TraceSink* trace, std::function<void(Sequence&)> begin);

  /// Throws Error where one sequence of the request can never fit in the cache.
  void check(const Request& request, bool scored) const;

  /// Of what check() passed. Returns its number, the `request` of its sequences' order.
  std::int64_t submit(Request request, bool scored);

  /// Chunks with all their pages on the device. Empty when nothing can run.
  std::vector<Chunk> plan();

  bool idle() const { return active_.empty() && waiting_.empty(); }
  bool held_back() const { return held_back_; }

  /// The samples of a prompt that was read: they share its pages.
  std::vector<Sequence*> fork(Sequence& prompt);

  /// Gives its pages and reservation back; the sequence ends.
  void remove(Sequence& sequence);

  /// Gives its pages back; it begins again.
  void clear(Sequence& sequence);

  std::map<Order, std::unique_ptr<Sequence>>& active() { return active_; }
  std::deque<Waiting>& waiting() { return waiting_; }

  std::int64_t preemptions = 0;  // since the engine last asked
  std::int64_t shared_pages = 0;
  std::int64_t unwritten = 0;  // positions that were read, whose records the sink has yet to get

 private:
  struct Left {
    std::int64_t tokens = 0;
    std::int64_t wanted = 0;
    std::int64_t decodes = 0;
  };

  void resume();
  void admit();
  std::int32_t admissible(const Waiting& waiting);
  void start(Waiting& waiting, std::int32_t samples);
  bool place(Sequence& sequence, Left& left, std::vector<Chunk>& chunks);
  std::int32_t make_room(Sequence& sequence, std::int32_t end, const std::vector<Chunk>& chunks);
  bool preempt(const Sequence& needy, const std::vector<Chunk>& chunks);
  bool park(Sequence& sequence);

  /// Positions that one sample of the request feeds at most, its prompt included.
  std::int64_t most_fed(const Request& request, bool scored) const;
  std::int64_t group_pages(const Request& request, bool scored, std::int64_t samples) const;
  std::int64_t record_bytes(std::int64_t all, std::int64_t kv) const;
  std::int64_t promised_bytes() const;

  const Agreement& agreement_;
  const Options& options_;
  KvCache& cache_;
  const TraceSink* trace_;
  std::function<void(Sequence&)> begin_;
  std::map<Order, std::unique_ptr<Sequence>> active_;
  std::deque<Waiting> waiting_;
  std::int64_t requests_ = 0;
  std::int64_t reserved_ = 0;  // pages, on the device or the host
  std::int64_t wanted_per_pass_ = 0;
  std::int64_t bytes_all_ = 0;  // records of a token
  std::int64_t bytes_kv_ = 0;   // of which K and V, written at release
  bool held_back_ = false;
};

}  // namespace lockstep::rollout
