/// Between engine.cc, which runs passes, and engine_life.cc, which is what happens between them.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "rollout/capture.h"
#include "rollout/draws.h"
#include "rollout/engine.h"
#include "rollout/forward.h"
#include "rollout/kv_cache.h"
#include "rollout/scheduler.h"
#include "rollout/span_book.h"

namespace lockstep::rollout {

/// Of one row.
struct Top {
  std::span<const Token> tokens;
  std::span<const float> logp;
};

/// What a pass did to one sequence.
struct Advance {
  Order order;
  std::int32_t rows = 0;
  bool drew = false;  // a token
};

struct Counts {
  std::int64_t tokens = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t recalled_tokens = 0;
  std::int64_t rewritten_tokens = 0;
  std::int64_t passes = 0;
  std::int64_t rows = 0;
  std::int64_t peak_frames = 0;
  double seconds = 0.0;
};

struct Engine::Impl {
  /// Forward's sink, and what new weights mean for what is under way.
  class Weights final : public WeightSink {
   public:
    explicit Weights(Impl& engine) : engine_(engine) {}
    void begin(WeightVersion version, ContractId contract) override;
    void put(const Weight& weight) override { engine_.forward.weights().put(weight); }
    void put_all(std::span<const Weight> weights) override {
      engine_.forward.weights().put_all(weights);
    }
    std::vector<std::uint32_t> commit() override;
    Device device() const override { return engine_.forward.weights().device(); }
    Stream stream() const override { return engine_.forward.weights().stream(); }
    Metrics metrics() const override { return engine_.forward.weights().metrics(); }

   private:
    Impl& engine_;
    WeightVersion coming_;
  };

  Impl(const Agreement& a, const Options& o, Device device, TraceSink* sink, Comm& comm);

  void begin(Sequence& s);
  void run(const std::vector<Chunk>& chunks);
  Pass build(const std::vector<Chunk>& chunks, std::vector<Wanted>& wanted);
  Drawn compute(const std::vector<Chunk>& chunks, const Pass& pass,
                const std::vector<Wanted>& wanted);
  bool ends_spans(const std::vector<Chunk>& chunks, const std::vector<Wanted>& wanted,
                  const Drawn& drawn) const;
  bool is_stop(Token token) const;
  void advance(const std::vector<Chunk>& chunks, const Pass& pass);
  void hand_over();
  void take_back();
  void take(const Wanted& wanted, const Drawn& drawn);
  void add_token(Sequence& s, Choice choice, Top top);
  void remember(const Sequence& s);
  void finish(Sequence& s, Finish why);
  void give_up(Sequence& prompt);
  void drop(Sequence& s);
  void end_all();
  void report(Order order, Trajectory trajectory);
  void new_weights(WeightVersion version);
  std::vector<std::pair<Order, Trajectory>> step();

  const Agreement agreement;
  const Options options;
  TraceSink* const trace;
  const OwnedStream stream;  // goes last: all memory was asked for on it
  Workplace at;
  Forward forward;
  KvCache cache;
  Capture capture;
  SpanBook spans;
  Draws draws;
  Scheduler scheduler;
  Weights weights;
  WeightVersion version{};
  enum class State : std::uint8_t { kNoWeights, kLoading, kReady } state = State::kNoWeights;
  bool held_back = false;
  Counts counts{};
  std::vector<std::vector<std::int32_t>> tables{};  // of frames, of each sequence in the pass
  const std::vector<std::int32_t> spare{cache.spare_frame()};
  const bool fills_up = cache.spare_frame() >= 0 && options.residual_scope != ResidualScope::kBatch;
  std::vector<Advance> unwritten{};  // of the last pass, while its records are on their way
  std::vector<std::pair<Order, Trajectory>> finished{};
};

}  // namespace lockstep::rollout
