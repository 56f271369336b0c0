#pragma once

#include <cstdint>
#include <filesystem>

#include "train/parameters.h"

namespace lockstep::train {

/// Masters, both moments and the number of updates: docs/formats/trainer_state.md. Written whole
/// beside its name, then renamed.
void write_state(const std::filesystem::path& file, const Parameters& parameters,
                 std::int64_t updates, Stream stream = {});

/// The way back, bit for bit; the number of updates. Checks everything before the first number is
/// changed. Throws Error naming the file and what is wrong with it: missing, cut off, damaged, or
/// of another model.
std::int64_t read_state(const std::filesystem::path& file, Parameters& parameters,
                        Stream stream = {});

}  // namespace lockstep::train
