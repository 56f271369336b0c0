// Arms side by side: each arm under each seed is a run of its own, in NAME/ARM/seed_N.
#include "recipe/compare.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "base/folder.h"
#include "base/text.h"
#include "base/wait.h"
#include "cli/arms.h"
#include "cli/columns.h"
#include "cli/interrupt.h"
#include "cli/jobs.h"
#include "cli/log.h"
#include "cli/machine.h"
#include "cli/said.h"
#include "cli/session.h"
#include "cli/verbs.h"
#include "model/config_json.h"
#include "model/json.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

/// One arm under one seed.
struct Cell {
  std::string arm;
  recipe::Recipe recipe;
  fs::path folder;
  double full_code_bytes = 0;
  bool ended = false;

  std::string name() const { return arm + cat({", seed ", recipe.schedule.seed}); }
};

/// Refuses what could not run, and a folder in which a run of another recipe lies.
void check(Cell& cell) {
  const ModelConfig model = value_or_throw(read_config(checkpoint_folder(cell.recipe.model)));
  Arm arm = checked_arm(cell.recipe, model);
  cell.full_code_bytes = static_cast<double>(recipe::full_code_bytes(model));
  const fs::path file = cell.folder / "recipe.toml";
  if (!fs::exists(file)) return;
  const std::string before = value_or_throw(read_text(file));
  recipe::Recipe now = cell.recipe;
  recipe::take_settled(before, file.string(), now);
  arm = bind(now.arm, model, now.rollout, now.rl);
  const std::string different = recipe::in_one_line(
      recipe::hindrances(before, recipe::resolved(now, arm.contract.id()), file.string()));
  if (!different.empty()) {
    throw Usage(cat({cell.folder.string(), " began with another recipe (before / now: ", different,
                     "); go on with that one, or give this comparison another "
                     "--run; ",
                     recipe::kExtending}));
  }
  cell.ended = has_ended(cell.folder, cell.recipe.schedule.steps);
}

std::vector<ComparedRun> runs_of(std::vector<Cell>& cells) {
  std::vector<ComparedRun> runs;
  for (Cell& cell : cells) runs.push_back({&cell.recipe, cell.folder});
  return runs;
}

/// All runs, seed by seed, so that an interrupted comparison has whole rows of few seeds.
std::vector<Cell> cells_of(const recipe::Comparison& comparison, const fs::path& root) {
  std::vector<Cell> cells;
  const auto of_arm = [](const std::string& arm, const auto& act) {
    try {
      act();
    } catch (const Error& error) {
      const std::string what = error.what();
      throw Usage(what.find(arm) == std::string::npos ? cat({"arm ", arm, ": ", what}) : what);
    }
  };
  for (std::int32_t number = 0; number < comparison.seeds; ++number) {
    for (const std::string& arm : comparison.arms) {
      Cell cell{.arm = arm, .recipe = {}, .folder = {}};
      of_arm(arm, [&] { cell.recipe = comparison.recipe(arm, number); });
      cell.folder = root / arm / cat({"seed_", cell.recipe.schedule.seed});
      cells.push_back(std::move(cell));
    }
  }
  check_devices(runs_of(cells));
  for (Cell& cell : cells) of_arm(cell.arm, [&] { check(cell); });
  return cells;
}

std::string time_text(double seconds) {
  return seconds < 90 ? cat({std::ceil(seconds), " s"}) : cat({std::ceil(seconds / 60), " min"});
}

/// A run that could not go on: an arm whose loss is no number any more is a finding.
struct Stopped {
  const Cell* cell;
  std::string why;
  std::int64_t step;  // the one that it did not end

  std::string text() const { return instruments::to_string({step, why}); }
};

Stopped stop_of(const Cell& cell, const std::string& why) {
  instruments::RunData run;
  const auto text = read_text(cell.folder / "metrics.jsonl", std::size_t{4} << 30);
  if (text) instruments::read_metrics(*text, run);
  const double last = run.steps.empty() ? 0 : run.steps.back();
  return {&cell, why, static_cast<std::int64_t>(last) + 1};
}

/// One behind the other, in this process. Returns those that could not go on.
std::vector<Stopped> run_here(const std::vector<const Cell*>& cells) {
  std::vector<Stopped> stopped;
  const double began = seconds();
  std::int64_t done = 0;
  for (const Cell* cell : cells) {
    info("");
    const double each = (seconds() - began) / static_cast<double>(std::max<std::int64_t>(done, 1));
    const auto left = static_cast<double>(std::ssize(cells) - done);
    info(cat({cell->name(), ", run ", done + 1, " of ", cells.size(),
              done == 0 ? std::string() : ", about " + time_text(each * left) + " left"}));
    try {
      run_shown(cell->recipe, cell->folder, cell->name());
    } catch (const std::exception& error) {
      stopped.push_back(stop_of(*cell, said(error)));  // the others are still to be seen
      warn(cat({cell->name(), " ", stopped.back().text()}));
    }
    ++done;
  }
  return stopped;
}

/// Those that are still to be done.
std::vector<const Cell*> left_of(const std::vector<Cell>& cells) {
  std::vector<const Cell*> left;
  for (const Cell& cell : cells) {
    if (!cell.ended) left.push_back(&cell);
  }
  return left;
}

/// How the runs share a machine.
struct Shares {
  Shares(const std::vector<const Cell*>& cells, std::int32_t jobs)
      : at_once(static_cast<int>(std::min(std::ptrdiff_t{jobs}, std::ssize(cells)))) {
    if (cells.empty() || cells.front()->recipe.device != "cuda")
      return;  // one of a number stays it
    if (std::getenv("LOCAL_RANK") == nullptr) cards = gpus();
  }
  int on_a_card() const {
    const int lanes = std::max(1, static_cast<int>(cards.size()));
    return (at_once + lanes - 1) / lanes;
  }

  int at_once;
  std::vector<std::string> cards{};
};

/// Refuses more runs at once than there is memory for: each by itself would find room. `on_a_card`
/// are those that share a GPU.
void require_room_for(int runs, int on_a_card, const std::vector<const Cell*>& cells) {
  std::vector<recipe::Budget> budgets;
  for (const Cell* cell : cells) {
    const fs::path folder = checkpoint_folder(cell->recipe.model);
    const ModelConfig model = value_or_throw(read_config(folder));
    budgets.push_back(recipe::budget(cell->recipe, checked_arm(cell->recipe, model), model));
  }
  const Device device = device_named(cells.front()->recipe.device);
  if (device.kind == Device::Kind::kCpu) {
    const Memory there = memory();
    const DeviceMemory host = {.total = there.total, .free = there.available};
    return recipe::require_host_memory_of_all(runs, budgets, host);
  }
  recipe::require_memory_of_all(on_a_card, budgets, device_memory(device));
}

/// Settles where all run, once what is still to be done is known to have room there. What "auto"
/// stands for; "" where no run says that.
std::string find_device(std::vector<Cell>& cells, std::int32_t jobs) {
  const auto open = std::find_if(cells.begin(), cells.end(), [](const Cell& cell) {
    return cell.recipe.device == recipe::kAutoDevice;
  });
  settle_device(runs_of(cells));
  const std::string found = open == cells.end() ? "" : open->recipe.device;
  const std::vector<const Cell*> left = left_of(cells);
  for (const Cell* cell : left) require_device(cell->recipe);
  const Shares shares(left, jobs);
  if (shares.at_once > 1) require_room_for(shares.at_once, shares.on_a_card(), left);
  return found;
}

/// This command again, with the same runs, for one of the processes that it starts.
std::vector<std::string> same_runs(const CompareArgs& args, const recipe::Comparison& comparison,
                                   const fs::path& root) {
  std::vector<std::string> again = {"compare", args.recipe};
  again.insert(again.end(), args.assignments.begin(), args.assignments.end());
  std::string arms;
  for (const std::string& arm : comparison.arms) arms += (arms.empty() ? "" : ",") + arm;
  for (const std::string& arg :
       {std::string("--arms"), arms, std::string("--seeds"), cat({comparison.seeds}),
        std::string("--run"), root.string() + "/"}) {
    again.push_back(arg);
  }
  return again;
}

/// The same as find_device(), but in a process of its own where a GPU is looked at: who looks takes
/// a place there, and one in exclusive-process mode has no other.
void find_device_apart(std::vector<Cell>& cells, const CompareArgs& args,
                       const recipe::Comparison& comparison, const fs::path& root) {
  const bool may_touch = std::any_of(cells.begin(), cells.end(), [](const Cell& cell) {
    const std::string& name = cell.recipe.device;
    if (cell.ended || name == "cpu") return false;
    return why_unusable(device_named(name == recipe::kAutoDevice ? "cuda" : name)).empty();
  });
  if (!may_touch) {
    find_device(cells, args.jobs);
    return;
  }
  std::vector<std::string> look = same_runs(args, comparison, root);
  for (const std::string& arg : {std::string("--jobs"), cat({args.jobs}), std::string("--look")}) {
    look.push_back(arg);
  }
  const std::string found = answer_of(look);
  settle_device(runs_of(cells), found.substr(0, found.find('\n')));
}

/// Each by this command with --cell, the run's place among all.
std::vector<Stopped> run_apart(const std::vector<const Cell*>& cells, const Cell* first,
                               const CompareArgs& args, const recipe::Comparison& comparison,
                               const fs::path& root) {
  std::vector<Job> jobs;
  for (const Cell* cell : cells) {
    Job job{.name = cell->name(), .args = same_runs(args, comparison, root)};
    for (const std::string& arg :
         {"device=" + cell->recipe.device, std::string("--cell"), cat({cell - first})}) {
      job.args.push_back(arg);
    }
    jobs.push_back(std::move(job));
  }
  const Shares shares(cells, args.jobs);
  if (shares.at_once > 1) info(cat({"runs side by side: ", shares.at_once}));
  const std::vector<std::string> failed = run_jobs(jobs, shares.at_once, shares.cards);
  std::vector<Stopped> stopped;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (!failed[i].empty()) stopped.push_back(stop_of(*cells[i], failed[i]));
  }
  return stopped;
}

/// Refuses what the disk has no room for: each run by itself would find it, and the last ones none.
void require_room_on_disk(const std::vector<const Cell*>& cells, const fs::path& root) {
  std::int64_t bytes = 0, runs = 0;
  for (const Cell* cell : cells) {
    if (fs::exists(cell->folder / "recipe.toml")) continue;  // has some of them, and asks itself
    const ModelConfig model = value_or_throw(read_config(checkpoint_folder(cell->recipe.model)));
    bytes += recipe::budget(cell->recipe, checked_arm(cell->recipe, model), model).checkpoints;
    ++runs;
  }
  const std::string what =
      cat({"the checkpoints of ", runs, runs == 1 ? " run take" : " runs take"});
  require_room(root, bytes, what.c_str(),
               "lower schedule.keep, or give this comparison another --run");
}

/// One process at a time: two would take the runs from each other. Held until the program ends.
void lock(const fs::path& root) {
  make_folder(root, "the run directory", "give this comparison another --run");
  const fs::path file = root / ".lock";  // which no label is
  const int descriptor = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) {
    throw Usage(cat({"the run directory ", root.string(),
                     " cannot be written: ", std::generic_category().message(errno),
                     "; give this comparison another --run"}));
  }
  if (wait_for_lock(descriptor, file.string())) return;
  throw Error(cat({"another process is at work in ", root.string(),
                   "; wait for it, or give this comparison another --run"}));
}

/// Leaves in each run's folder that it stopped, for the page and whoever looks there.
void leave_stops(const std::vector<Stopped>& stopped) {
  for (const Stopped& run : stopped) {
    try {
      instruments::write_stop(run.cell->folder, run.why);
    } catch (const Error& error) {
      warn(cat({"why ", run.cell->name(), " stopped is not kept: ", error.what()}));
    }
  }
}

/// What a run's arm is told of it: it stopped where, and why.
std::string stop_of(const Cell& cell, const std::vector<Stopped>& stopped) {
  for (const Stopped& run : stopped) {
    if (run.cell == &cell) return cat({"seed ", cell.recipe.schedule.seed, " ", run.text()});
  }
  return "";
}

/// A run that has ended and cannot be read is told of in `lines`. An arm none of whose runs did a
/// step has its row nevertheless.
std::vector<ArmFigures> read_all(const recipe::Comparison& comparison,
                                 const std::vector<Cell>& cells,
                                 const std::vector<Stopped>& stopped,
                                 std::vector<std::string>& lines) {
  std::vector<ArmFigures> arms;
  for (const std::string& arm : comparison.arms) {
    std::vector<instruments::RunData> runs;
    std::vector<std::string> stops;
    double full = 0;
    for (const Cell& cell : cells) {
      if (cell.arm != arm) continue;
      full = cell.full_code_bytes;
      const std::string stop = stop_of(cell, stopped);
      if (!stop.empty()) stops.push_back(stop);
      if (!fs::exists(cell.folder / "metrics.jsonl")) continue;
      try {
        runs.push_back(read_shown(cell.folder));
      } catch (const Error& error) {
        if (cell.ended) lines.push_back(cat({arm, " is left out: ", error.what()}));
        continue;  // or it stopped in its first step, and said so
      }
      if (!stop.empty()) runs.back().verdict = "bad: " + stop;
    }
    if (runs.empty() && stops.empty()) continue;
    arms.push_back(figures_of(arm, runs, full));
    arms.back().stops = stops;
    if (runs.empty()) arms.back().verdict = "bad: " + stops.front();
  }
  return arms;
}

/// Where the gaps stand, smallest first, and each arm's reason for concern.
std::string by_gap(std::vector<ArmFigures> arms) {
  std::string out;
  for (const ArmFigures& arm : arms) {
    for (const std::string& stop : arm.stops) out += arm.arm + ": " + stop + "\n";
    if (arm.stops.empty() && arm.verdict.size() > 2) out += arm.arm + ": " + arm.verdict + "\n";
  }
  // A run of few steps may have none.
  std::erase_if(arms, [](const ArmFigures& arm) { return std::isnan(arm.gap_last.mean); });
  if (arms.empty()) return out + "No gap was measured: no sampled token was trained on.\n";
  std::stable_sort(arms.begin(), arms.end(), [](const ArmFigures& a, const ArmFigures& b) {
    return a.gap_last.mean < b.gap_last.mean;
  });
  out += "By gap:";
  for (const ArmFigures& arm : arms) {
    out += (&arm == &arms.front() ? " " : " < ") + arm.arm;
  }
  return out + "\n";
}

/// Table, summary and page, and what stopped at last. Returns the exit status; `call` are this
/// call's seconds.
int show(const recipe::Comparison& comparison, const std::vector<Cell>& cells,
         const std::vector<Stopped>& stopped, const fs::path& root, double call) {
  leave_stops(stopped);
  std::vector<std::string> lines;
  for (const Stopped& run : stopped) lines.push_back(cat({run.cell->name(), " ", run.text()}));
  const std::vector<ArmFigures> arms = read_all(comparison, cells, stopped, lines);
  if (std::all_of(arms.begin(), arms.end(), [](const ArmFigures& a) { return a.seeds.empty(); })) {
    throw Error("no run has done a step: " + (lines.empty() ? "none began" : lines.front()));
  }
  const recipe::Recipe& first = cells.front().recipe;
  const double took = run_seconds(arms, call);
  write_summary(root, arms, first.rollout.drift, took, true);
  print(cat({"\nLast five steps, mean ± deviation over ", comparison.seeds,
             comparison.seeds == 1 ? " seed" : " seeds", ":\n\n"}) +
        comparison_table(arms) + "\n" + by_gap(arms));
  print(cat({"Drift: ", drift_text(first.rollout.drift), ".\nAll runs together took ",
             std::round(took), " s.\nFigures: ", (root / "summary.json").string(), "\n"}));
  report({.runs = {root.string()}, .out = "", .figures = ""});
  for (const std::string& line : lines) error(line);
  return lines.empty() ? 0 : 1;
}

}  // namespace

int compare(const CompareArgs& args) {
  const double began = seconds();
  const recipe::Comparison comparison = of_the_caller([&] {
    const fs::path file = recipe::find(args.recipe, "the recipe");
    require_not_sft(file, args.recipe);
    return recipe::read_comparison(file, args.assignments, args.arms, args.seeds);
  });
  const fs::path root = run_folder(args.run.empty() ? stem(args.recipe) : args.run);
  std::vector<Cell> cells = cells_of(comparison, root);
  if (args.cell >= 0) {
    if (args.cell >= std::ssize(cells))
      throw Usage(cat({"--cell ", args.cell, ": the runs are 0 to ", cells.size() - 1}));
    const Cell& cell = cells[static_cast<std::size_t>(args.cell)];
    run_shown(cell.recipe, cell.folder, cell.name());
    return 0;
  }
  if (args.look) {
    print(find_device(cells, args.jobs) + "\n");
    return 0;
  }
  on_interrupt_say("the same command goes on from here");
  const bool is_new = !fs::exists(root);
  lock(
      root);  // before a GPU is looked at: of two that begin together one alone takes a place there
  try {
    find_device_apart(cells, args, comparison, root);
    require_room_on_disk(left_of(cells), root);
  } catch (...) {
    std::error_code ignored;
    if (is_new && fs::remove(root / ".lock", ignored)) fs::remove(root, ignored);
    throw;
  }
  const recipe::Recipe& first = cells.front().recipe;
  info(cat({comparison.arms.size(), " arms x ", comparison.seeds, " seeds of ",
            first.schedule.steps, " steps of ", first.schedule.prompts_per_step, " prompts x ",
            first.schedule.samples_per_prompt, " samples on ", first.model, ", in ",
            root.string()}));
  const std::vector<const Cell*> left = left_of(cells);
  if (left.size() < cells.size()) {
    info(cat({cells.size() - left.size(), " of ", cells.size(),
              " runs have ended before and are not repeated"}));
  }
  // A run that breaks a GPU breaks it for its process alone.
  const bool apart = !left.empty() && (args.jobs > 1 || left.front()->recipe.device != "cpu");
  const std::vector<Stopped> stopped =
      apart ? run_apart(left, cells.data(), args, comparison, root) : run_here(left);

  return show(comparison, cells, stopped, root, seconds() - began);
}

}  // namespace lockstep::cli
