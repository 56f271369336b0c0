#pragma once

#include "cli/subject.h"
#include "cli/verbs.h"

namespace lockstep::cli {

/// Log-probs of the sequences of a JSONL file, by the engine, by the trainer, or by both beside
/// their gap: docs/formats/sequences.md says what a row may hold and what is written.
int score(const RolloutArgs& args, const Subject& subject);

}  // namespace lockstep::cli
