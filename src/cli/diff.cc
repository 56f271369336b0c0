#include "instruments/diff.h"

#include "base/error.h"
#include "base/text.h"
#include "cli/columns.h"
#include "cli/lines_out.h"
#include "cli/session.h"
#include "cli/verbs.h"
#include "model/json.h"
#include "recipe/arm.h"
#include "recipe/recipe.h"

namespace lockstep::cli {
namespace {

constexpr std::int32_t kMostLayers = 128;  // of a dump

/// The contract that a recipe of these keys has: each kind of tensor by its own field.
void put_rules(const DiffArgs& args, instruments::DiffOptions& options) {
  contracts::preset(args.contract, kMostLayers);  // one that there is
  if (args.assignments.empty()) return;
  std::vector<std::string> keys = {"contract.preset=" + args.contract};
  for (const std::string& assignment : args.assignments) {
    const bool arm = assignment.starts_with("arm=");
    if (!arm && !assignment.starts_with("contract.")) {
      throw Usage(
          cat({"'", assignment, "' is no part of a contract; diff takes contract.KEY=value ",
               "and arm=NAME"}));
    }
    if (arm) keys.erase(keys.begin());  // it has a preset of its own
    keys.push_back(assignment);
    options.contract += " " + assignment;
  }
  const recipe::Recipe recipe = recipe::parse_recipe("", "", keys);
  options.rules = bind(recipe.arm, ModelConfig{.num_layers = kMostLayers}).contract;
}

}  // namespace

int diff(const DiffArgs& args) {
  instruments::DiffOptions options = {.contract = args.contract, .tolerance = args.tolerance};
  of_the_caller([&] { put_rules(args, options); });
  const instruments::Dump a = instruments::Dump::open(recipe::find(args.a, "the rollout's dump"));
  const instruments::Dump b = instruments::Dump::open(recipe::find(args.b, "the trainer's dump"));
  if (!args.json.empty()) check_output(args.json, "--json", {args.a, args.b});
  const instruments::Diff found = instruments::diff(a, b, options);
  if (!args.json.empty()) write_text(args.json, instruments::to_json(found));
  print(instruments::to_text(found));
  return 0;
}

}  // namespace lockstep::cli
