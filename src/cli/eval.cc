#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/lines_out.h"
#include "cli/log.h"
#include "cli/subject.h"
#include "cli/verbs.h"
#include "sync/h_scale.h"
#include "sync/refit.h"

namespace lockstep::cli {
namespace {

/// What the options say over the recipe's [eval].
Sampling sampling_of(const EvalArgs& args, const recipe::Recipe& recipe) {
  const recipe::Evaluation& e = recipe.evaluation;
  Sampling sampling = {.temperature = args.temperature > 0 ? args.temperature : e.temperature,
                       .top_p = args.top_p > 0 ? args.top_p : e.top_p,
                       .top_k = args.top_k >= 0 ? args.top_k : e.top_k,
                       .max_new_tokens = recipe.schedule.sampling.max_new_tokens};
  if (args.greedy) sampling.top_k = 1;
  return sampling;
}

void check(const EvalArgs& args) {
  if (args.prompts < 0) throw Usage(cat({"--n is ", args.prompts, "; take 1 or more"}));
  if (args.samples < 1) throw Usage(cat({"--samples is ", args.samples, "; take 1 or more"}));
  if (args.greedy && args.top_k >= 0) throw Usage("--greedy is --top-k 1; leave one out");
  if (args.greedy && args.samples > 1) {
    throw Usage("--greedy gives every sample the same answer; leave out --samples");
  }
}

/// How many prompts: as told, else as the recipe evaluates, else as recipes do by default.
std::int32_t count_of(const EvalArgs& args, const Subject& subject) {
  if (args.prompts > 0) return args.prompts;
  const std::int32_t own = subject.recipe.evaluation.prompts;
  const auto most = std::min<std::int64_t>(subject.task->evaluation_size(),
                                           own > 0 ? own : recipe::Evaluation{}.prompts);
  return static_cast<std::int32_t>(std::max<std::int64_t>(most, 1));
}

struct Judged {
  double mean = 0;   // of all answers
  double error = 0;  // its standard error, over prompts
  double best = 0;   // of a prompt's answers, over prompts
  double tokens = 0;
};

Judged judge(std::span<const float> rewards, std::size_t samples) {
  Judged judged;
  const std::size_t prompts = rewards.size() / samples;
  const auto n = static_cast<double>(prompts);
  double squares = 0;
  for (std::size_t p = 0; p < prompts; ++p) {
    const auto group = rewards.subspan(p * samples, samples);
    double sum = 0;
    for (const float reward : group) sum += static_cast<double>(reward);
    const double mean = sum / static_cast<double>(samples);
    judged.mean += mean / n;
    squares += mean * mean / n;
    judged.best += static_cast<double>(*std::max_element(group.begin(), group.end())) / n;
  }
  const double variance = std::max(squares - judged.mean * judged.mean, 0.0);
  judged.error = prompts > 1 ? std::sqrt(variance / (n - 1)) : 0;
  return judged;
}

/// A policy that was trained in BF16, quantized afterwards: the naive arm with other weights.
Subject subject_of(const EvalArgs& args) {
  std::vector<std::string> assignments = args.assignments;
  std::string what = args.recipe;
  if (what.find('=') != std::string::npos && !std::filesystem::exists(what)) {
    assignments.insert(assignments.begin(), what);  // the recipe was left out
    what.clear();
  }
  if (!args.posthoc.empty()) {
    // A run's recipe spells out every key of its own arm: all are said anew.
    std::vector<std::string> afterwards = {"arm=naive",
                                           "contract.preset=lockstep",
                                           "contract.layers=all",
                                           "contract.kv=true",
                                           "contract.weights=true",
                                           "contract.activations=true",
                                           "qat.weights=false",
                                           "qat.activations=false",
                                           "qat.residual=false",
                                           "qat.k=false",
                                           "qat.v=false",
                                           "guide.mode=own_scale",
                                           "guide.sites=[]",
                                           "residual.kind=none",
                                           "contract.four_over_six_kv=false"};
    afterwards.push_back(
        cat({"contract.four_over_six=", args.posthoc == "four_over_six" ? "mse" : "off"}));
    assignments.insert(assignments.begin(), afterwards.begin(), afterwards.end());
  }
  return open_subject(what, assignments, args.model);
}

void load_weights(const EvalArgs& args, const Subject& subject, rollout::Engine& engine) {
  if (args.posthoc != "h_scale") return load(subject, engine);
  const auto squares = rollout::calibrate_inputs(subject.policy.config, *subject.policy.weights,
                                                 calibration_batch(subject.policy, *subject.task));
  const auto refined =
      sync::h_scaled(*subject.policy.weights, subject.arm.contract,
                     [&](const WeightId& id) { return std::span<const double>(squares.at(id)); });
  sync::refit(*refined, engine.weights(), subject.arm.contract, WeightVersion{0});
}

}  // namespace

int eval(const EvalArgs& args) {
  check(args);
  const Subject subject = subject_of(args);
  const std::vector<data::Prompt> prompts = subject.task->evaluation(count_of(args, subject));
  const auto samples = static_cast<std::size_t>(args.samples);
  LinesOut out(args.out);
  const std::unique_ptr<Comm> comm = Comm::single();
  Agreement unguided = subject.agreement;
  unguided.guide = Guide{};
  rollout::Engine engine(unguided, subject.arm.rollout, subject.device, nullptr, *comm);
  load_weights(args, subject, engine);

  const double began = seconds();
  const std::vector<Trajectory> answers =
      answer(engine, prompts, args.samples, sampling_of(args, subject.recipe),
             subject.recipe.schedule.seed);
  const double took = std::max(seconds() - began, 1e-9);
  std::vector<float> rewards;
  double tokens = 0, ended = 0;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const data::Prompt& prompt = prompts[i / samples];
    const auto response = std::span(answers[i].tokens).subspan(prompt.tokens.size());
    rewards.push_back(subject.task->reward(prompt, response));
    tokens += static_cast<double>(response.size());
    ended += answers[i].finish == Finish::kStop ? 1 : 0;
    if (!args.out.empty()) out.line(answer_line(subject, prompt, answers[i], rewards.back()));
  }
  out.commit();
  const Judged judged = judge(rewards, samples);
  const auto count = static_cast<double>(answers.size());
  std::string text = cat(
      {"mean@", samples, " ", fixed(judged.mean, 4),
       prompts.size() > 1 ? " +- " + fixed(judged.error, 4) + " (standard error)" : std::string()});
  if (samples > 1) text += cat({", best@", samples, " ", fixed(judged.best, 4)});
  text += cat({" on ", counted(prompts.size(), "prompt"), " of ", subject.asked()});
  print(text +
        cat({"\n", fixed(tokens / count, 1), " tokens an answer, ", fixed(100 * ended / count, 1),
             " % ended by themselves, ", fixed(tokens / took, 0), " tokens/s; ",
             subject.policy.folder.string(), ", ", subject.numbers(),
             args.posthoc.empty() ? "" : ", quantized afterwards: ", args.posthoc, "\n"}));
  return 0;
}

}  // namespace lockstep::cli
