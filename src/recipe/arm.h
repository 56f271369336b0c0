/// Arms: every method and baseline is a value. No code outside this file asks which arm it runs.
#pragma once

#include <string>

#include "contract/contract.h"
#include "record/guide.h"
#include "rl/objective.h"
#include "rollout/engine.h"
#include "train/trainer.h"

namespace lockstep {

struct Arm {
  std::string name;
  Contract contract{};         // the rollout's numbers
  train::Qat qat{};            // which of them the trainer imitates
  Guide guide{};               // what is recorded, and how the trainer follows it
  rollout::Options rollout{};  // the residual pass
  rl::Options rl{};            // loss and correction
};

/// Each arm is another one and what it changes.
namespace arms {

inline Arm bf16(const ModelConfig&) { return {.name = "bf16"}; }

inline Arm naive(const ModelConfig& model) {
  Arm arm = bf16(model);
  arm.name = "naive";
  arm.contract = contracts::lockstep(model.num_layers);
  return arm;
}

inline Arm w4a4_qat(const ModelConfig& model) {
  Arm arm = naive(model);
  arm.name = "w4a4_qat";
  arm.qat = {.weights = true, .activations = true, .k = true, .v = true};
  return arm;
}

inline Arm quads(const ModelConfig& model) {
  Arm arm = naive(model);
  arm.name = "quads";
  arm.qat = {.weights = true};
  arm.rollout.residual = rollout::Residual::kChannels;
  return arm;
}

inline Arm trace(const ModelConfig& model) {
  Arm arm = w4a4_qat(model);
  arm.name = "trace";
  arm.guide = {.mode = Guidance::kLsb,
               .sites = {Site::kW13In, Site::kK, Site::kV},
               .layers = LayerSet::range(model.num_layers / 2, model.num_layers),
               .replay_experts = true};
  return arm;
}

}  // namespace arms
}  // namespace lockstep
