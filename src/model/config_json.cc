#include "model/config_json.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "model/json.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();

/// A config's keys, read strictly: a key that is there has the right type or throws.
class Keys {
 public:
  Keys(const json& object, std::string what) : object_(object), what_(std::move(what)) {
    if (!object_.is_object()) throw Error(cat({what_, ": is not a JSON object"}));
  }

  /// The value at key; nullptr where it is absent or null.
  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::int32_t integer(const char* key, std::int64_t low, std::int64_t high) const {
    const json* value = find(key);
    if (!value) throw Error(cat({what_, ": ", key, " is missing"}));
    const auto number = as_integer(*value);
    if (!number || *number < low || *number > high) {
      throw Error(cat({what_, ": ", key, " is ", value->dump(), "; a whole number from ", low,
                       " to ", high, " is expected"}));
    }
    return static_cast<std::int32_t>(*number);
  }

  std::int32_t integer(const char* key, std::int64_t low, std::int64_t high,
                       std::int32_t absent) const {
    return find(key) ? integer(key, low, high) : absent;
  }

  double positive(const char* key, double absent) const {
    const json* value = find(key);
    if (!value) return absent;
    const double number = value->is_number() ? value->get<double>() : 0.0;
    if (!(number > 0.0) || !std::isfinite(number)) {
      throw Error(
          cat({what_, ": ", key, " is ", value->dump(), "; a positive number is expected"}));
    }
    return number;
  }

  bool boolean(const char* key, bool absent) const {
    const json* value = find(key);
    if (!value) return absent;
    if (!value->is_boolean()) {
      throw Error(cat({what_, ": ", key, " is ", value->dump(), "; true or false is expected"}));
    }
    return value->get<bool>();
  }

  /// Refuses all but `only`; an absent key counts as `only`.
  void require(const char* key, const json& only) const {
    const json* value = find(key);
    if (value && *value != only) refuse(key, *value, only.dump());
  }

  [[noreturn]] void refuse(const char* key, const json& value, const std::string& only) const {
    throw Error(cat({what_, ": ", key, " is ", value.dump(), ", which is not implemented; only ",
                     only, " is"}));
  }

  static std::optional<std::int64_t> as_integer(const json& value) {
    if (!value.is_number_integer()) return std::nullopt;
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{kMaxInt}) {
      return std::nullopt;
    }
    return value.get<std::int64_t>();
  }

 private:
  const json& object_;
  std::string what_;
};

void refuse_what_is_not_implemented(const Keys& keys, const std::string& what) {
  if (!keys.find("model_type")) throw Error(cat({what, ": model_type is missing"}));
  keys.require("model_type", "qwen3_moe");
  keys.require("hidden_act", "silu");
  keys.require("attention_bias", false);
  keys.require("use_sliding_window", false);
  keys.require("decoder_sparse_step", 1);
  keys.require("mlp_only_layers", json::array());
  keys.require("partial_rotary_factor", 1.0);
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (const json* value = keys.find(key)) keys.refuse(key, *value, "plain weights");
  }
  if (const json* types = keys.find("layer_types")) {
    for (const json& type : *types) {
      if (type != "full_attention") keys.refuse("layer_types", type, "\"full_attention\"");
    }
  }
}

/// Transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters.
double rope_theta(const Keys& keys, const std::string& what) {
  constexpr double kDefault = 1e6;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* value = keys.find(key);
    if (!value) continue;
    const Keys rope(*value, cat({what, ": ", key}));
    rope.require("rope_type", "default");
    rope.require("type", "default");
    rope.require("partial_rotary_factor", 1.0);
  }
  const json* parameters = keys.find("rope_parameters");
  if (!parameters) return keys.positive("rope_theta", kDefault);
  const Keys rope(*parameters, cat({what, ": rope_parameters"}));
  const double theta = rope.positive("rope_theta", keys.positive("rope_theta", kDefault));
  if (keys.positive("rope_theta", theta) != theta) {
    throw Error(cat({what, ": rope_theta is ", keys.find("rope_theta")->dump(),
                     ", but rope_parameters.rope_theta is ", theta}));
  }
  return theta;
}

std::vector<Token> stop_tokens(const Keys& keys, std::int32_t vocabulary, const std::string& what) {
  const json* value = keys.find("eos_token_id");
  if (!value) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  std::vector<Token> tokens;
  for (const json& entry : list) {
    const auto token = Keys::as_integer(entry);
    if (!token || *token < 0 || *token >= vocabulary) {
      throw Error(cat({what, ": eos_token_id is ", value->dump(), "; tokens from 0 to ",
                       vocabulary - 1, " are expected"}));
    }
    tokens.push_back(static_cast<Token>(*token));
  }
  return tokens;
}

/// generation_config.json in the folder of the config.json that `what` names.
std::string beside(const std::string& what) {
  constexpr std::string_view kName = "config.json";
  const bool named = what.ends_with(kName);
  return (named ? what.substr(0, what.size() - kName.size()) : "") + "generation_config.json";
}

ModelConfig read(const json& object, const json& generation, const std::string& what) {
  const Keys keys(object, what);
  refuse_what_is_not_implemented(keys, what);
  ModelConfig config;
  config.num_layers = keys.integer("num_hidden_layers", 1, 1 << 12);
  config.hidden = keys.integer("hidden_size", 1, 1 << 20);
  config.expert_width = keys.integer("moe_intermediate_size", 1, 1 << 20);
  // Transformers 5 saves the number of experts under its own name.
  const bool local = !keys.find("num_experts") && keys.find("num_local_experts");
  config.num_experts = keys.integer(local ? "num_local_experts" : "num_experts", 1, 1 << 15);
  config.experts_per_token = keys.integer("num_experts_per_tok", 1, config.num_experts);
  config.num_heads = keys.integer("num_attention_heads", 1, 1 << 12);
  config.num_kv_heads = keys.integer("num_key_value_heads", 1, config.num_heads, config.num_heads);
  config.head_dim = keys.integer("head_dim", 2, 1 << 14, config.hidden / config.num_heads);
  config.vocabulary = keys.integer("vocab_size", 1, 1 << 24);
  config.max_positions = keys.integer("max_position_embeddings", 1, kMaxInt, 32768);
  config.rms_eps = static_cast<float>(keys.positive("rms_norm_eps", 1e-6));
  config.rope_theta = rope_theta(keys, what);
  config.normalize_gates = keys.boolean("norm_topk_prob", false);
  config.tied_embeddings = keys.boolean("tie_word_embeddings", false);
  config.stop_tokens = stop_tokens(keys, config.vocabulary, what);
  if (!generation.is_null()) {
    const std::string where = beside(what);
    const Keys more(generation, where);
    if (more.find("eos_token_id")) {
      config.stop_tokens = stop_tokens(more, config.vocabulary, where);
    }
  }
  check_config(config, what);
  return config;
}

json to_json(const ModelConfig& config) {
  json object = {{"architectures", {"Qwen3MoeForCausalLM"}},
                 {"model_type", "qwen3_moe"},
                 {"attention_bias", false},
                 {"attention_dropout", 0.0},
                 {"decoder_sparse_step", 1},
                 {"head_dim", config.head_dim},
                 {"hidden_act", "silu"},
                 {"hidden_size", config.hidden},
                 {"initializer_range", 0.02},
                 // of dense layers, of which there are none; Transformers wants it
                 {"intermediate_size", config.expert_width * config.experts_per_token},
                 {"max_position_embeddings", config.max_positions},
                 {"mlp_only_layers", json::array()},
                 {"moe_intermediate_size", config.expert_width},
                 {"norm_topk_prob", config.normalize_gates},
                 {"num_attention_heads", config.num_heads},
                 {"num_experts", config.num_experts},
                 {"num_experts_per_tok", config.experts_per_token},
                 {"num_hidden_layers", config.num_layers},
                 {"num_key_value_heads", config.num_kv_heads},
                 {"rope_scaling", nullptr},
                 {"rope_theta", config.rope_theta},
                 {"router_aux_loss_coef", 0.001},
                 {"sliding_window", nullptr},
                 {"tie_word_embeddings", config.tied_embeddings},
                 {"torch_dtype", "bfloat16"},
                 {"use_cache", true},
                 {"use_sliding_window", false},
                 {"vocab_size", config.vocabulary}};
  // As a number that reads back as the same float, not as its 17 digits in double.
  object["rms_norm_eps"] = json::parse(cat({config.rms_eps}));
  if (!config.stop_tokens.empty()) object["eos_token_id"] = config.stop_tokens.front();
  return object;
}

}  // namespace

void check_config(const ModelConfig& config, const std::string& what) {
  const auto positive = [&](const char* key, std::int32_t value) {
    if (value < 1) throw Error(cat({what, ": ", key, " is ", value, "; at least 1 is expected"}));
  };
  positive("num_hidden_layers", config.num_layers);
  positive("hidden_size", config.hidden);
  positive("moe_intermediate_size", config.expert_width);
  positive("num_experts", config.num_experts);
  positive("num_experts_per_tok", config.experts_per_token);
  positive("num_attention_heads", config.num_heads);
  positive("num_key_value_heads", config.num_kv_heads);
  positive("vocab_size", config.vocabulary);
  positive("max_position_embeddings", config.max_positions);
  if (config.experts_per_token > config.num_experts) {
    throw Error(cat({what, ": num_experts_per_tok is ", config.experts_per_token,
                     ", more than the ", config.num_experts, " experts"}));
  }
  if (config.num_heads % config.num_kv_heads != 0) {
    throw Error(cat({what, ": num_attention_heads is ", config.num_heads,
                     ", no multiple of num_key_value_heads, ", config.num_kv_heads}));
  }
  if (config.head_dim < 2 || config.head_dim % 2 != 0) {
    throw Error(
        cat({what, ": head_dim is ", config.head_dim, "; rotary positions want an even number"}));
  }
}

Result<ModelConfig> parse_config(std::string_view text, std::string_view generation,
                                 const std::string& what) {
  constexpr JsonLimits kLimits = {.bytes = std::size_t{4} << 20, .depth = 32};
  const auto object = parse_json(text, what, kLimits);
  if (!object) return tl::unexpected(object.error());
  json second;
  if (!generation.empty()) {
    auto parsed = parse_json(generation, beside(what), kLimits);
    if (!parsed) return tl::unexpected(parsed.error());
    second = std::move(*parsed);
  }
  try {
    return read(*object, second, what);
  } catch (const Error& error) {
    return fault(error.what());
  }
}

Result<ModelConfig> read_config(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder)) {
    return fault(cat({folder.string(), ": no such folder; a Hugging Face directory is expected"}));
  }
  const std::filesystem::path path = folder / "config.json";
  const auto text = read_text(path);
  if (!text) return tl::unexpected(text.error());
  std::string generation;
  if (std::filesystem::exists(folder / "generation_config.json")) {
    auto more = read_text(folder / "generation_config.json");
    if (!more) return tl::unexpected(more.error());
    generation = std::move(*more);
  }
  return parse_config(*text, generation, path.string());
}

void write_config(const ModelConfig& config, const std::filesystem::path& folder) {
  check_config(config, (folder / "config.json").string());
  json generation = {{"do_sample", true}};
  if (!config.stop_tokens.empty()) generation["eos_token_id"] = config.stop_tokens;
  write_text(folder / "generation_config.json", generation.dump(2) + "\n");
  write_text(folder / "config.json", to_json(config).dump(2) + "\n");
}

}  // namespace lockstep
