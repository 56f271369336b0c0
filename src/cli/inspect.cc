// What a path is follows from what lies there; the command line need not say.
#include "cli/inspect.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/text.h"
#include "cli/columns.h"
#include "recipe/recipe.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

bool has_segments(const fs::path& folder) {
  return std::any_of(fs::directory_iterator(folder), fs::directory_iterator(),
                     [](const auto& entry) { return entry.path().extension() == ".segment"; });
}

bool begins_as_segment(const fs::path& file) {
  if (!fs::is_regular_file(file)) return false;  // a pipe would be waited for
  std::array<char, 4> magic{};
  std::ifstream in(file, std::ios::binary);
  return in.read(magic.data(), magic.size()) && std::string_view(magic.data(), 4) == "\x89LSS";
}

/// What the run wrote so far, "" where it is not there.
std::string text_of(const fs::path& file) {
  constexpr std::size_t kMost = std::size_t{4} << 30;
  return fs::exists(file) ? value_or_throw(read_text(file, kMost)) : "";
}

/// The steps of step_N below checkpoints/, ascending.
std::vector<std::int64_t> checkpoint_steps(const fs::path& run) {
  std::vector<std::int64_t> steps;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", none)) {
    const std::string name = entry.path().filename().string();
    std::int64_t step = 0;
    const char* end = name.data() + name.size();
    if (!name.starts_with("step_")) continue;
    if (std::from_chars(name.data() + 5, end, step).ptr == end) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

/// A line of metrics.jsonl, a metric a line.
std::string metric_table(const std::string& line) {
  std::vector<std::vector<std::string>> rows;
  for (std::size_t at = line.find('"'); at != std::string::npos;) {
    const std::size_t end = line.find("\": ", at + 1);
    if (end == std::string::npos) break;
    const std::size_t next = line.find(", \"", end);
    const std::size_t value = end + 3;
    const std::size_t stop = next != std::string::npos ? next : line.rfind('}');
    rows.push_back({line.substr(at + 1, end - at - 1), line.substr(value, stop - value)});
    at = next == std::string::npos ? next : next + 2;
  }
  return columns(rows);
}

void inspect_run(const fs::path& folder, const InspectArgs& args) {
  std::size_t lines = 0;
  std::string last, line;
  for (std::istringstream metrics(text_of(folder / "metrics.jsonl"));
       std::getline(metrics, line);) {
    ++lines;
    last = line;
  }
  std::string text = cat({folder.string(), ": a run of ", counted(lines, "step")});
  const std::string recipe = text_of(folder / "recipe.toml");
  if (recipe.starts_with("# ")) text += ", " + recipe.substr(2, recipe.find('\n') - 2);
  text += "\ncheckpoints:";
  const std::vector<std::int64_t> steps = checkpoint_steps(folder);
  for (const std::int64_t step : steps) text += cat({" step_", step});
  text += steps.empty() ? " none\n" : "\n";
  print(text);
  if (!last.empty() && args.span.empty()) print("last metrics:\n" + metric_table(last));
  // At last, for it throws where records are damaged.
  if (fs::is_directory(folder / "trace")) inspect_trace(folder / "trace", args);
}

/// Is it the directory of a run?
bool is_run(const fs::path& folder) {
  return fs::exists(folder / "recipe.toml") || fs::exists(folder / "metrics.jsonl");
}

std::vector<fs::path> folders_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    if (entry.is_directory(none)) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::string runs_inside(const fs::path& folder) {
  constexpr std::size_t kMost = 6;
  std::vector<fs::path> runs;
  for (const fs::path& child : folders_in(folder)) {
    if (is_run(child)) {
      runs.push_back(child);
      continue;
    }
    for (const fs::path& below : folders_in(child)) {
      if (is_run(below)) runs.push_back(below);
    }
  }
  std::string text;
  for (std::size_t i = 0; i < std::min(runs.size(), kMost); ++i) {
    text += (i > 0 ? ", " : "") + runs[i].string();
  }
  return text + (runs.size() > kMost ? ", ..." : "");
}

int inspect(const InspectArgs& args) {
  if (!args.why.empty()) {
    inspect_why(args);
    return 0;
  }
  const fs::path path = recipe::find(args.path, "the path");
  if (!fs::is_directory(path) && !fs::is_regular_file(path)) {
    throw Usage(
        cat({path.string(), " is neither a folder nor a regular file; inspect reads those"}));
  }
  if (args.span.empty() && (!args.place.empty() || args.position >= 0)) {
    throw Usage("--place and --position choose rows of a span; name it with --span");
  }
  const bool of_weights = path.extension() == ".safetensors" || fs::exists(path / "config.json");
  if (of_weights && !args.span.empty()) {
    throw Usage(cat({"--span is '", args.span, "', and ", path.string(),
                     " holds weights; spans are of a run or of its trace"}));
  }
  if (!fs::is_directory(path)) {
    if (begins_as_segment(path) || path.extension() == ".segment") {
      inspect_trace(path, args);
    } else if (path.extension() == ".safetensors") {
      inspect_safetensors(path);
    } else {
      throw Usage(cat({path.string(),
                       " is neither a segment nor a .safetensors file; inspect reads those, "
                       "checkpoints, run directories and folders of segments"}));
    }
  } else if (fs::exists(path / "config.json")) {
    inspect_checkpoint(path, args);
  } else if (fs::exists(path / "metrics.jsonl") || fs::exists(path / "recipe.toml")) {
    inspect_run(path, args);
  } else if (has_segments(path)) {
    inspect_trace(path, args);
  } else {
    const std::string inside = runs_inside(path);
    throw Usage(cat({path.string(),
                     " has neither config.json (a checkpoint), metrics.jsonl (a run) nor segments; "
                     "name one that has",
                     inside.empty() ? "" : ": ", inside}));
  }
  return 0;
}

}  // namespace lockstep::cli
