// Tokenizers, templates, answers and checkpoints for Python tests to drive. One JSON request a line
// on standard input, one answer a line on standard output.
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/error.h"
#include "data/answer.h"
#include "data/chat_template.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"

namespace {

using namespace lockstep;
using nlohmann::json;

std::optional<data::Tokenizer> tokenizer;
std::optional<data::ChatTemplate> chat;

std::string hex(const std::string& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (unsigned char c : bytes) out += {kDigits[c >> 4], kDigits[c & 15]};
  return out;
}

json render(const json& request) {
  std::vector<data::Message> messages;
  for (const json& message : request["messages"]) {
    messages.push_back({message["role"], message["content"]});
  }
  return chat.value().render(messages, request.value("generate", true));
}

/// Reads a checkpoint and writes it again.
json copy(const json& request) {
  const CheckpointSource source(request["from"].get<std::string>());
  CheckpointWriter writer(request["to"].get<std::string>(), source.config(),
                          {.max_shard_bytes = request.value("shard", std::uint64_t{1} << 30),
                           .companion = request["from"].get<std::string>()});
  writer.begin({}, {});
  source.each([&](const Weight& weight) { writer.put(weight); });
  return writer.commit().size();
}

json answer(const json& request) {
  const std::string op = request["op"];
  if (op == "tokenizer") {
    tokenizer = value_or_throw(data::Tokenizer::load(request["folder"].get<std::string>()));
    return tokenizer->size();
  }
  if (op == "encode") return tokenizer.value().encode(request["text"].get<std::string>());
  if (op == "decode") return tokenizer.value().decode(request["tokens"].get<std::vector<Token>>());
  if (op == "bytes")
    return hex(tokenizer.value().bytes(request["tokens"].get<std::vector<Token>>()));
  if (op == "template") {
    chat = value_or_throw(data::ChatTemplate::load(request["folder"].get<std::string>()));
    return chat.has_value();
  }
  if (op == "render") return render(request);
  if (op == "same") {
    return data::same_answer(request["a"].get<std::string>(), request["b"].get<std::string>());
  }
  if (op == "correct") {
    return data::correct(data::Judge::kAnswer, request["response"].get<std::string>(),
                         request["truth"].get<std::string>());
  }
  if (op == "copy") return copy(request);
  throw Error("no such op: " + op);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    json result;
    try {
      result = {{"ok", answer(json::parse(line))}};
    } catch (const Error& error) {
      result = {{"error", error.what()}};
    }
    std::cout << result.dump() << "\n";
  }
}
