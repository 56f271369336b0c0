#include "instruments/diff.h"

#include "cli/columns.h"
#include "cli/verbs.h"
#include "model/json.h"
#include "recipe/recipe.h"

namespace lockstep::cli {

int diff(const DiffArgs& args) {
  const instruments::Dump a = instruments::Dump::open(recipe::find(args.a, "the rollout's dump"));
  const instruments::Dump b = instruments::Dump::open(recipe::find(args.b, "the trainer's dump"));
  const instruments::Diff found =
      instruments::diff(a, b, {.contract = args.contract, .tolerance = args.tolerance});
  if (!args.json.empty()) write_text(args.json, instruments::to_json(found));
  print(instruments::to_text(found));
  return 0;
}

}  // namespace lockstep::cli
