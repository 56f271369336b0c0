/// config.json and generation_config.json of a Hugging Face directory.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/error.h"
#include "model/config.h"

namespace lockstep {

/// The config of `folder`. What would be computed differently here than the file says (another
/// architecture, a sliding window, dense layers, biases, scaled rotary positions, ...) is refused
/// by key and value.
Result<ModelConfig> read_config(const std::filesystem::path& folder);

/// The same of text; `what` names it in messages. An empty `generation` stands for a folder
/// without a generation_config.json.
Result<ModelConfig> parse_config(std::string_view text, std::string_view generation,
                                 const std::string& what);

/// Writes both files; Transformers 4 and 5 read them alike. Throws Error.
void write_config(const ModelConfig& config, const std::filesystem::path& folder);

/// Throws Error naming the first field that no Qwen3-MoE can have.
void check_config(const ModelConfig& config, const std::string& what);

}  // namespace lockstep
