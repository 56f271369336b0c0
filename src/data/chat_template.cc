#include "data/chat_template.h"

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "data/jinja.h"
#include "model/json.h"

namespace lockstep::data {
namespace {

using nlohmann::json;

/// A special token as tokenizer_config.json has it: a string, or an object with its content.
std::string token_text(const json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return "";
  if (found->is_string()) return found->get<std::string>();
  if (found->is_object() && found->contains("content") && (*found)["content"].is_string()) {
    return (*found)["content"].get<std::string>();
  }
  return "";
}

}  // namespace

struct ChatTemplate::Program {
  std::vector<jinja::Node> nodes;
  std::map<std::string, json> variables;  // bos_token and the like
  std::string what;
};

namespace {

Result<ChatTemplate> make(std::string_view source, const std::string& what,
                          std::map<std::string, json> variables) {
  try {
    return ChatTemplate(std::make_shared<const ChatTemplate::Program>(
        ChatTemplate::Program{jinja::parse(source), std::move(variables), what}));
  } catch (const Error& error) {
    return fault(cat({what, ": chat template: ", error.what()}));
  }
}

}  // namespace

Result<ChatTemplate> ChatTemplate::parse(std::string_view source, const std::string& what) {
  return make(source, what, {});
}

Result<std::optional<ChatTemplate>> ChatTemplate::load(const std::filesystem::path& folder) {
  const std::filesystem::path config_path = folder / "tokenizer_config.json";
  const std::filesystem::path own_path = folder / "chat_template.jinja";
  json config = json::object();
  if (std::filesystem::exists(config_path)) {
    auto read = read_json(config_path);
    if (!read) return tl::unexpected(read.error());
    config = std::move(*read);
    if (!config.is_object()) return fault(cat({config_path.string(), ": is no JSON object"}));
  }
  std::map<std::string, json> variables = {{"bos_token", token_text(config, "bos_token")},
                                           {"eos_token", token_text(config, "eos_token")},
                                           {"pad_token", token_text(config, "pad_token")}};
  const auto wrap = [](Result<ChatTemplate> made) -> Result<std::optional<ChatTemplate>> {
    if (!made) return tl::unexpected(made.error());
    return std::optional<ChatTemplate>(std::move(*made));
  };
  if (std::filesystem::exists(own_path)) {
    const auto source = read_text(own_path);
    if (!source) return tl::unexpected(source.error());
    return wrap(make(*source, own_path.string(), std::move(variables)));
  }
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return std::optional<ChatTemplate>();
  if (!found->is_string()) {
    return fault(cat({config_path.string(),
                      ": several chat templates are not implemented; leave "
                      "one in chat_template.jinja"}));
  }
  return wrap(
      make(found->get_ref<const std::string&>(), config_path.string(), std::move(variables)));
}

std::string ChatTemplate::render(std::span<const Message> messages, bool generate) const {
  std::map<std::string, json> variables = program_->variables;
  json list = json::array();
  for (const Message& message : messages) {
    list.push_back({{"role", message.role}, {"content", message.content}});
  }
  variables["messages"] = std::move(list);
  variables["add_generation_prompt"] = generate;
  try {
    return jinja::render(program_->nodes, variables);
  } catch (const Error& error) {
    throw Error(cat({program_->what, ": chat template: ", error.what()}));
  }
}

}  // namespace lockstep::data
