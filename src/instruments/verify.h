/// Do the parts agree on this checkpoint? Checks that a run relies on, each with its figures.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/weights.h"
#include "record/agreement.h"
#include "rollout/engine.h"
#include "train/trainer.h"

namespace lockstep::instruments {

struct Check {
  std::string name;
  bool ok = false;
  std::string figures{};  // one line: what was compared and how much of it, or what was wrong
};

struct VerifyArgs {
  /// The contract is that of the run; guide and the trainer's arm are chosen by each check.
  const Agreement& agreement;
  const WeightSource& weights;
  Device device{};
  rollout::Options rollout{};  // declared drift is left out
  std::string run_contract{};  // the id that the run directory names, hexadecimal; empty: none
  std::int32_t prompts = 6;    // of random tokens, so that no task or tokenizer has a say
  std::int32_t samples = 2;
  std::int32_t max_new_tokens = 24;
};

/// Runs contract, refit, capture, prefill and batch, in this order; calls `each` as soon as a check
/// is done. What a check throws makes it fail, with the message as its figures.
std::vector<Check> verify(const VerifyArgs& args, const std::function<void(const Check&)>& each);

}  // namespace lockstep::instruments
