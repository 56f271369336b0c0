#include "instruments/run.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "model/json.h"
#include "recipe/compare.h"
#include "recipe/table.h"

namespace lockstep::instruments {
namespace {

namespace fs = std::filesystem;

constexpr double kMost = 1e100;  // what lies beyond is as good as infinite, and differences are

std::string text_of(const recipe::Value& value) {
  struct Visitor {
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(std::int64_t v) const { return cat({v}); }
    std::string operator()(double v) const { return cat({v}); }
    std::string operator()(const std::string& v) const { return v; }
    std::string operator()(recipe::Empty) const { return "{}"; }
    std::string operator()(const std::vector<std::int64_t>& v) const {
      std::string out;
      for (const std::int64_t item : v) out += (out.empty() ? "" : ", ") + cat({item});
      return out;
    }
    std::string operator()(const std::vector<std::string>& v) const {
      std::string out;
      for (const std::string& item : v) out += (out.empty() ? "" : ", ") + item;
      return out;
    }
  };
  return std::visit(Visitor{}, value);
}

/// The arm, the keys and the contract's id. A recipe that is no TOML is shown as it stands.
void read_recipe(RunData& run) {
  constexpr std::string_view kHead = "# contract ";
  if (run.recipe.starts_with(kHead)) {
    const std::size_t end = std::min(run.recipe.find('\n'), run.recipe.size());
    run.contract_id = run.recipe.substr(kHead.size(), end - kHead.size());
  }
  try {
    for (const recipe::Entry& entry : recipe::parse(run.recipe, "recipe.toml")) {
      run.keys[entry.name] = text_of(entry.value);
    }
  } catch (const Error&) {
    run.keys.clear();
  }
  const auto arm = run.keys.find("arm");
  if (arm != run.keys.end() && !arm->second.empty()) run.arm = arm->second;
}

/// A mean over no tokens is 0, and says nothing: where name/count is 0, name and its kin are NaN.
void forget_means_of_nothing(RunData& run) {
  constexpr std::string_view kCount = "/count";
  for (const auto& [name, counts] : run.metrics) {
    if (!name.ends_with(kCount)) continue;
    const std::string base = name.substr(0, name.size() - kCount.size());
    for (auto& [other, values] : run.metrics) {
      if (other != base && !other.starts_with(base + "/")) continue;
      if (other == name) continue;
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (counts[i] == 0) values[i] = kNaN;
      }
    }
  }
}

/// One line of metrics.jsonl; false where it is none.
bool append(std::string_view line, RunData& run) {
  const Result<nlohmann::json> json = parse_json(line, "metrics.jsonl");
  if (!json || !json->is_object() || !json->contains("step")) return false;
  const nlohmann::json& step = json->at("step");
  if (!step.is_number() || !std::isfinite(step.get<double>())) return false;
  for (const auto& [name, value] : json->items()) {
    if (name == "step" || !value.is_number()) continue;
    std::vector<double>& column = run.metrics[name];
    column.resize(run.steps.size(), kNaN);
    const double number = value.get<double>();
    column.push_back(std::abs(number) < kMost ? number : kNaN);
  }
  run.steps.push_back(step.get<double>());
  return true;
}

/// Steps ascending; of a step that stands twice the later line holds.
void put_in_order(RunData& run) {
  std::map<double, std::size_t> row_of;
  for (std::size_t row = 0; row < run.steps.size(); ++row) row_of[run.steps[row]] = row;
  const auto reorder = [&](std::vector<double>& column) {
    std::vector<double> ordered;
    for (const auto& [step, row] : row_of) ordered.push_back(column[row]);
    column = std::move(ordered);
  };
  for (auto& [name, column] : run.metrics) reorder(column);
  reorder(run.steps);
}

bool is_run(const fs::path& folder) {
  std::error_code none;  // a link that leads nowhere is no run
  return fs::exists(folder / "metrics.jsonl", none);
}

/// What `decompose` left beside the run counts as measured in its last step.
void read_decomposition(const fs::path& file, RunData& run) {
  if (run.steps.empty() || !fs::exists(file)) return;
  const Result<nlohmann::json> json = read_json(file);
  if (!json || !json->is_object() || !json->contains("metrics")) return;
  for (const auto& [name, value] : json->at("metrics").items()) {
    if (!value.is_number() || !name.starts_with("fp4/")) continue;
    std::vector<double>& column = run.metrics[name];
    column.assign(run.steps.size(), kNaN);
    column.back() = value.get<double>();
  }
}

/// What write_stop() left, unless the file is damaged.
std::optional<Stop> read_stop(const fs::path& file) {
  if (!fs::exists(file)) return std::nullopt;
  const Result<nlohmann::json> json = read_json(file);
  if (!json || !json->is_object()) return std::nullopt;
  const auto step = json->find("step"), why = json->find("why");
  if (step == json->end() || !step->is_number_integer() || why == json->end() ||
      !why->is_string()) {
    return std::nullopt;
  }
  return Stop{step->get<std::int64_t>(), why->get<std::string>()};
}

/// What is in the folder; a run without steps where nothing was measured yet.
RunData read_run(const fs::path& folder, const std::string& name) {
  RunData run;
  run.name = run.arm = name;
  if (const fs::path recipe = folder / "recipe.toml"; fs::exists(recipe)) {
    run.recipe = value_or_throw(read_text(recipe));
    read_recipe(run);
  }
  // A comparison's: the folder above names the arm, which may be a variant of the recipe's.
  if (folder.filename().string().starts_with("seed_")) {
    run.arm = folder.parent_path().filename().string();
  }
  read_metrics(value_or_throw(read_text(folder / "metrics.jsonl", std::size_t{4} << 30)), run);
  read_decomposition(folder / "decomposition.json", run);
  run.stop = read_stop(folder / recipe::kStopFile);
  return run;
}

std::vector<fs::path> folders_in(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    std::error_code none;  // a link that leads nowhere is no folder
    if (entry.is_directory(none)) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::string to_string(const Stop& stop) {
  return cat({"stopped at step ", stop.step, ": ", stop.why});
}

void write_stop(const fs::path& folder, const std::string& why) {
  if (!fs::exists(folder / "recipe.toml")) return;
  RunData run;
  if (is_run(folder)) {
    read_metrics(value_or_throw(read_text(folder / "metrics.jsonl", std::size_t{4} << 30)), run);
  }
  const double last = run.steps.empty() ? 0 : run.steps.back();
  const nlohmann::json json = {{"step", static_cast<std::int64_t>(last) + 1}, {"why", why}};
  write_text(folder / recipe::kStopFile, json.dump() + "\n");
}

const std::vector<double>& RunData::column(const std::string& metric) const {
  static const std::vector<double> kNone;
  const auto found = metrics.find(metric);
  return found == metrics.end() ? kNone : found->second;
}

bool read_metrics(const std::string& text, RunData& run) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line(text.data() + at, end - at);
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (!append(line, run)) ++run.unreadable_lines;
  }
  for (auto& [name, column] : run.metrics) column.resize(run.steps.size(), kNaN);
  put_in_order(run);
  forget_means_of_nothing(run);
  return !run.steps.empty();
}

std::vector<RunData> read_runs(const fs::path& given) {
  const fs::path folder = fs::weakly_canonical(given);  // "runs/demo/" has a name, too
  if (!fs::is_directory(folder)) {
    throw Usage(cat({given.string(), " is no folder; name a run directory, or a folder of them"}));
  }
  std::vector<RunData> runs;
  if (is_run(folder)) {
    runs.push_back(read_run(folder, folder.filename().string()));
  } else {
    for (const fs::path& child : folders_in(folder)) {
      const std::string name = child.filename().string();
      if (is_run(child)) {
        runs.push_back(read_run(child, name));
        continue;
      }
      for (const fs::path& below : folders_in(child)) {
        if (is_run(below)) runs.push_back(read_run(below, name + "/" + below.filename().string()));
      }
    }
  }
  if (runs.empty()) {
    throw Usage(cat({given.string(),
                     " has no metrics.jsonl, nor has a folder in it; name a run "
                     "directory, or a folder of them"}));
  }
  std::erase_if(runs, [](const RunData& run) { return run.steps.empty(); });  // yet to begin
  if (runs.empty()) {
    throw Error(cat({given.string(),
                     " has no line in metrics.jsonl that is a step's; name a run "
                     "that has done a step"}));
  }
  return runs;
}

std::vector<RunData> read_runs(const std::vector<fs::path>& folders) {
  std::vector<RunData> all;
  for (const fs::path& folder : folders) {
    for (RunData& run : read_runs(folder)) all.push_back(std::move(run));
  }
  return all;
}

}  // namespace lockstep::instruments
