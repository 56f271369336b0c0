/// A model under an arm's numbers, opened to be asked and not to be trained.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cli/session.h"

namespace lockstep::cli {

struct Subject {
  recipe::Recipe recipe;
  Policy policy;
  std::unique_ptr<data::Task> task;
  Arm arm;
  Agreement agreement;
  Device device{};  // there, and with room for the rollout
  bool default_task = false;

  /// "arm trace, contract lockstep (94e03bb254e479a5)".
  std::string numbers() const;

  /// What is asked: "arith (10 to 999 * 2 to 99)", or jsonl's file; and that it is the default
  /// where no recipe says.
  std::string asked() const;
};

/// `what` is a recipe, a checkpoint (under the default recipe), a run directory (its recipe and its
/// newest checkpoint), or empty: all defaults. A `model` that is not empty goes over all of them.
/// `trains`: there will be a trainer beside the engine.
Subject open_subject(const std::string& what, const std::vector<std::string>& assignments,
                     const std::string& model, bool trains = false);

/// Gives an engine the subject's weights, quantized.
void load(const Subject& subject, rollout::Engine& engine);

/// Samples of each prompt, side by side, in order of prompts and samples. Prompts have different
/// ids. Shows how far it is.
std::vector<Trajectory> answer(rollout::Engine& engine, std::span<const data::Prompt> prompts,
                               std::int32_t samples, const Sampling& sampling, std::uint64_t seed);

/// One line of JSON: prompt and response as text, tokens, prompt_len, rollout_logp (null where the
/// policy did not choose the token), reward, why it ended.
std::string answer_line(const Subject& subject, const data::Prompt& prompt,
                        const Trajectory& trajectory, float reward);

}  // namespace lockstep::cli
