/// The tasks by name.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "data/arith.h"
#include "data/jsonl.h"
#include "data/task.h"

namespace lockstep::data {

struct TaskOptions {
  std::string name = "arith";  // "arith", or "jsonl"; the options of the other one are left alone
  ArithOptions arith{};
  JsonlOptions jsonl{};
};

/// `model` is the folder whose tokenizer reads the prompts and whose chat template, where it has
/// one, renders conversations. Throws Error.
std::unique_ptr<Task> make_task(const TaskOptions& options, const std::filesystem::path& model);

}  // namespace lockstep::data
