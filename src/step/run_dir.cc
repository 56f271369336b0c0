#include "step/run_dir.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/folder.h"
#include "base/text.h"
#include "base/wait.h"
#include "recipe/compare.h"
#include "recipe/recipe.h"
#include "step/events.h"

namespace lockstep::step {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what, const fs::path& path) {
  throw Error(cat({what, " ", path.string(), ": ", std::strerror(errno)}));
}

int open_or_fail(const fs::path& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) fail("cannot open", path);
  return fd;
}

void sync_one(const fs::path& path) {
  const int fd = open_or_fail(path, O_RDONLY);
  const int failed = ::fsync(fd);
  ::close(fd);
  if (failed != 0) fail("cannot bring to the disk", path);
}

std::string read_all(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    throw Error(cat({path.string(), " is a folder; put the run's file back in its place"}));
  }
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_all(int fd, std::string_view text, const fs::path& path) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot write", path);
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

/// N of "step_N", written as save() writes it; else -1.
std::int64_t step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step_";
  if (!name.starts_with(kPrefix)) return -1;
  std::int64_t step = -1;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  return name == cat({kPrefix, step}) ? step : -1;
}

/// The steps that have checkpoints, ascending.
std::vector<std::int64_t> saved_steps(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::int64_t step = step_of(entry.path().filename().string());
    if (step > 0 && entry.is_directory()) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

/// The length of the first `step` lines, of which line n must be step n's, and whole.
std::size_t length_of(const std::string& lines, std::int64_t step, const fs::path& path) {
  std::size_t at = 0;
  for (std::int64_t n = 1; n <= step; ++n) {
    if (at == lines.size()) {
      throw Error(cat({path.string(), " has the metrics of ", n - 1,
                       " steps, and the newest checkpoint is of step ", step,
                       "; put that file back, delete checkpoints/step_", step,
                       ", or give the run another name"}));
    }
    const std::size_t end = lines.find('\n', at);
    const auto line = end == std::string::npos ? std::string_view()
                                               : std::string_view(lines).substr(at, end - at);
    const auto read = nlohmann::json::parse(line, nullptr, false);
    if (!read.is_object() || !read.contains("step") || read["step"] != n) {
      throw Error(cat({path.string(), ":", n, " is not the metrics of step ", n,
                       ", and the newest checkpoint is of step ", step,
                       "; mend that line, delete checkpoints/step_", step,
                       ", or give the run another name"}));
    }
    at = end + 1;
  }
  return at;
}

std::string_view first_line(std::string_view text) { return text.substr(0, text.find('\n')); }

/// Names in a folder, sorted.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename().string());
  }
  if (error) throw Error(cat({"cannot read ", folder.string(), ": ", error.message()}));
  std::sort(names.begin(), names.end());
  return names;
}

/// Is it a store's folder in which nothing has been recorded yet?
bool is_unused(const fs::path& trace) {
  if (!fs::is_directory(trace)) return false;
  const std::vector<std::string> names = names_in(trace);
  return names.empty() || names == std::vector<std::string>{"LOCK"};
}

/// Refuses what a run must not be written into: a link that leads nowhere, a file, somebody else's
/// folder, and a run whose recipe is gone. Throws Usage.
void require_ours(const fs::path& folder) {
  constexpr std::string_view kRemedy = "; give this run another name";
  if (folder.empty()) throw Usage("the run directory has no name; give it one with --run");
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (!fs::exists(status)) {
    if (!fs::is_symlink(fs::symlink_status(folder, error))) return;
    throw Usage(cat({"the run directory ", folder.string(), " is a link to ",
                     fs::read_symlink(folder, error).string(), ", which is not there; make that",
                     " folder, or", kRemedy.substr(1)}));
  }
  if (!fs::is_directory(status)) {
    throw Usage(cat({"the run directory ", folder.string(), " is no folder", kRemedy}));
  }
  if (fs::exists(folder / "recipe.toml")) return;
  // Without a recipe it is new, or a run that was killed before it began.
  const std::vector<std::string> names = names_in(folder);
  for (const std::string& name : names) {
    const bool saved = name == "checkpoints" && fs::is_directory(folder / name) &&
                       !names_in(folder / name).empty();
    if (!saved && name != "metrics.jsonl") continue;
    throw Usage(cat({folder.string(), " has ", name,
                     " and no recipe.toml, which says how to go on; put that file back, or",
                     kRemedy.substr(1)}));
  }
  for (const std::string& name : names) {
    if (name == "checkpoints" || name == "lock" || name == "recipe.toml.part") continue;
    if (name == "trace" && is_unused(folder / name)) continue;
    throw Usage(cat({folder.string(), " is not empty and is no run (it holds ", name, ")", kRemedy,
                     ", or name an empty folder"}));
  }
}

}  // namespace

RunDir::RunDir(fs::path folder, Comm& comm) : folder_(std::move(folder)), comm_(comm) {
  if (comm_.rank() != 0) return;
  require_ours(folder_);
  std::error_code error;
  fresh_ = !fs::exists(folder_, error);
  make_folder(folder_ / "checkpoints", "the run's folder", "give this run another name");
  lock_ = open_or_fail(folder_ / "lock", O_RDWR | O_CREAT);
  if (!wait_for_lock(lock_, (folder_ / "lock").string())) {
    ::close(lock_);
    throw Error(cat({"another process is at work in ", folder_.string(),
                     "; wait for it, or give this run another name"}));
  }
}

RunDir::~RunDir() {
  if (metrics_ >= 0) ::close(metrics_);
  std::error_code ignored;
  if (fresh_) fs::remove_all(folder_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

std::string RunDir::recipe() const {
  const fs::path path = folder_ / "recipe.toml";
  if (!fs::exists(path)) return "";
  const std::string text = read_all(path);
  if (text.empty()) {
    throw Error(cat({path.string(),
                     " is empty; put the run's recipe back, or give this run another", " name"}));
  }
  return text;
}

void RunDir::require_same(const std::string& resolved) const {
  const std::string before = recipe();
  if (before.empty() || before == resolved) return;
  std::string different =
      recipe::in_one_line(recipe::hindrances(before, resolved, (folder_ / "recipe.toml").string()));
  if (different.empty()) {
    if (first_line(before) == first_line(resolved)) return;
    different = "the contract's id";
  }
  throw Usage(cat({folder_.string(), " began with another recipe (before / now: ", different,
                   "); go on with that one, or give this run another name; ", recipe::kExtending}));
}

void RunDir::begin(const std::string& resolved) {
  if (comm_.rank() != 0) return;
  require_same(resolved);
  if (recipe() == resolved) return;
  const fs::path part = folder_ / "recipe.toml.part";
  const int fd = open_or_fail(part, O_WRONLY | O_CREAT | O_TRUNC);
  write_all(fd, resolved, part);
  ::close(fd);
  sync_one(part);
  fs::rename(part, folder_ / "recipe.toml");
  sync_one(folder_);
  fresh_ = false;
}

std::int64_t RunDir::resume() {
  fresh_ = false;
  const fs::path checkpoints = folder_ / "checkpoints";
  if (comm_.rank() == 0) {
    std::error_code none;  // there rarely is one
    fs::remove(folder_ / recipe::kStopFile, none);
    std::vector<fs::path> parts;
    for (const auto& entry : fs::directory_iterator(checkpoints)) {
      if (entry.path().extension() == ".part") parts.push_back(entry.path());
    }
    for (const fs::path& part : parts) fs::remove_all(part);
  }
  const std::int64_t newest = this->newest();
  if (comm_.rank() != 0) return newest;

  const fs::path path = folder_ / "metrics.jsonl";
  const std::size_t length = length_of(read_all(path), newest, path);
  if (metrics_ >= 0) ::close(metrics_);
  metrics_ = open_or_fail(path, O_WRONLY | O_CREAT | O_APPEND);
  if (::ftruncate(metrics_, static_cast<off_t>(length)) != 0) fail("cannot cut", path);
  events_ = std::make_unique<EventFile>(folder_, newest + 1);
  return newest;
}

fs::path RunDir::checkpoint(std::int64_t step) const {
  return folder_ / "checkpoints" / cat({"step_", step});
}

std::vector<std::int64_t> RunDir::checkpoints() const {
  return saved_steps(folder_ / "checkpoints");
}

std::int64_t RunDir::newest() const {
  const std::vector<std::int64_t> steps = checkpoints();
  return steps.empty() ? 0 : steps.back();
}

void RunDir::save(std::int64_t step, std::int64_t keep,
                  const std::function<void(const fs::path&)>& write) {
  // The lines that a checkpoint stands on are on the disk before it is.
  if (metrics_ >= 0 && ::fsync(metrics_) != 0) {
    fail("cannot bring to the disk", folder_ / "metrics.jsonl");
  }
  write_whole(checkpoint(step), write);
  if (comm_.rank() != 0 || keep <= 0) return;
  std::vector<std::int64_t> steps = checkpoints();
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < steps.size(); ++i) {
    const fs::path doomed = checkpoint(steps[i]).string() + ".part";  // never half a checkpoint
    fs::rename(checkpoint(steps[i]), doomed);
    fs::remove_all(doomed);
  }
}

void RunDir::append(std::int64_t step, const Metrics& metrics) {
  if (comm_.rank() != 0) return;
  if (metrics_ < 0) throw Error("append before resume: the run directory is not open");
  write_all(metrics_, metrics_line(step, metrics), folder_ / "metrics.jsonl");
  events_->append(step, metrics);
}

std::string metrics_line(std::int64_t step, const Metrics& metrics) {
  std::string line = cat({"{\"step\": ", step});
  for (const auto& [name, value] : metrics) {
    line += ", \"" + name + "\": " + (std::isfinite(value) ? cat({value}) : "null");
  }
  return line + "}\n";
}

void sync_to_disk(const fs::path& path) {
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) sync_to_disk(entry.path());
  }
  sync_one(path);
}

void write_whole(const fs::path& folder, const std::function<void(const fs::path&)>& write) {
  const fs::path part = folder.string() + ".part";
  fs::remove_all(part);
  fs::create_directories(part);
  try {
    write(part);
    sync_to_disk(part);
    fs::remove_all(folder);
    fs::rename(part, folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(part, ignored);
    throw;
  }
  sync_one(fs::absolute(folder).parent_path());
}

}  // namespace lockstep::step
