// Which part of the low precision makes the gap, and what it does to codes on the way.
#include "instruments/decompose.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/interrupt.h"
#include "cli/lines_out.h"
#include "cli/log.h"
#include "cli/subject.h"
#include "cli/verbs.h"
#include "instruments/diff.h"
#include "model/json.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using instruments::PartGap;

/// A folder that goes again, interrupted or not.
class Scratch {
 public:
  Scratch() {
    std::error_code error;
    path_ = fs::temp_directory_path(error) / cat({"lockstep_decompose_", ::getpid()});
    if (!error) fs::create_directories(path_, error);
    if (error) {
      throw Error(cat({"no folder for what is compared (", path_.string(), ": ", error.message(),
                       "); set TMPDIR to one that can be written, or say --no-places"}));
    }
    gone_.emplace_back(path_.string());
    for (const char* name :
         {"answers.jsonl", "rollout.safetensors", "replayed.safetensors", "trainer.safetensors"}) {
      gone_.emplace_back(file(name));
    }
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string file(const char* name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
  std::deque<GoneOnInterrupt> gone_{};
};

std::string place_of(const PartGap& gap) {
  return gap.layer < 0 ? instruments::name_of(gap.part)
                       : cat({"layer ", gap.layer, " ", instruments::name_of(gap.part)});
}

std::string part_table(const std::vector<PartGap>& gaps) {
  std::vector<std::vector<std::string>> rows = {{"on", "mean |dlogp|", "median", "p99", "max"}};
  std::string absent;
  for (const PartGap& gap : gaps) {
    if (!gap.there) {
      absent += place_of(gap) + " is left out: " + gap.why + "\n";
      continue;
    }
    rows.push_back({place_of(gap), fixed(gap.mean, 6), fixed(gap.median, 7), fixed(gap.p99, 4),
                    fixed(gap.largest, 3)});
  }
  return columns(rows) + absent;
}

/// Trajectories of the subject's own rollout.
std::vector<Trajectory> rolled(const DecomposeArgs& args, const Subject& subject,
                               const std::vector<data::Prompt>& prompts) {
  const std::unique_ptr<Comm> comm = Comm::single();
  Agreement plain = subject.agreement;
  plain.guide = Guide{};
  rollout::Engine engine(plain, subject.arm.rollout, subject.device, nullptr, *comm);
  load(subject, engine);
  return answer(engine, prompts, args.samples, subject.recipe.schedule.sampling,
                subject.recipe.schedule.seed);
}

/// The two engines' BF16 numbers on the same tokens, compared place by place. Routes are compared
/// where the trainer chooses its own.
instruments::Diff places(const DecomposeArgs& args, const Subject& subject, const Scratch& scratch,
                         bool replay) {
  DumpArgs dump_args{.recipe = args.subject,
                     .assignments = args.assignments,
                     .model = args.model,
                     .score = scratch.file("answers.jsonl"),
                     .out = scratch.file("rollout.safetensors")};
  if (!fs::exists(dump_args.out)) dump(dump_args);
  dump_args.out = scratch.file(replay ? "replayed.safetensors" : "trainer.safetensors");
  dump_args.by_trainer = true;
  if (!replay) dump_args.assignments.push_back("guide.routing_replay=none");
  dump(dump_args);
  const std::string& preset = subject.recipe.arm.contract;
  return instruments::diff(instruments::Dump::open(scratch.file("rollout.safetensors")),
                           instruments::Dump::open(dump_args.out),
                           {.contract = preset == "bf16" ? "lockstep" : preset});
}

/// Where engine and trainer leave each other, printed, and its figures into `out`.
void compare_places(const DecomposeArgs& args, const Subject& subject, const Scratch& scratch,
                    const std::vector<data::Prompt>& prompts, const std::vector<Trajectory>& batch,
                    nlohmann::json& out) {
  LinesOut answers(scratch.file("answers.jsonl"));
  for (std::size_t i = 0; i < batch.size(); ++i) {
    answers.line(
        answer_line(subject, prompts[i / static_cast<std::size_t>(args.samples)], batch[i], 0));
  }
  answers.commit();
  const instruments::Diff replayed = places(args, subject, scratch, true);
  print("\nThe trainer as its arm has it, against the rollout:\n\n" +
        instruments::to_text(replayed));
  out["places"] = nlohmann::json::parse(instruments::to_json(replayed));
  const Guide& guide = subject.agreement.guide;
  if (!guide.replay_experts || guide.sites.has(Site::kW2In)) return;
  const instruments::Diff alone = places(args, subject, scratch, false);
  print("\nRoutes with replay off:\n\n" + instruments::routes_to_text(alone));
  for (const instruments::RouteDiff& r : alone.routes) {
    out["metrics"][cat({"fp4/decomposition_routes/mismatch_frac/layer_", r.layer.value})] =
        static_cast<double>(r.slots_mismatched) /
        static_cast<double>(std::max<std::int64_t>(r.slots, 1));
  }
}

/// What --json names; else a file beside a run's metrics, where report finds it; else none.
fs::path figures_file(const DecomposeArgs& args) {
  const fs::path run = args.subject;
  if (args.json.empty() && args.assignments.empty() && args.model.empty() &&
      fs::exists(run / "metrics.jsonl")) {
    return run / "decomposition.json";
  }
  return args.json;
}

}  // namespace

int decompose(const DecomposeArgs& args) {
  if (args.prompts < 1) throw Usage(cat({"--n is ", args.prompts, "; take 1 or more"}));
  if (args.samples < 1) throw Usage(cat({"--samples is ", args.samples, "; take 1 or more"}));
  const Subject subject = open_subject(args.subject, args.assignments, args.model, true);
  if (!args.json.empty()) check_output(args.json, "--json", {args.subject, args.model});
  std::optional<Scratch> scratch;  // before anything takes long
  if (args.places) scratch.emplace();
  const std::vector<data::Prompt> prompts = subject.task->evaluation(args.prompts);
  const std::vector<Trajectory> batch = rolled(args, subject, prompts);
  info(cat({batch.size(), " answers to ", prompts.size(), " prompts of evaluation, ",
            subject.numbers(), ", ", subject.policy.folder.string()}));

  require_memory_of_rows(batch, subject.agreement.bytes_per_token(),
                         "lower --n, --samples or rollout.max_new_tokens");

  Progress progress("parts", 0);
  std::int64_t known = 0;
  const std::vector<PartGap> gaps =
      instruments::decompose({.agreement = subject.agreement,
                              .qat = subject.arm.qat,
                              .rollout = subject.arm.rollout,
                              .trainer = subject.recipe.trainer,
                              .weights = *subject.policy.weights,
                              .batch = batch,
                              .by_layer = args.layers,
                              .device = subject.device},
                             [&](const PartGap& gap) { progress.at(++known, place_of(gap)); });
  print(cat({"The gap of the same ", batch.size(),
             " answers with one part of the low precision on at a time, on both sides:\n\n"}) +
        part_table(gaps));

  nlohmann::json out;
  out["metrics"] = nlohmann::json::object();
  for (const auto& [name, value] : instruments::metrics_of(gaps)) out["metrics"][name] = value;
  if (args.places) compare_places(args, subject, *scratch, prompts, batch, out);
  const fs::path file = figures_file(args);
  if (!file.empty()) {
    write_text(file, out.dump(2) + "\n");
    print(cat({"\nFigures: ", file.string(), "\n"}));
  }
  return 0;
}

}  // namespace lockstep::cli
