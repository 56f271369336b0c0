#include "instruments/verify.h"

#include <algorithm>
#include <filesystem>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/subject.h"
#include "cli/verbs.h"
#include "model/json.h"

namespace lockstep::cli {
namespace {

/// The contract's id in the first line of the run's own recipe, "" where `path` is no run.
std::string run_contract(const std::string& path) {
  constexpr std::string_view kBegin = "# contract ";
  const std::filesystem::path file = std::filesystem::path(path) / "recipe.toml";
  const std::string text = std::filesystem::exists(file) ? value_or_throw(read_text(file)) : "";
  if (!text.starts_with(kBegin)) return "";
  return text.substr(kBegin.size(), text.find('\n') - kBegin.size());
}

}  // namespace

int verify(const VerifyArgs& args) {
  const Subject subject = open_subject(args.subject, args.assignments, args.model, true);
  print(cat({subject.policy.folder.string(), ", ", subject.numbers(), "\n"}));
  // What the command line changes is not what the run named.
  const std::string named =
      args.assignments.empty() && args.model.empty() ? run_contract(args.subject) : "";
  const auto checks = instruments::verify(
      {.agreement = subject.agreement,
       .weights = *subject.policy.weights,
       .device = subject.device,
       .rollout = subject.arm.rollout,
       .run_contract = named},
      [](const instruments::Check& check) {
        print(cat({check.ok ? "ok   " : "bad  ", check.name,
                   std::string(10 - check.name.size(), ' '), check.figures, "\n"}));
      });
  const auto bad = std::count_if(checks.begin(), checks.end(), [](const auto& c) { return !c.ok; });
  if (bad > 0) {
    throw Error(cat({bad, " of ", checks.size(), " checks failed on ",
                     subject.policy.folder.string(), "; docs/verify.md says what each means"}));
  }
  return 0;
}

}  // namespace lockstep::cli
