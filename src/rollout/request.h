/// What may be asked of the engine. Each check throws Error in one line: what, its value, the
/// remedy.
#pragma once

#include "model/config.h"
#include "record/agreement.h"
#include "rollout/engine.h"

namespace lockstep::rollout {

void check_options(const Options& options);

/// Everything that the guide records must be something that the contract quantizes.
void check_guide(const Agreement& agreement);

/// Also fills response_mask and rollout_logp with zeros up to the tokens' end.
void check_request(Request& request, const ModelConfig& model, bool recorded);

/// Checks a trajectory that is to be scored; fills its mask (all but the first token where it was
/// empty) and clears its log-probs.
void prepare_scoring(Trajectory& trajectory, const ModelConfig& model);

/// Ends all behind a failure, which is what to tell: what more fails is not.
void abort_quietly(Engine& engine) noexcept;

[[noreturn]] void throw_held_back(const std::string& why);

}  // namespace lockstep::rollout
