/// Arms: every method and baseline is a value. No code outside this file asks which arm it runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "contract/contract.h"
#include "record/guide.h"
#include "rl/options.h"
#include "rollout/engine.h"
#include "sync/options.h"
#include "train/trainer.h"

namespace lockstep {

/// Whose experts the trainer's update takes (docs/methods.md, What they share).
enum class RoutingReplay : std::uint8_t {
  kNone,  // each pass its own
  kR2,    // those of the trainer's own pass over the old policy
  kR3,    // the rollout's, recorded
};

/// An arm that has met its model: what the parts of a run are built from.
struct Arm {
  std::string name;
  Contract contract{};         // the rollout's numbers
  train::Qat qat{};            // which of them the trainer imitates
  Guide guide{};               // what is recorded, and how the trainer follows it
  bool own_routes = false;     // R2: updates take the experts of the old policy's pass
  rollout::Options rollout{};  // the residual pass
  rl::Options rl{};            // loss and correction
  sync::Options sync{};        // what happens to weights on their way
};

/// An arm as recipes spell it, for a model of any depth.
struct ArmSpec {
  std::string name = "trace";
  std::string contract = "lockstep";  // a preset's name
  std::string contract_layers = "all";
  // Of that kind of tensor: "true" for the preset's format, "false" for BF16, or a format's name.
  std::string contract_weights = "true";
  std::string contract_activations = "true";
  std::string contract_kv = "true";
  MxRule mx_rule = MxRule::kRceil;                // of the formats mxfp4 and mxfp8
  FourOverSix four_over_six = FourOverSix::kOff;  // of weights and activations
  bool four_over_six_kv = false;                  // and of K and V
  std::uint8_t macro_blocks = 0;                  // of MXFP4: bit 0 weights, bit 1 activations
  std::vector<std::int8_t> kv_exponents{};        // [L, 2]; empty: calibrated when the run begins
  train::Qat qat{};
  Guidance mode = Guidance::kOwnScale;
  SiteSet sites{};
  std::string layers = "all";
  std::string kv_layers{};  // of K and V; empty: the same
  RoutingReplay routing_replay = RoutingReplay::kR3;
  std::int32_t audit_every = 512;
  std::int32_t max_version_diff = 0;
  Fallback fallback = Fallback::kUnguided;
  rollout::Residual residual = rollout::Residual::kNone;
  rollout::ResidualScope residual_scope = rollout::ResidualScope::kPerToken;
  std::int32_t residual_permille = 500;
  SiteSet residual_sites{Site::kW13In};
  float residual_alpha = 1.0f;
  std::string residual_groups{};  // of the static scope, as 0 and 1; empty: calibrated at the start
  bool qat_residual = false;      // does the trainer imitate the dense second pass?
  sync::Options sync{};
  /// The surrogate that belongs to the method; rl.surrogate of a recipe stands above it.
  std::optional<rl::Surrogate> surrogate{};
};

/// The names of the arms, baselines first.
const std::vector<std::string>& arm_names();

/// The arm of that name; throws Error naming those that there are.
ArmSpec arm_spec(std::string_view name);

/// The arm for a model: layers counted, the contract made. `rollout` and `rl` are what the arm does
/// not decide. Throws Error where they contradict each other.
Arm bind(const ArmSpec& spec, const ModelConfig& model, const rollout::Options& rollout = {},
         const rl::Options& rl = {});

/// The layers that a name or a list means in a model of `num_layers`: "all", "none", "first_half",
/// "latter_half", "middle_half", "latter_two_thirds", "odd", "even", "first_85%" or "last_25%",
/// which take the nearest number of layers but leave at least one out, or "0,2,5-7". Throws Error.
LayerSet layer_set(std::string_view spelling, std::int32_t num_layers);

}  // namespace lockstep
