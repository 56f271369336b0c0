#include "cli/unfinished.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/text.h"
#include "model/json.h"
#include "step/run_dir.h"

namespace lockstep::cli {
namespace {

/// Takes a key's line from `lines`, which begin with a newline each.
void leave_out(std::string& lines, const std::string& key) {
  const std::size_t at = lines.find("\n" + key + ": ");
  if (at != std::string::npos) lines.erase(at, lines.find('\n', at + 1) - at);
}

}  // namespace

std::string differs_from(const std::filesystem::path& file, const recipe::SftRecipe& recipe) {
  const std::string before = value_or_throw(read_text(file));
  std::string lines = '\n' + recipe::differences(before, recipe::resolved(recipe), file.string());
  if (recipe.device == recipe::kAutoDevice) leave_out(lines, "device");  // it is chosen anew
  leave_out(lines, "save_every");
  return recipe::in_one_line(lines.substr(1));
}

Unfinished::Unfinished(const std::filesystem::path& out, const recipe::SftRecipe& recipe)
    : folder_(out.string() + ".unfinished"), recipe_(recipe::resolved(recipe)) {
  if (!std::filesystem::exists(folder_)) return;
  if (!std::filesystem::exists(folder_ / "sft.toml")) {
    throw Usage(cat({folder_.string(), " is nothing that an interrupted run left (it has no ",
                     "sft.toml); name another folder with --out, or delete that one"}));
  }
  const std::string different = differs_from(folder_ / "sft.toml", recipe);
  if (!different.empty()) {
    throw Usage(cat({folder_.string(), " is of another recipe that was interrupted (before / now: ",
                     different, "); name another folder with --out, or delete that one"}));
  }
  const std::filesystem::path file = folder_ / "loss.jsonl";
  curve_ = value_or_throw(read_text(file));
  std::istringstream lines(curve_);
  for (std::string line; std::getline(lines, line);) {
    const auto read = nlohmann::json::parse(line, nullptr, false);
    const auto step = static_cast<std::int64_t>(losses_.size()) + 1;
    if (!read.is_object() || read.value("step", std::int64_t{0}) != step ||
        !read.contains("train/loss") || !read["train/loss"].is_number()) {
      throw Error(cat({file.string(), ":", step, " is not the loss of step ", step, "; delete ",
                       folder_.string(), " to begin at step 1"}));
    }
    losses_.push_back(read["train/loss"].get<double>());
  }
}

void Unfinished::load(train::Trainer& trainer) const {
  try {
    trainer.load(folder_ / "training_state");
  } catch (const Error& error) {
    throw Error(cat({error.what(), "; delete ", folder_.string(), " to begin at step 1"}));
  }
}

void Unfinished::save(const train::Trainer& trainer, const std::string& curve) const {
  step::write_whole(folder_, [&](const std::filesystem::path& folder) {
    std::filesystem::create_directories(folder / "training_state");
    trainer.save(folder / "training_state");
    write_text(folder / "loss.jsonl", curve);
    write_text(folder / "sft.toml", recipe_);
  });
}

void Unfinished::remove() const { std::filesystem::remove_all(folder_); }

}  // namespace lockstep::cli
