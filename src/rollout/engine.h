/// The rollout engine: paged FP4 KV cache, continuous batching, W4A4 experts, capture.
/// Read in this order: engine.cc, scheduler.cc, span_book.cc, kv_cache.cc, forward.cc, capture.cc;
/// engine_life.cc is what happens between passes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "device/comm.h"
#include "device/view.h"
#include "model/weights.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "record/trajectory.h"

namespace lockstep::rollout {

/// The second FP4 pass over what the first one lost (QUADS, Rollout-ResQ).
enum class Residual : std::uint8_t {
  kNone,
  kChannels,   // groups of 16 channels by L2
  kDense,      // all of it
  kTwoOfFour,  // the two largest of every four
  kBlocks,     // 64 channels by L2; by 32 tokens under ResidualScope::kBatch
};

/// Whose residuals decide which channels get the second pass: the token's own, those of all tokens
/// of the pass, or those of a calibration batch, which then stand in the contract.
enum class ResidualScope : std::uint8_t { kPerToken, kBatch, kStatic };

/// Declared differences between the engines, for studies; 0 and false: none.
struct Drift {
  float noise = 0.0f;    // sigma, on every attention and expert output before the residual add
  bool split_k = false;  // products in two halves with BF16 partial sums
};

struct Options {
  Residual residual = Residual::kNone;
  ResidualScope residual_scope = ResidualScope::kPerToken;
  std::int32_t residual_permille = 500;  // tenths of a percent of the groups or blocks
  SiteSet residual_sites{Site::kW13In};  // of w13_in and w2_in
  float residual_alpha = 1.0f;           // what the second pass counts: 1, 1/2 or 1/4
  Drift drift{};
  std::int64_t cache_bytes = 1ll << 28;  // KV pages on the device
  std::int64_t swap_bytes = 1ll << 28;   // KV pages of preempted sequences, in host memory
  std::int32_t page_tokens = 16;
  std::int32_t tokens_per_pass = 2048;  // chunked prefill and decode share a pass of this many
  std::int32_t max_sequences = 1024;    // that decode side by side
  bool reuse_prefixes = true;           // of earlier requests under the same weights
  // Beside its records every token leaves w13_in, k and v in BF16, from before they are quantized,
  // in every layer (Encoding::kBf16): for a dump.
  bool record_bf16 = false;
};

/// Does the second pass take the groups that the contract names?
constexpr bool takes_groups(const Options& options) {
  return options.residual_scope == ResidualScope::kStatic &&
         (options.residual == Residual::kChannels || options.residual == Residual::kBlocks);
}

/// A trajectory to be continued: a prompt, a next turn, or one that a weight update interrupted.
struct Request {
  Trajectory prefix;  // tokens, path and sampling; what is in the cache is not recomputed
  std::int32_t num_samples = 1;  // they share the prefix's pass, pages and records
  std::uint64_t seed = 0;        // drawn from by counter: (seed, prompt, sample, position)
};

/// One thread calls; work goes on inside. Results do not depend on what else is in the batch.
class Engine {
 public:
  /// `trace` may be null: an evaluation leaves no records. Throws Error naming what of agreement
  /// and options the device has no kernel for, or why there is no such device.
  Engine(const Agreement& agreement, const Options& options, Device device, TraceSink* trace,
         Comm& comm);
  ~Engine();

  void submit(Request request);
  bool idle() const;

  /// Schedules, runs one pass, samples. Returns the trajectories that finished, spans sealed. Where
  /// the sink refuses records, Error comes through, and no sequence under way has been taken
  /// further than its records: a later call reads and draws the same again. On a CUDA device that
  /// may be the call after the one whose records they were; abort() and weights().begin() throw it
  /// too. Spans that had just ended are sealed without any record.
  std::vector<Trajectory> step();

  /// Did the last step() run nothing because the record store has no room? What waits is admitted
  /// once records are released.
  bool held_back() const;
  /// Why, in the store's words: one line.
  std::string held() const;

  /// Ends what runs or waits, as kAborted and with its spans sealed. A request whose prompt was not
  /// yet read comes back once a sample, with the prompt alone. The engine is idle behind it
  /// whatever is thrown, which is the first failure; what had ended by then is lost with the rest.
  std::vector<Trajectory> abort();

  /// Reads given tokens with the present weights: their log-probs and records, in new spans. The
  /// truth by which guidance is judged once weights have moved. rollout_logp is filled where
  /// response_mask is 1, an empty mask standing for all tokens but the first. Needs an idle engine.
  std::vector<Trajectory> rescore(std::span<const Trajectory> trajectories);

  /// Another stage's turn on the device, which may take `wanted` bytes more there; -1: nobody
  /// knows, and it is taken to be as much as the KV pages. Where that leaves less than an eighth of
  /// the device free, what the pool keeps for later goes back, and where that is not enough what an
  /// idle engine's KV pages lie in: what they held is forgotten. Weights stay. What runs next takes
  /// that memory again, or throws Error naming bytes and option. On a CPU nothing goes.
  void rest(std::int64_t wanted = -1);
  /// Bytes of the device that it gave back so.
  std::int64_t owed() const;

  /// What happened since the last call: tokens, passes, preemptions, saturated blocks, seconds.
  Metrics metrics();

  /// commit() empties the prefix cache and sends running requests into new spans.
  WeightSink& weights();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The cache's exponents (docs/formats/nvfp4.md), [L, 2], K before V: what BF16 passes over a named
/// calibration batch show, for the formats of `contract`'s K and V. `weights` is asked once.
std::vector<std::int8_t> calibrate_kv(const ModelConfig& model, const WeightSource& weights,
                                      std::span<const std::vector<Token>> batch,
                                      const Contract& contract = {});

/// The groups of channels that lose most over a named calibration batch, for
/// ResidualScope::kStatic: Contract::residual_groups. `contract` quantizes the experts' inputs;
/// passes run in BF16. `weights` is asked once.
std::vector<std::uint8_t> calibrate_residual(const ModelConfig& model, const Contract& contract,
                                             const Options& options, const WeightSource& weights,
                                             std::span<const std::vector<Token>> batch);

/// The sum of squares of each input column of every expert's two matrices over a named calibration
/// batch, in BF16: the diagonal of X^T X. Zeros for an expert that no token chose.
std::map<WeightId, std::vector<double>> calibrate_inputs(const ModelConfig& model,
                                                         const WeightSource& weights,
                                                         std::span<const std::vector<Token>> batch);

/// Submits all and steps until idle. In the order of the requests, and of the samples in each.
/// Throws Error when the record store has no room for one sequence.
std::vector<Trajectory> generate(Engine& engine, std::vector<Request> requests);

}  // namespace lockstep::rollout
