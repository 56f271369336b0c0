// What a report shows beyond what lies in run directories: verdicts, contracts, full codes' bytes.
#include "instruments/report.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/figures.h"
#include "cli/session.h"
#include "cli/verbs.h"
#include "model/config_json.h"
#include "recipe/preflight.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

/// A folder as it stands, else below runs/.
fs::path find_run(const std::string& name) {
  if (fs::is_directory(name)) return name;
  const fs::path below = run_folder(name);
  if (fs::is_directory(below)) return below;
  throw Usage(cat({"there is no run '", name, "', neither as a folder nor as ", below.string(),
                   "; name a run directory, or a folder of them"}));
}

/// The contract and what full codes would take, for which the model's shape must be at hand.
void add_contract(instruments::RunData& run) {
  const auto model = run.keys.find("model");
  if (model == run.keys.end()) return;
  try {
    const recipe::Recipe recipe = recipe::parse_recipe(run.recipe, "recipe.toml");
    const ModelConfig config = value_or_throw(read_config(checkpoint_folder(recipe.model)));
    run.contract = to_string(bind(recipe.arm, config, recipe.rollout, recipe.rl).contract);
    run.full_code_bytes = static_cast<double>(recipe::full_code_bytes(config));
  } catch (const Error&) {
    // The model is elsewhere, or the recipe is of another version: the page does without.
  }
}

/// The folder that all of them lie in.
fs::path common_folder(const std::vector<fs::path>& folders) {
  fs::path common = folders.front().parent_path();
  for (const fs::path& folder : folders) {
    while (*folder.lexically_relative(common).begin() == "..") common = common.parent_path();
  }
  return common;
}

/// Of several runs it is named after them: report.html may be that of all which lie there.
std::string page_of(const std::vector<fs::path>& folders) {
  constexpr std::size_t kMost = 100;
  std::string name = "report";
  for (const fs::path& folder : folders) name += "_" + folder.filename().string();
  if (name.size() > kMost) name = cat({"report_of_", folders.size(), "_runs"});
  return name + ".html";
}

}  // namespace

int report(const ReportArgs& args) {
  std::vector<fs::path> folders;
  std::string title;
  for (const std::string& name : args.runs) {
    const fs::path folder = fs::weakly_canonical(find_run(name));
    // The same run twice would pass for two seeds of an arm.
    if (std::find(folders.begin(), folders.end(), folder) != folders.end()) continue;
    folders.push_back(folder);
    title += (title.empty() ? "" : ", ") + folders.back().filename().string();
  }
  std::vector<instruments::RunData> runs = instruments::read_runs(folders);
  for (instruments::RunData& run : runs) {
    run.verdict = run.stop ? "bad: " + to_string(*run.stop) : verdict(run);
    add_contract(run);
  }
  fs::path out = args.out;
  if (out.empty()) {
    out = folders.size() == 1 ? folders[0] / "report.html"
                              : common_folder(folders) / page_of(folders);
  }
  instruments::write_report(runs, title, out, args.figures);
  print(cat({"Report:  ", out.string(), "\n"}));
  return 0;
}

}  // namespace lockstep::cli
