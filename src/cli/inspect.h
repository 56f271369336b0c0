/// What `inspect` says of each kind of thing. inspect.cc finds out which one it is.
#pragma once

#include <filesystem>
#include <string>

#include "cli/verbs.h"
#include "contract/site.h"

namespace lockstep::cli {

/// Shape, parameters, dtypes and bytes by part, tokenizer, and what the contract would make of it.
void inspect_checkpoint(const std::filesystem::path& folder, const InspectArgs& args);

/// The tensors of one safetensors file.
void inspect_safetensors(const std::filesystem::path& file);

/// Segments: one file, or all of a folder. Read only: another process may be writing them.
void inspect_trace(const std::filesystem::path& path, const InspectArgs& args);

/// Whether a token of a sequence is guided at a place and why not, its values on both sides, and
/// where its record leads or would lead. The path is a checkpoint, a run or a recipe.
void inspect_why(const InspectArgs& args);

/// "3.w13_in" as a place. Throws Usage.
Place parse_place(const std::string& text);

/// The runs in a folder of runs, two levels deep as report reads them, by commas; "" where there is
/// none.
std::string runs_inside(const std::filesystem::path& folder);

}  // namespace lockstep::cli
