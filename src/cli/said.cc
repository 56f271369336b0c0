#include "cli/said.h"

#include <cstdlib>
#include <filesystem>
#include <new>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "device/memory.h"

namespace lockstep::cli {
namespace {

/// The bytes that stand behind `words`, as torch writes them ("1.50 GiB"); -1 where none do.
double bytes_behind(const std::string& text, const std::string& words) {
  const std::size_t at = text.find(words);
  if (at == std::string::npos) return -1;
  const char* const number = text.c_str() + at + words.size();
  char* unit = nullptr;
  const double value = std::strtod(number, &unit);
  if (unit == number) return -1;
  const std::string_view of = unit;
  if (of.starts_with(" GiB")) return value * (1 << 30);
  if (of.starts_with(" MiB")) return value * (1 << 20);
  return of.starts_with(" KiB") ? value * (1 << 10) : value;
}

/// What helps where torch found no memory. " allowed; " stands there wherever a limit is set, also
/// where it is the device that is full. KV pages go as far as trainer.memory needs their room.
std::string remedy(const std::string& what) {
  const bool is_limited = what.find(" allowed; ") != std::string::npos;
  const double wanted = bytes_behind(what, "Tried to allocate ");
  const double free = bytes_behind(what, "of which ");
  const bool is_full = wanted >= 0 && free >= 0 && free < wanted;
  if (is_limited && !is_full) {
    return "raise trainer.memory, set trainer.recompute = true, or lower trainer.tokens_per_pass";
  }
  return cat(
      {is_limited ? ""
                  : "set trainer.memory to what training takes, for which KV pages make "
                    "room, or ",
       "set trainer.recompute = true, lower trainer.tokens_per_pass, or give other processes "
       "on the device less"});
}

}  // namespace

std::string said(const std::exception& failed) {
  const std::string what = failed.what();
  if (dynamic_cast<const Error*>(&failed) != nullptr) return what;
  const auto has = [&](const char* words) { return what.find(words) != std::string::npos; };
  const std::string first = what.substr(0, what.find('\n'));
  if (has("CUDA out of memory")) {  // this and the rest in torch's words
    return first + "; " + remedy(what);
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
