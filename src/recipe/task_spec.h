#pragma once

#include <string>

#include "data/answer.h"
#include "data/arith.h"

namespace lockstep::recipe {

/// Which task, of those in data/; keys of the other one are left alone.
struct TaskSpec {
  std::string name = "arith";  // "arith", or "jsonl"
  data::ArithOptions arith;
  std::string file{};  // of "jsonl"
  std::string eval_file{};
  data::Judge judge = data::Judge::kAnswer;
};

}  // namespace lockstep::recipe
