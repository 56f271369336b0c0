/// What a pass does at the places where rollout and trainer must agree: it rounds as the arm says,
/// toward the records where they are followed, and routes as the rollout routed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/build.h"
#include "ops/guide.h"
#include "ops/torch.h"
#include "record/agreement.h"
#include "record/trace.h"
#include "train/pack.h"
#include "train/tally.h"
#include "train/trainer.h"

namespace lockstep::train {

/// Where a pass shows its numbers before they are rounded, and its experts: a dump.
struct Reveal {
  TraceSink* sink = nullptr;
  std::mutex* mutex = nullptr;  // passes run side by side, a sink has one writer
};

/// Experts of this trainer's own: where a pass keeps them, or which it follows.
struct OwnRoutes {
  Routes* keep = nullptr;  // rows of the right size
  const Routes* follow = nullptr;
};

/// One pass. Every call reads its place's records anew and leaves no mark, so that whoever computes
/// again reads the same.
class Sites {
 public:
  /// `trace` may be nullptr: nothing is followed. `tally` may be nullptr: nothing is counted.
  Sites(const Agreement& agreement, const Qat& qat, const Pack& pack, const TraceSource* trace,
        Tally* tally, Reveal reveal = {}, OwnRoutes own = {});

  /// Begins to bring the records of a pass to the device that its tensors lie on, layer by layer,
  /// beside what else is done, and not more than `most_bytes` ahead of it. Without it each is read
  /// when it is asked for. Nothing on a CPU.
  void read_ahead(const at::Device& device, std::int64_t most_bytes) {
    if constexpr (build::has_cuda) {
      if (device.is_cuda()) read_ahead_there(device, most_bytes);
    }
  }

  /// The pass has been given to a CUDA device: what is counted there comes behind it.
  void fetch() const {
    if constexpr (build::has_cuda) fetch_there();
  }
  /// Adds to the tally what was counted on a CUDA device, for which it waits; call it once, when
  /// the pass is through.
  void settle() const {
    if constexpr (build::has_cuda) settle_there();
  }

  /// The contract's rule for what the experts read.
  const Quantizer& activation_rule() const { return agreement_.contract.activation; }

  /// The routed experts' shared input.   [T, D]
  at::Tensor w13_in(Layer layer, const at::Tensor& x) const;

  /// What the experts of a layer do to the inputs of their down projections, [T * K, F]; empty:
  /// nothing.
  ops::Rounding w2_in(Layer layer) const;
  /// Whether that looks at each row alone, so that slots may come in any order.
  bool w2_in_by_row(Layer layer) const {
    return !follows({layer, Site::kW2In}) && !audits({layer, Site::kW2In});
  }

  /// K after norm and rotation, or V.   [T, N * C]
  at::Tensor kv(Place place, const at::Tensor& x) const;

  /// The experts of each token, in their order: those of an earlier pass or the recorded ones, or
  /// those that the trainer's own router prefers.   p [T, E] -> int64 [T, K]; on a CUDA device
  /// logits [T, E] -> int32
  at::Tensor experts(Layer layer, const at::Tensor& p) const;

 private:
  /// Records of all rows of the pass at one place.
  struct Records {
    RowLayout layout;
    std::vector<std::uint8_t> bytes;    // [rows, layout.bytes()]
    std::vector<std::uint8_t> present;  // [rows]
  };
  Records read(Place place, Encoding encoding) const;
  void read_into(Place place, const RowLayout& layout, std::uint8_t* bytes,
                 std::uint8_t* present) const;
  void read_part(std::int64_t part, Place place, const RowLayout& layout, std::uint8_t* bytes,
                 std::uint8_t* present) const;
  /// What tasks that read take: keys that follow each other, none of whose spans another has.
  std::int64_t parts() const { return std::max<std::int64_t>(std::ssize(cuts_) - 1, 0); }
  struct Part {
    std::size_t first, count;
  };
  Part part_of(std::int64_t part) const {
    const auto at = static_cast<std::size_t>(part);
    return {cuts_[at], cuts_[at + 1] - cuts_[at]};
  }
  bool names_all_rows() const { return std::ssize(pack_.keys) == pack_.rows(); }

  bool quantized(Place place) const;  // by the contract
  bool imitates(Place place) const;   // and by this trainer
  bool follows(Place place) const;    // toward records
  bool audits(Place place) const;
  std::int8_t exponent(Place place) const;

  at::Tensor rounded(Place place, const at::Tensor& x) const;
  void round(Place place, TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) const;
  void round_here(Place place, TensorView<Bf16, 2> x) const;
  void round_there(Place place, TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) const;
  bool compensates(Place place) const;
  float residual_factor(const Quantizer& rule) const;
  void compensate(Place place, TensorView<Bf16, 2> x) const;
  void count(Site site, std::span<const std::int64_t> counts, std::int64_t cols) const;
  void show(Place place, const at::Tensor& x) const;
  void show_experts(Layer layer, const at::Tensor& chosen) const;
  /// Other experts than the router's, for some rows.
  struct Choice {
    std::int32_t* experts;  // [rows, K]
    std::uint8_t* present;  // [rows]; both are zeros before
  };
  bool follows_routes(Layer layer) const;
  void recorded(std::int64_t part, Layer layer, const Choice& into) const;
  void own(Layer layer, const Choice& into) const;
  void follow(Layer layer, const at::Tensor& chosen) const;
  /// On a CUDA device: sites_cuda.cc.
  struct There;
  void read_ahead_there(const at::Device& device, std::int64_t most_bytes);
  There planned(std::int32_t group) const;
  void fetch_there() const;
  void settle_there() const;
  void audit_held() const;
  void compensate_there(Place place, TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) const;
  void audit_unrounded(Place place, const at::Tensor& x) const;
  void audit_there(Place place, std::int64_t cols, const There& records, const at::Tensor& before,
                   const at::Tensor& after) const;
  at::Tensor audit_index(const at::Device& device) const;
  void gather_audited(std::span<const Bf16* const> from, std::span<const at::Tensor> to) const;
  There bring(std::int32_t group, const at::Device& device) const;
  const There& there(Place place, const at::Device& device) const;
  void follow_there(Layer layer, const at::Tensor& chosen) const;
  void keep_own(Layer layer, const at::Tensor& chosen) const;
  std::size_t route_at(Layer layer, std::int64_t position) const;
  void count_routes(std::int64_t followed, std::int64_t mismatched) const;
  std::vector<Bf16> audited_rows(const Bf16* x, std::int64_t width) const;
  void audit(Place place, std::int64_t cols, const std::vector<Bf16>& before,
             const std::vector<Bf16>& after) const;
  void count_audit(Place place, std::span<const std::int64_t> counts, bool rounded) const;

  const Agreement& agreement_;
  const ContractId contract_;  // agreement_.contract.id(), which is dear
  const Qat& qat_;
  const Pack& pack_;
  const TraceSource* trace_;
  Tally* tally_;
  Reveal reveal_;
  OwnRoutes own_;
  std::vector<std::size_t> cuts_;     // of pack.keys, where tasks that read may begin
  std::vector<std::size_t> audited_;  // which of pack.keys
  struct Later;
  at::Tensor counts_there(const at::Device& device) const;
  mutable std::shared_ptr<Later> later_;  // where something was counted on a CUDA device
  struct Ahead;
  std::shared_ptr<Ahead> ahead_;        // after read_ahead() on one
  mutable std::shared_ptr<There> now_;  // of the group that was asked for last
};

}  // namespace lockstep::train
