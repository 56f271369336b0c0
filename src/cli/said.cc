#include "cli/said.h"

#include <filesystem>
#include <new>

#include "base/error.h"
#include "base/text.h"
#include "device/memory.h"

namespace lockstep::cli {

std::string said(const std::exception& failed) {
  const std::string what = failed.what();
  if (dynamic_cast<const Error*>(&failed) != nullptr) return what;
  const auto has = [&](const char* words) { return what.find(words) != std::string::npos; };
  const std::string first = what.substr(0, what.find('\n'));
  if (has("CUDA out of memory")) {  // this and the rest in torch's words
    if (has(" allowed; ")) {
      return first +
             "; raise trainer.memory, lower trainer.tokens_per_pass, or set trainer.recompute = "
             "true";
    }
    return first +
           "; lower trainer.tokens_per_pass or rollout.cache, or set trainer.recompute = true";
  }
  if (has("CUDA error") || has("CUBLAS_STATUS") || has("CUDA driver error")) {
    return cat({"the CUDA device failed: ", first, "; ", kBeginAgain});
  }
  if (dynamic_cast<const std::bad_alloc*>(&failed) != nullptr || has("can't allocate memory")) {
    return "the memory is used up; ./lockstep doctor RECIPE says what a recipe takes: lower "
           "schedule.prompts or samples, rollout.cache or trainer.tokens_per_pass";
  }
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&failed)) {
    const std::string other = file->path2().empty() ? "" : " (to " + file->path2().string() + ")";
    return file->path1().string() + other + ": " + file->code().message();
  }
  return "a fault of lockstep's own, which stopped it: " + first;
}

}  // namespace lockstep::cli
