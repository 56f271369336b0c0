/// What `inspect` says of each kind of thing. inspect.cc finds out which one it is.
#pragma once

#include <filesystem>

#include "cli/verbs.h"

namespace lockstep::cli {

/// Shape, parameters, dtypes and bytes by part, tokenizer, and what the contract would make of it.
void inspect_checkpoint(const std::filesystem::path& folder, const InspectArgs& args);

/// The tensors of one safetensors file.
void inspect_safetensors(const std::filesystem::path& file);

/// Segments: one file, or all of a folder. Read only: another process may be writing them.
void inspect_trace(const std::filesystem::path& path, const InspectArgs& args);

}  // namespace lockstep::cli
