// Each line says what there is; what is missing is said last, and is the exit status.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <thread>

#include "base/build.h"
#include "base/parallel.h"
#include "base/text.h"
#include "base/wait.h"
#include "cli/columns.h"
#include "cli/log.h"
#include "cli/machine.h"
#include "cli/subject.h"
#include "cli/verbs.h"
#include "device/memory.h"
#include "recipe/compare.h"
#include "store/store.h"
#include "sync/refit.h"
#include "train/trainer.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using recipe::bytes_text;

const char* const kDemo = "recipes/demo.toml";
constexpr std::int32_t kDemoArms = 3;

class Doctor {
 public:
  void say(const std::string& what, const std::string& text) {
    print(what + std::string(std::max<std::size_t>(11, what.size() + 1) - what.size(), ' ') + text +
          "\n");
  }
  void miss(const std::string& text) { missing_.push_back(text); }
  /// Of what the caller wrote.
  void miss_in(const std::string& file, const Error& error) {
    miss(cat({file, ": ", error.what()}));
    if (dynamic_cast<const Usage*>(&error) != nullptr) is_usage_ = true;
  }
  const std::vector<std::string>& missing() const { return missing_; }
  int status() const { return missing_.empty() ? 0 : is_usage_ ? 2 : 1; }

 private:
  std::vector<std::string> missing_;
  bool is_usage_ = false;
};

void look_at_cpu(Doctor& doctor) {
  std::string features;
  for (const CpuFeature& feature : cpu_features()) {
    features +=
        (features.empty() ? "" : ", ") + std::string(feature.there ? "" : "no ") + feature.name;
  }
  doctor.say("cpu",
             cat({cpu_name(), "; ", std::thread::hardware_concurrency(), " cores, ", threads(),
                  std::getenv("LOCKSTEP_THREADS") ? " threads by LOCKSTEP_THREADS; " : " threads; ",
                  features.empty() ? std::string("portable kernels") : features}));
  if (!keeps_subnormals()) {
    doctor.miss("numbers below 2^-126 are flushed to zero; start the program without FTZ and DAZ");
  }
}

void look_at_torch(Doctor& doctor) {
  const std::string found = torch();
  doctor.say("torch", found.empty() ? "none" : found);
  if (found.empty())
    doctor.miss("libtorch_cpu.so is not loaded; run ./lockstep, which builds anew");
}

void look_at_device(Doctor& doctor) {
  const std::string driver = nvidia_driver();
  const std::string there = driver.empty() ? "no NVIDIA device" : "an NVIDIA device, " + driver;
  const Device first = device_named("cuda:0");
  try {
    train::require_runs(first);  // as auto asks
  } catch (const Error& error) {
    return doctor.say(
        "device", cat({there, "; cpu alone can be used: ", recipe::why_not_cuda(error.what())}));
  }
  const DeviceMemory memory = device_memory(first);
  doctor.say("device", cat({there, "; cuda can be used, and is what auto takes, ",
                            bytes_text(memory.free), " of ", bytes_text(memory.total), " free"}));
}

void list_contracts(Doctor& doctor) {
  std::string text;
  for (const std::string& name : contracts::names()) {
    text += (text.empty() ? "" : ", ") + name;
  }
  doctor.say("contracts", text);
}

bool is_comparison(const std::string& file) {
  return !recipe::split(recipe::read_entries(recipe::find(file, "the recipe"))).compare.empty();
}

/// The recipe, or where it is a comparison's each of its arms.
std::vector<recipe::Recipe> recipes_in(const std::string& file,
                                       const std::vector<std::string>& assignments) {
  if (!is_comparison(file)) return {load_recipe(file, assignments)};
  return of_the_caller([&] {
    const fs::path path = recipe::find(file, "the recipe");
    const recipe::Comparison comparison = recipe::read_comparison(path, assignments, {}, 0);
    std::vector<recipe::Recipe> recipes;
    for (const std::string& label : comparison.arms) {
      recipes.push_back(comparison.recipe(label, 0));
    }
    return recipes;
  });
}

/// Whether a recipe can run here: "" or why it cannot. `row` gets what it takes.
std::string fits(recipe::Recipe recipe, std::vector<std::string>& row) {
  const Policy policy = open_policy(recipe.model);
  const Arm arm = checked_arm(recipe, policy.config);
  make_task(recipe.task, policy, recipe.schedule.sampling.max_new_tokens);
  recipe.device = settled_device(recipe, arm, policy.config).name;
  const recipe::Budget b = recipe::budget(recipe, arm, policy.config);
  const Device device = recipe::ready_device(recipe.device, b);
  require_memory(b, device);
  const std::int64_t at_once = device.kind == Device::Kind::kCpu ? b.host() : b.device();
  const std::int64_t later = b.swap + b.records;
  const std::int64_t disk = b.checkpoints + b.records_disk;
  row.insert(row.end(), {arm.name, recipe.arm.contract, policy.folder.string(), bytes_text(at_once),
                         bytes_text(later), cat({b.record_per_token, " B"}), bytes_text(disk)});
  std::error_code none;
  const auto space = fs::space(run_folder("x").parent_path().parent_path(), none);
  const auto free = static_cast<std::int64_t>(space.available);
  if (none || free <= 0 || b.checkpoints <= free) return "";
  return cat({"needs ", bytes_text(b.checkpoints), " of disk, ", bytes_text(free), " are free"});
}

/// What steps took here.
struct StepTimes {
  double least = INFINITY, most = 0;
  int steps = 0;
  std::int32_t prompts = 0;  // of each: a part of a step where whole ones take long
};

/// Those answers that an update takes: of groups whose rewards differ, or with a KL term all.
std::vector<Trajectory> that_move(std::vector<Trajectory> answers,
                                  const std::vector<data::Prompt>& prompts,
                                  const Subject& subject) {
  if (subject.arm.rl.kl_weight > 0) return answers;
  const std::size_t samples = answers.size() / prompts.size();
  std::vector<Trajectory> moving;
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    const auto group = std::span(answers).subspan(p * samples, samples);
    std::set<float> rewards;
    for (const Trajectory& t : group) {
      const auto response = std::span(t.tokens).subspan(prompts[p].tokens.size());
      rewards.insert(subject.task->reward(prompts[p], response));
    }
    if (rewards.size() > 1) std::move(group.begin(), group.end(), std::back_inserter(moving));
  }
  return moving;
}

/// Steps as a run has them: answers, the trainer's log-probs and updates, the
/// sync. The first is not counted: caches are cold, and memory is taken.
StepTimes time_steps(const recipe::Recipe& recipe, const Subject& subject) {
  constexpr int kSteps = 5;
  constexpr double kPatience = 20;  // seconds
  const auto& schedule = recipe.schedule;
  const std::int32_t whole = schedule.prompts_per_step;
  const std::unique_ptr<Comm> comm = Comm::single();
  store::Options options = recipe.store;
  options.folder.clear();
  store::Store store(options);
  rollout::Engine engine(subject.agreement, subject.arm.rollout, subject.device, &store, *comm);
  load(subject, engine);
  train::Trainer trainer(subject.agreement, subject.arm.qat, recipe.trainer, subject.device, *comm);
  load(*subject.policy.weights, trainer.initial_weights());

  const auto step = [&](std::int64_t number, std::int32_t prompts) {
    const double began = seconds();
    const std::vector<data::Prompt> asked = subject.task->prompts(number, prompts);
    const std::vector<Trajectory> answers = that_move(
        answer(engine, asked, schedule.samples_per_prompt, schedule.sampling, schedule.seed), asked,
        subject);
    engine.rest(trainer.may_take());
    if (!answers.empty()) {  // schedule.updates share them out
      if (!subject.arm.rl.bypass) trainer.logprobs(answers, &store);
      trainer.accumulate(answers, &store,
                         [](std::size_t, std::span<const float>, std::span<float>) { return 0.0; });
    }
    trainer.rest(engine.owed());
    std::vector<SpanId> spans;
    for (const Span& span : store.spans()) spans.push_back(span.id);
    store.release(spans);
    sync::refit(trainer.weights(), engine.weights(), subject.agreement.contract,
                WeightVersion{number + 1});
    return seconds() - began;
  };
  const std::int32_t part = std::max(1, whole / 4);
  const double first = step(0, part) * whole / part;
  StepTimes times = {.prompts = first * kSteps <= kPatience ? whole : part};
  for (double spent = 0; times.steps < kSteps && (times.steps == 0 || spent < kPatience);
       ++times.steps) {
    const double took = step(times.steps + 1, times.prompts);
    spent += took;
    const double of_whole = took * whole / times.prompts;
    times.least = std::min(times.least, of_whole);
    times.most = std::max(times.most, of_whole);
  }
  return times;
}

/// "12 to 15 s"; one number where both round to it.
std::string range(double least, double most, int digits) {
  const std::string a = fixed(least, digits), b = fixed(most, digits);
  return (a == b ? a : a + " to " + b) + " s";
}

void look_at_time(Doctor& doctor, const std::string& file, const recipe::Recipe& recipe,
                  bool is_demo) {
  const Subject subject = open_subject(file, {}, "", true);
  const StepTimes t = time_steps(recipe, subject);
  const auto steps = static_cast<double>(recipe.schedule.steps);
  const auto run = [&](double times) {
    return range(t.least * steps * times, t.most * steps * times, 0);
  };
  const std::int32_t whole = recipe.schedule.prompts_per_step;
  doctor.say(
      "time",
      cat({"a step of ", file, " takes ", range(t.least, t.most, 2), " here (",
           t.prompts == whole ? std::string() : cat({t.prompts, " of ", whole, " prompts of "}),
           counted(static_cast<std::size_t>(t.steps), "step"),
           " measured after a warm one; other work here slows them); its ", recipe.schedule.steps,
           " steps ", run(1), ", without evaluations and checkpoints",
           is_demo ? cat({"; the demo's ", kDemoArms, " arms ", run(kDemoArms),
                          ", and trace_mod4 where the time allows"})
                   : std::string()}));
}

/// The recipes that are looked at: the one that was named, else all of the checkout.
std::vector<std::string> recipe_files(const DoctorArgs& args) {
  if (!args.recipe.empty()) return {args.recipe};
  const char* home = std::getenv("LOCKSTEP_HOME");
  std::vector<std::string> files;
  std::error_code none;
  const fs::path checkout = home ? home : ".";
  for (const auto& entry : fs::recursive_directory_iterator(checkout / "recipes", none)) {
    if (entry.path().extension() == ".toml") {
      files.push_back(entry.path().lexically_relative(checkout).generic_string());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool is_sft(const std::string& file) {
  try {
    return recipe::is_sft(recipe::find(file, "the recipe"));
  } catch (const Error&) {
    return false;
  }
}

/// Whether the recipe decides the exit status.
bool counts(const std::string& file, const DoctorArgs& args) {
  return !args.recipe.empty() || file == kDemo;
}

/// Says why a recipe does not fit; of those that do, a row of the table.
void look_at_recipe(Doctor& doctor, const std::string& file, const DoctorArgs& args,
                    std::vector<std::vector<std::string>>& rows) {
  std::vector<std::string> row;
  std::string why;
  if (is_sft(file)) {
    try {
      const recipe::SftRecipe r = of_the_caller([&] {
        return recipe::read_sft_recipe(recipe::find(file, "the recipe"), args.assignments);
      });
      if (r.device != recipe::kAutoDevice) recipe::ready_device(r.device, {});
      return doctor.say(file, "for sft; costs what its batch costs");
    } catch (const Error& error) {
      doctor.say(file, cat({"does not fit: ", error.what()}));
      if (counts(file, args)) doctor.miss_in(file, error);
      return;
    }
  }
  try {
    const std::vector<recipe::Recipe> recipes = recipes_in(file, args.assignments);
    for (const recipe::Recipe& recipe : recipes) {
      row = {file};
      if (why = fits(recipe, row); !why.empty()) break;
    }
    if (recipes.size() > 1 && why.empty())
      row[1] = cat({row[1], " and ", recipes.size() - 1, " more"});
  } catch (const Error& error) {
    doctor.say(file, cat({"does not fit: ", error.what()}));
    if (counts(file, args)) doctor.miss_in(file, error);
    return;
  }
  if (why.empty()) return rows.push_back(row);
  doctor.say(file, "does not fit: " + why);
  if (counts(file, args)) doctor.miss(file + ": " + why);
}

void look_at_recipes(Doctor& doctor, const DoctorArgs& args) {
  std::vector<std::vector<std::string>> rows = {{"recipe that fits", "arm", "contract", "model",
                                                 "memory", "later up to", "a token", "disk up to"}};
  const std::vector<std::string> files = recipe_files(args);
  for (const std::string& file : files) look_at_recipe(doctor, file, args, rows);
  if (rows.size() > 1) {
    print("\n" + columns(rows) +
          "memory is beside activations; later come swapped pages and records, so many bytes a "
          "token; disk is for checkpoints and records, as many as the recipe lets stay\n\n");
  }
  if (!args.assignments.empty() || args.quick || !doctor.missing().empty()) return;
  for (const std::string& file : files) {
    if (!counts(file, args) || is_sft(file) || is_comparison(file)) continue;
    look_at_time(doctor, file, load_recipe(file, {}), file == kDemo);
  }
}

}  // namespace

int doctor(const DoctorArgs& args) {
  set_default_wait(0);  // it tells what is free now, and every recipe would wait anew
  if (!args.recipe.empty() && !is_sft(args.recipe)) {
    load_recipe(args.recipe, args.assignments);  // one that is wrong ends it here
  }
  Doctor doctor;
  look_at_cpu(doctor);
  const Memory memory = cli::memory();
  doctor.say("memory",
             cat({bytes_text(memory.total), ", ", bytes_text(memory.available), " free"}));
  std::error_code none;
  const auto space = fs::space(run_folder("x").parent_path().parent_path(), none);
  doctor.say("disk", none ? "unknown"
                          : cat({bytes_text(static_cast<std::int64_t>(space.available)),
                                 " free where runs/ is"}));
  look_at_torch(doctor);
  look_at_device(doctor);
  list_contracts(doctor);
  look_at_recipes(doctor, args);
  for (const std::string& line : doctor.missing()) error(line);
  if (doctor.missing().empty()) print("all that is needed is there\n");
  return doctor.status();
}

}  // namespace lockstep::cli
