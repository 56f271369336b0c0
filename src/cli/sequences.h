/// Sequences to be scored, from JSONL (docs/formats/sequences.md).
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "model/config.h"
#include "record/trajectory.h"

namespace lockstep::cli {

struct SequenceRow {
  std::int64_t line = 0;       // of the file, from 1
  Trajectory trajectory{};     // response_mask says which tokens are scored
  std::vector<float> given{};  // [T] the row's own rollout_logp; empty: it has none
};

/// Reads one row. Throws Error that says what is wrong, not where.
SequenceRow parse_sequence(std::string_view line, const data::Tokenizer& tokenizer,
                           const ModelConfig& model);

/// All rows, in order; blank lines are passed over. Throws Error with file and line.
std::vector<SequenceRow> read_sequences(const std::filesystem::path& file,
                                        const data::Tokenizer& tokenizer, const ModelConfig& model);

}  // namespace lockstep::cli
