/// Runs as the instruments read them: what lies in run directories, whatever state they are in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::instruments {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Where a run stopped that could not go on.
struct Stop {
  std::int64_t step = 0;  // the one that it did not end
  std::string why;
};
/// "stopped at step 4: why".
std::string to_string(const Stop& stop);

/// Leaves it in the run's folder (recipe::kStopFile), where there is a run.
void write_stop(const std::filesystem::path& folder, const std::string& why);

/// One run directory. Columns of `metrics` are as long as `steps`; what a step did not measure, or
/// what is not finite, is NaN.
struct RunData {
  std::string name;    // of its folder
  std::string arm;     // the recipe's; of ARM/seed_N the folder's above; else its own
  std::string recipe;  // its resolved text; "" where there is none
  std::map<std::string, std::string> keys;  // of the recipe, values as text
  std::string contract_id;                  // of the recipe's first line
  std::vector<double> steps;                // ascending, none twice
  std::map<std::string, std::vector<double>> metrics;
  std::int64_t unreadable_lines = 0;  // of metrics.jsonl
  std::optional<Stop> stop;           // where it could not go on

  // What the caller knows beyond the folder; each may be left out.
  std::string contract;           // its lines
  std::string verdict;            // "ok", "watch: why", "bad: why"
  double full_code_bytes = kNaN;  // of a token, see preflight.h

  /// The column of that name; empty where no step has it.
  const std::vector<double>& column(const std::string& metric) const;
};

/// The run in a folder, or the runs below it, by name, two levels deep: an arm each, or an arm's
/// seeds. Lines of metrics that cannot be read are left out and counted: a killed run's last line
/// is half a line. Runs yet to do a step are left out. Throws Error where none is left.
std::vector<RunData> read_runs(const std::filesystem::path& folder);

/// Those of several folders, in their order.
std::vector<RunData> read_runs(const std::vector<std::filesystem::path>& folders);

/// Reads the text of metrics.jsonl into `run`; false where not one line could be read.
bool read_metrics(const std::string& text, RunData& run);

}  // namespace lockstep::instruments
