// lockstep VERB ...: reads the command line and calls the verb.
#include <CLI/CLI.hpp>
#include <functional>
#include <iostream>
#include <string>

#include "cli/log.h"
#include "cli/verbs.h"

namespace lockstep::cli {
namespace {

CLI::App* verb(CLI::App& app, const std::string& name, const std::string& what,
               const std::string& example) {
  CLI::App* sub = app.add_subcommand(name, what);
  sub->footer("Example:\n  ./lockstep " + example + "\n");
  return sub;
}

void add_recipe(CLI::App* sub, std::string& recipe, std::vector<std::string>& assignments,
                bool required) {
  auto* option = sub->add_option("recipe", recipe, "a TOML file; recipes/ has examples");
  if (required) option->required();
  sub->add_option("assignments", assignments, "key=value, over what the recipe says");
}

int run(int argc, char** argv) {
  CLI::App app(
      "Reinforcement learning of mixture-of-experts models whose FP4 rollouts stay in step with "
      "training.",
      "./lockstep");
  app.require_subcommand(1);
  std::function<int()> chosen;

  SftArgs sft_args;
  auto* sub = verb(app, "sft", "teach a model by a task's worked solutions",
                   "sft recipes/tiny_sft.toml --out models/tiny-moe");
  add_recipe(sub, sft_args.recipe, sft_args.assignments, true);
  sub->add_option("--out", sft_args.out, "the folder to write; default: runs/<recipe>");
  sub->callback([&] { chosen = [&] { return sft(sft_args); }; });

  TrainArgs train_args;
  sub = verb(app, "train", "run a recipe, or go on with a run that was interrupted",
             "train recipes/demo.toml arm=trace schedule.steps=20 --run mine");
  add_recipe(sub, train_args.recipe, train_args.assignments, true);
  sub->add_option("--run", train_args.run, "a name below runs/, or a path; default: the recipe's");
  sub->callback([&] { chosen = [&] { return train(train_args); }; });

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::CallForAllHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& wrong) {
    throw Usage(std::string(wrong.what()) + "; ./lockstep --help lists the verbs");
  }
  return chosen();
}

}  // namespace
}  // namespace lockstep::cli

int main(int argc, char** argv) {
  try {
    return lockstep::cli::run(argc, argv);
  } catch (const lockstep::cli::Usage& wrong) {
    lockstep::cli::error(wrong.what());
    return 2;
  } catch (const std::exception& failed) {
    lockstep::cli::error(failed.what());
    return 1;
  }
}
