#include "data/tasks.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::data {

std::unique_ptr<Task> make_task(const TaskOptions& options, const std::filesystem::path& model) {
  Tokenizer tokenizer = value_or_throw(Tokenizer::load(model));
  if (options.name == "arith") {
    return std::make_unique<Arith>(options.arith, std::move(tokenizer));
  }
  if (options.name == "jsonl") {
    return std::make_unique<Jsonl>(options.jsonl, std::move(tokenizer),
                                   value_or_throw(ChatTemplate::load(model)));
  }
  throw Usage(cat({"task.name is \"", options.name, "\"; \"arith\" or \"jsonl\" is expected"}));
}

}  // namespace lockstep::data
