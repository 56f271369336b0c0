#pragma once

#include <cstdint>
#include <string>

namespace lockstep::recipe {

/// Which task, of those in data/; keys of other tasks are left alone.
struct TaskSpec {
  std::string name = "arith";  // "arith", or "jsonl"
  std::int32_t difficulty = 2;
  std::string file{};  // of "jsonl"
  std::string eval_file{};
};

}  // namespace lockstep::recipe
