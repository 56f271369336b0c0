#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/lines_out.h"
#include "cli/log.h"
#include "cli/score.h"
#include "cli/subject.h"
#include "cli/verbs.h"
#include "store/store.h"

namespace lockstep::cli {
namespace {

void check(const RolloutArgs& args) {
  if (args.prompts < 1) throw Usage(cat({"--n is ", args.prompts, "; take 1 or more"}));
  if (args.samples < 1) throw Usage(cat({"--samples is ", args.samples, "; take 1 or more"}));
  if (args.score.empty() && (args.by_trainer || args.gap)) {
    throw Usage("--trainer and --gap say who scores; name the sequences with --score FILE.jsonl");
  }
  if (!args.score.empty() && (!args.prompt.empty() || !args.trace.empty() || args.step >= 0)) {
    throw Usage("--score reads sequences; leave out --prompt, --step and --trace");
  }
  if (args.by_trainer && args.gap) throw Usage("--gap scores by both; leave out --trainer");
  if (!args.prompt.empty() && args.step >= 0) {
    throw Usage("--prompt and --step both say what to answer; leave one out");
  }
}

std::vector<data::Prompt> choose(const RolloutArgs& args, const Subject& subject) {
  if (!args.prompt.empty()) {
    std::vector<Token> tokens;
    try {
      tokens = subject.policy.tokenizer.encode(args.prompt);
    } catch (const Error& error) {
      throw Usage(cat({"--prompt: ", error.what(), "; give it as UTF-8"}));
    }
    const std::int64_t most = subject.policy.config.max_positions;
    if (std::ssize(tokens) >= most) {
      throw Usage(cat({"--prompt has ", tokens.size(), " tokens, and the model reads at most ",
                       most, " with the answer: shorten it so that one more fits"}));
    }
    return {{.id = data::evaluation_id(0),
             .tokens = std::move(tokens),
             .text = args.prompt,
             .data_source = "command line"}};
  }
  if (args.step < 0) return subject.task->evaluation(args.prompts);
  return subject.task->prompts(args.step, args.prompts);
}

/// A store in the folder that --trace names; nothing where it names none.
std::unique_ptr<store::Store> records(const RolloutArgs& args, const Subject& subject) {
  if (args.trace.empty()) return nullptr;
  if (std::error_code none; std::filesystem::exists(args.trace, none) &&
                            !std::filesystem::is_directory(args.trace, none)) {
    throw Usage(cat({"--trace is '", args.trace, "', which is no folder; name another"}));
  }
  store::Options options = subject.recipe.store;
  options.folder = args.trace;
  options.run = subject.recipe.schedule.seed;
  options.contract = subject.arm.contract.id();
  auto store = std::make_unique<store::Store>(options);
  if (!store->spans().empty()) {
    throw Usage(cat({"--trace is '", args.trace, "', which holds records already; name another"}));
  }
  return store;
}

}  // namespace

int rollout(const RolloutArgs& args) {
  check(args);
  const Subject subject =
      open_subject(args.recipe, args.assignments, args.model, args.by_trainer || args.gap);
  if (!args.score.empty()) return score(args, subject);

  const std::vector<data::Prompt> prompts = choose(args, subject);
  LinesOut out(args.out);
  const std::unique_ptr<store::Store> store = records(args, subject);
  const std::unique_ptr<Comm> comm = Comm::single();
  rollout::Engine engine(subject.agreement, subject.arm.rollout, subject.device, store.get(),
                         *comm);
  load(subject, engine);
  const double began = seconds();
  const std::vector<Trajectory> answers =
      answer(engine, prompts, args.samples, subject.recipe.schedule.sampling,
             subject.recipe.schedule.seed);
  const double took = std::max(seconds() - began, 1e-9);
  double rewards = 0, tokens = 0;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const data::Prompt& prompt = prompts[i / static_cast<std::size_t>(args.samples)];
    const auto response = std::span(answers[i].tokens).subspan(prompt.tokens.size());
    const float reward =
        prompt.ground_truth.empty() ? 0.0f : subject.task->reward(prompt, response);
    rewards += static_cast<double>(reward);
    tokens += static_cast<double>(response.size());
    out.line(answer_line(subject, prompt, answers[i], reward));
  }
  if (store) value_or_throw(store->flush());
  out.commit();
  const auto n = static_cast<double>(answers.size());
  info(cat({counted(answers.size(), "answer"), " to ", counted(prompts.size(), "prompt"),
            args.prompt.empty() ? " of " + subject.asked() : std::string(), out.where(), ": ",
            args.prompt.empty() ? "reward " + fixed(rewards / n, 3) + ", " : std::string(),
            fixed(tokens / n, 1), " tokens each, ", fixed(tokens / took, 0), " tokens/s; ",
            subject.numbers()}));
  return 0;
}

}  // namespace lockstep::cli
