// lockstep VERB ...: reads the command line and calls the verb.
#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "base/text.h"
#include "base/wait.h"
#include "cli/columns.h"
#include "cli/interrupt.h"
#include "cli/log.h"
#include "cli/said.h"
#include "cli/verbs.h"

namespace lockstep::cli {
namespace {

CLI::App* verb(CLI::App& app, const std::string& name, const std::string& what,
               const std::string& example) {
  CLI::App* sub = app.add_subcommand(name, what);
  sub->footer("Example:\n  ./lockstep " + example + "\n");
  return sub;
}

/// An option that takes text. An empty one is refused: it is a variable that a shell did not know,
/// and would stand for the default.
CLI::Option* add_text(CLI::App* sub, const std::string& name, std::string& target,
                      const std::string& what) {
  return sub->add_option(name, target, what)->check([](const std::string& text) -> std::string {
    return text.empty() ? "is empty; leave it out, or say what it is" : "";
  });
}

/// `recipe` and the assignments behind it. The options' values live as long as the verb's callback.
template <typename Args>
void add_recipe(CLI::App* sub, Args& args, bool required) {
  auto* option = add_text(sub, "recipe", args.recipe, "a TOML file; recipes/ has examples");
  if (required) option->required();
  sub->add_option(
      "assignments", args.assignments,
      "key=value, over what the recipe says; device=cpu and device=cuda choose where it runs");
}

/// Refuses what lies outside [least, most], and what is no number.
std::function<std::string(const std::string&)> within(double least, double most) {
  return [=](const std::string& text) -> std::string {
    const double value = std::strtod(text.c_str(), nullptr);
    if (value >= least && value <= most) return "";
    return cat({text, " is not between ", least, " and ", most});
  };
}

/// The values live as long as the verb's callback.
void add_arms(CLI::App* sub, std::vector<std::string>& arms, const std::string& what) {
  const auto split = [&arms](const std::string& text) {
    arms.clear();
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t end = std::min(text.find(',', at), text.size());
      arms.push_back(text.substr(at, end - at));
      if (arms.back().empty()) {
        throw CLI::ValidationError(
            cat({"--arms is '", text, "'; names stand between its commas, none of them empty"}));
      }
      at = end + 1;
    }
  };
  sub->add_option_function<std::string>("--arms", split, what);
}

void add_samples(CLI::App* sub, std::int32_t& target) {
  constexpr double kMost = 16382;  // of a prompt, as schedule.samples
  sub->add_option("--samples", target, "of each prompt")
      ->check(within(1, kMost))
      ->capture_default_str();
}

/// Which verb was named, with what its options say.
using Chosen = std::function<int()>;

void add_demo(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<DemoArgs>();
  auto* sub = verb(app, "demo", "a small model post-trained by several methods side by side",
                   "demo\n  ./lockstep demo recipes/demo_tis.toml --run demo_tis");
  add_recipe(sub, *args, false);
  add_arms(sub, args->arms,
           "which, by commas; default: bf16,naive,trace and, where the time allows, trace_mod4");
  add_text(sub, "--run", args->run, "a name below runs/, or a path");
  sub->callback([&chosen, args] {
    if (args->recipe.find('=') != std::string::npos) {
      args->assignments.insert(args->assignments.begin(), args->recipe);
      args->recipe.clear();
    }
    if (args->recipe.empty()) args->recipe = "recipes/demo.toml";
    chosen = [args] { return demo(*args); };
  });
}

void add_compare(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<CompareArgs>();
  auto* sub = verb(app, "compare",
                   "arms side by side from the same weights, prompts and seeds; goes on where it "
                   "was interrupted",
                   "compare recipes/compare_tiny.toml\n"
                   "  ./lockstep compare recipes/compare_tiny.toml --arms naive,trace --seeds 3 "
                   "--run mine");
  add_recipe(sub, *args, true);
  add_arms(sub, args->arms,
           "which, by commas: arms, or the recipe's variants; default: its compare.arms");
  sub->add_option("--seeds", args->seeds, "how many; default: the recipe's compare.seeds")
      ->check(within(1, 1000));
  add_text(sub, "--run", args->run, "a name below runs/, or a path; default: the recipe's");
  constexpr double kMostJobs = 256;
  sub->add_option("--jobs", args->jobs,
                  "how many runs at once, each a process of its own; several GPUs are shared out")
      ->check(within(1, kMostJobs))
      ->capture_default_str();
  sub->add_option("--cell", args->cell)->group("");  // what compare starts its processes with
  sub->add_flag("--look", args->look)->group("");
  sub->callback([&chosen, args] { chosen = [args] { return compare(*args); }; });
}

void add_doctor(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<DoctorArgs>();
  auto* sub =
      verb(app, "doctor", "what this machine has, which recipes fit it, and how long they take",
           "doctor\n  ./lockstep doctor recipes/demo.toml schedule.samples=16");
  add_recipe(sub, *args, false);
  sub->add_flag("--quick", args->quick, "time nothing");
  sub->callback([&chosen, args] { chosen = [args] { return doctor(*args); }; });
}

void add_sft(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<SftArgs>();
  auto* sub = verb(
      app, "sft", "teach a model by a task's worked solutions, or go on where that was interrupted",
      "sft recipes/tiny_sft.toml --out runs/tiny");
  add_recipe(sub, *args, true);
  add_text(sub, "--out", args->out,
           "the folder to write, none that another recipe wrote; default: runs/<recipe>");
  sub->callback([&chosen, args] { chosen = [args] { return sft(*args); }; });
}

void add_train(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<TrainArgs>();
  auto* sub = verb(app, "train", "run a recipe, or go on with a run that was interrupted",
                   "train recipes/demo.toml arm=trace schedule.steps=20 --run mine");
  add_recipe(sub, *args, true);
  add_text(sub, "--run", args->run, "a name below runs/, or a path; default: the recipe's");
  sub->callback([&chosen, args] { chosen = [args] { return train(*args); }; });
}

/// What verbs that ask a model start from.
template <typename Args>
void add_subject(CLI::App* sub, Args& args) {
  add_text(sub, "recipe", args.recipe, "a TOML file, a checkpoint, or a run directory");
  sub->add_option("assignments", args.assignments, "key=value, over what the recipe says");
  add_text(sub, "--model", args.model, "a Hugging Face directory, over the recipe's");
}

void add_rollout(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<RolloutArgs>();
  auto* sub =
      verb(app, "rollout", "let a model answer prompts, or score sequences; JSON lines",
           "rollout recipes/demo.toml arm=trace --n 8 --samples 4 --out runs/answers.jsonl\n"
           "  ./lockstep rollout recipes/demo.toml --score runs/answers.jsonl --gap");
  add_subject(sub, *args);
  sub->add_option("--n", args->prompts, "how many of the task's prompts")
      ->check(within(1, 1e9))
      ->capture_default_str();
  add_samples(sub, args->samples);
  add_text(sub, "--prompt", args->prompt, "this text, not the task's prompts");
  sub->add_option("--step", args->step, "the prompts of that step of training, not evaluation's")
      ->check(within(0, 1e15));
  add_text(sub, "--trace", args->trace, "a folder in which to leave the records");
  add_text(sub, "--score", args->score,
           "a JSONL file of sequences (token_ids or tokens, text, or prompt and response): "
           "write their log-probs");
  sub->add_flag("--trainer", args->by_trainer, "score by the trainer, not by the engine");
  sub->add_flag("--gap", args->gap, "score by both, the trainer guided as the arm says");
  add_text(sub, "--out", args->out, "the file to write; default: stdout");
  sub->callback([&chosen, args] { chosen = [args] { return rollout(*args); }; });
}

void add_eval(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<EvalArgs>();
  auto* sub = verb(app, "eval", "judge a model on prompts kept apart, in the rollout's numbers",
                   "eval runs/mine --n 256 --samples 4\n"
                   "  ./lockstep eval models/tiny-moe arm=naive --greedy\n"
                   "  ./lockstep eval models/tiny-moe --posthoc h_scale");
  add_subject(sub, *args);
  sub->add_option("--n", args->prompts,
                  "how many prompts; default: the recipe's eval.prompts; 64 where it has none")
      ->check(within(1, 1e9));
  add_samples(sub, args->samples);
  sub->add_flag("--greedy", args->greedy, "the likeliest token each time");
  sub->add_option(
         "--posthoc", args->posthoc,
         "a BF16 policy quantized afterwards: nvfp4, four_over_six, or h_scale (nvfp4 whose "
         "scales of weights are refined by a calibration pass)")
      ->check(CLI::IsMember({"nvfp4", "four_over_six", "h_scale"}));
  sub->add_option("--temperature", args->temperature, "default: the recipe's; see --greedy")
      ->check(within(1e-3, 100));
  sub->add_option("--top-p", args->top_p, "default: the recipe's")->check(within(1e-6, 1));
  sub->add_option("--top-k", args->top_k, "default: the recipe's; 0: all")->check(within(0, 1e9));
  add_text(sub, "--out", args->out, "a file for the answers, as rollout writes them");
  sub->callback([&chosen, args] { chosen = [args] { return eval(*args); }; });
}

void add_inspect(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<InspectArgs>();
  auto* sub =
      verb(app, "inspect", "show what is in a checkpoint, a run directory, or recorded segments",
           "inspect models/tiny-moe\n"
           "  ./lockstep rollout models/tiny-moe --step 0 --n 2 --trace runs/traces --out "
           "runs/traces.jsonl\n"
           "  ./lockstep inspect runs/traces --span 0:0 --place 3.w13_in --position 8\n"
           "  ./lockstep inspect runs/mine --why runs/answers.jsonl:1 --place 1.k --position 8");
  add_text(sub, "path", args->path,
           "a checkpoint, a run directory, a folder of segments, a .segment or .safetensors")
      ->required();
  add_text(sub, "--contract", args->contract,
           "the preset under which a checkpoint's weights are measured");
  add_text(sub, "--span", args->span,
           "its id, or PROMPT (what its samples share), PROMPT:SAMPLE, PROMPT:SAMPLE:TURN");
  add_text(sub, "--place", args->place, "LAYER.SITE, as 3.w13_in: the span's row there");
  sub->add_option("--position", args->position, "of that row; default: the span's first")
      ->check(within(0, 1e9));
  add_text(sub, "--why", args->why,
           "FILE[:LINE], a sequence as rollout --score reads it: is its token at --position guided "
           "at --place, why not, and what are its codes");
  sub->callback([&chosen, args] { chosen = [args] { return inspect(*args); }; });
}

void add_dump(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<DumpArgs>();
  auto* sub = verb(
      app, "dump", "write what the engine or the trainer computes, for diff",
      "dump recipes/demo.toml arm=trace --score runs/answers.jsonl --out runs/rollout.safetensors\n"
      "  ./lockstep dump recipes/demo.toml arm=trace --score runs/answers.jsonl --trainer "
      "--out runs/trainer.safetensors");
  add_subject(sub, *args);
  add_text(sub, "--score", args->score, "a JSONL file of sequences, as rollout --score reads it")
      ->required();
  add_text(sub, "--out", args->out, "the .safetensors file to write")->required();
  sub->add_flag("--trainer", args->by_trainer, "the trainer's numbers, guided as the arm says");
  sub->callback([&chosen, args] { chosen = [args] { return dump(*args); }; });
}

void add_verify(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<VerifyArgs>();
  auto* sub = verb(app, "verify", "check that the parts agree on a checkpoint, bit for bit",
                   "verify runs/mine");
  add_text(sub, "subject", args->subject, "a checkpoint, a run directory, or a recipe");
  sub->add_option("assignments", args->assignments, "key=value, over what the recipe says");
  add_text(sub, "--model", args->model, "a Hugging Face directory, over the recipe's");
  sub->callback([&chosen, args] { chosen = [args] { return verify(*args); }; });
}

void add_diff(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<DiffArgs>();
  auto* sub = verb(app, "diff", "show where two engines part, from dumps of the same tokens",
                   "diff runs/rollout.safetensors runs/trainer.safetensors --json runs/parts.json\n"
                   "  ./lockstep diff A B contract.activations=mxfp8 contract.kv=mxfp4");
  add_text(sub, "a", args->a, "the rollout's dump: a file or a folder (docs/formats/dump.md)")
      ->required();
  add_text(sub, "b", args->b, "the trainer's")->required();
  sub->add_option("assignments", args->assignments,
                  "contract.KEY=value or arm=NAME, as in a recipe, over the preset");
  add_text(sub, "--contract", args->contract, "the preset under which both are quantized")
      ->capture_default_str();
  sub->add_option("--tolerance", args->tolerance,
                  "the drift, times sqrt(layer + 1), above which a place parts")
      ->check(within(0, 1e9))
      ->capture_default_str();
  add_text(sub, "--json", args->json, "a file for every figure");
  sub->callback([&chosen, args] { chosen = [args] { return diff(*args); }; });
}

void add_decompose(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<DecomposeArgs>();
  auto* sub = verb(app, "decompose", "split the gap between rollout and trainer by what makes it",
                   "decompose runs/demo/naive\n"
                   "  ./lockstep decompose recipes/demo.toml arm=trace --layers --n 64");
  add_text(sub, "subject", args->subject, "a TOML file, a checkpoint, or a run directory");
  sub->add_option("assignments", args->assignments, "key=value, over what the recipe says");
  add_text(sub, "--model", args->model, "a Hugging Face directory, over the recipe's");
  sub->add_option("--n", args->prompts, "how many of evaluation's prompts")
      ->check(within(1, 1e9))
      ->capture_default_str();
  add_samples(sub, args->samples);
  sub->add_flag("--layers", args->layers, "quantize one layer at a time, too");
  sub->add_flag("!--no-places", args->places, "leave out the operands' figures");
  add_text(sub, "--json", args->json,
           "a file for every figure; default: of a run, its "
           "decomposition.json, which report shows");
  sub->callback([&chosen, args] { chosen = [args] { return decompose(*args); }; });
}

void add_report(CLI::App& app, Chosen& chosen) {
  const auto args = std::make_shared<ReportArgs>();
  auto* sub =
      verb(app, "report", "write one page about a run, or about several side by side",
           "report runs/demo\n"
           "  ./lockstep report runs/mine runs/other --out runs/both.html --figures runs/figures");
  sub->add_option("runs", args->runs,
                  "run directories, or folders of them; seeds of an arm become a band")
      ->required();
  add_text(sub, "--out", args->out,
           "the page; default: report.html in the run's folder; of several report_A_B.html where "
           "they lie");
  add_text(sub, "--figures", args->figures, "a folder for the charts as SVG files");
  sub->callback([&chosen, args] { chosen = [args] { return report(*args); }; });
}

/// Names a verb that there is not, and the nearest that there is.
void check_verb(const CLI::App& app, const std::string& name) {
  if (name.empty() || name.starts_with('-')) return;
  std::vector<std::string> verbs;
  for (const CLI::App* sub : app.get_subcommands({})) verbs.push_back(sub->get_name());
  if (std::find(verbs.begin(), verbs.end(), name) != verbs.end()) return;
  const std::string near = nearest(name, verbs);
  throw Usage(
      cat({"there is no verb '", name, "'", near.empty() ? "" : ": did you mean " + near + "?",
           "; ./lockstep --help lists them"}));
}

/// What ./lockstep itself does before the program is reached.
const char* const kOfTheScript =
    "Two verbs more, of the script that builds this:\n"
    "  test [--all]                every test that this machine can run; --all: the long ones too\n"
    "  bench                       every benchmark\n\n"
    "Each verb has its own --help. Variables: LOCKSTEP_PYTHON, a Python whose torch is used;\n"
    "LOCKSTEP_BUILD, the build folder; LOCKSTEP_THREADS, how many threads work; LOCKSTEP_WAIT, "
    "how\n"
    "many seconds a lock or memory is waited for that another process is giving up, default 10.\n"
    "Exit status: 0, done; 1, it failed; 2, the command line or a recipe is at fault; 130 and "
    "143,\n"
    "interrupted by SIGINT and SIGTERM.\n";

int run(int argc, char** argv) {
  CLI::App app(
      "Reinforcement learning of mixture-of-experts models whose FP4 rollouts stay in step with "
      "training.",
      "./lockstep");
  app.require_subcommand(1);
  app.footer(kOfTheScript);
  Chosen chosen;
  add_demo(app, chosen);
  add_compare(app, chosen);
  add_doctor(app, chosen);
  add_sft(app, chosen);
  add_train(app, chosen);
  add_rollout(app, chosen);
  add_eval(app, chosen);
  add_inspect(app, chosen);
  add_dump(app, chosen);
  add_verify(app, chosen);
  add_diff(app, chosen);
  add_decompose(app, chosen);
  add_report(app, chosen);

  const std::string named = argc > 1 ? argv[1] : "";
  check_verb(app, named);
  if (named.empty()) {
    print(app.help());
    return 2;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help
    std::ostringstream text;
    const int status = app.exit(asked, text, text);
    print(text.str());
    return status;
  } catch (const CLI::ParseError& wrong) {
    throw Usage(
        std::string(wrong.what()) + "; ./lockstep " +
        (named.starts_with('-') ? "--help lists the verbs" : named + " --help lists its options"));
  }
  tell_of_waiting(info);
  threads();  // a LOCKSTEP_THREADS that is no number is refused before anything else
  longest_wait();
  return chosen();
}

/// A file opened while 0, 1 or 2 is closed would take that number, and messages with it. Reading
/// alone: what is written there still fails.
void fill_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  }
}

}  // namespace
}  // namespace lockstep::cli

int main(int argc, char** argv) {
  lockstep::cli::fill_standard_streams();
  lockstep::cli::catch_interrupts();
  try {
    return lockstep::cli::run(argc, argv);
  } catch (const lockstep::Usage& wrong) {
    lockstep::cli::error(wrong.what());
    return 2;
  } catch (const std::filesystem::filesystem_error& failed) {
    lockstep::cli::error(lockstep::cli::said(failed));
    return failed.code() == std::errc::filename_too_long ? 2 : 1;  // no file has such a name
  } catch (const std::exception& failed) {
    lockstep::cli::error(lockstep::cli::said(failed));
  }
  return 1;
}
