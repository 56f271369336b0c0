#include "rollout/request.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "rollout/sampler.h"

namespace lockstep::rollout {
namespace {

// What span_id() has room for.
constexpr std::int64_t kPrompts = 1 << 28;
constexpr std::int64_t kSamples = (1 << 14) - 1;
constexpr std::int64_t kSpans = 48;  // of 64; the others are for turns and weight updates to come

void check_tokens(const Trajectory& t, const ModelConfig& model) {
  if (t.prompt.value < 0 || t.prompt.value >= kPrompts) {
    throw Error(
        cat({"prompt ", t.prompt.value, ": prompts are numbered from 0 to ", kPrompts - 1}));
  }
  if (t.tokens.empty()) throw Error(cat({"prompt ", t.prompt.value, " has no tokens"}));
  for (std::size_t i = 0; i < t.tokens.size(); ++i) {
    if (t.tokens[i] >= 0 && t.tokens[i] < model.vocabulary) continue;
    throw Error(cat({"prompt ", t.prompt.value, ": token ", i, " is ", t.tokens[i],
                     ", the vocabulary has ", model.vocabulary}));
  }
}

void check_path(const Trajectory& t) {
  std::int64_t covered = 0;
  for (const Span& span : t.path) {
    if (span.first != covered || span.count < 1) {
      throw Error(
          cat({"prompt ", t.prompt.value, ", sample ", t.sample, ": its path has a span of ",
               span.count, " from position ", span.first, ", expected at ", covered}));
    }
    covered += span.count;
  }
  if (covered > static_cast<std::int64_t>(t.tokens.size())) {
    throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample, ": its path covers ",
                     covered, " positions of ", t.tokens.size(), " tokens"}));
  }
  if (static_cast<std::int64_t>(t.path.size()) > kSpans) {
    throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample, " has ", t.path.size(),
                     " spans, at most ", kSpans, " can go on: end it"}));
  }
  // Records hang on every token before them: text that was decoded and encoded again may differ.
  const std::span<const Token> tokens(t.tokens);
  std::uint64_t hash = hash_tokens({});
  for (const Span& span : t.path) {
    if (span.prefix_hash != hash) {
      throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample,
                       ": its path was recorded behind other tokens than those before position ",
                       span.first, "; go on from the tokens as they came, or clear the path"}));
    }
    hash = hash_tokens(
        tokens.subspan(static_cast<std::size_t>(span.first), static_cast<std::size_t>(span.count)),
        hash);
  }
}

void check_sizes(const Trajectory& t) {
  if (t.response_mask.size() > t.tokens.size() || t.rollout_logp.size() > t.tokens.size()) {
    throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample, ": ", t.response_mask.size(),
                     " mask values and ", t.rollout_logp.size(), " log-probs for ", t.tokens.size(),
                     " tokens"}));
  }
  if (t.top_tokens.size() != t.top_logp.size()) {
    throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample, ": ", t.top_tokens.size(),
                     " top tokens and ", t.top_logp.size(), " log-probs of them"}));
  }
}

/// Zeros where no token was drawn yet. What a prefix brings must be of the same k.
void fit_top(Trajectory& t, const ModelConfig& model) {
  const std::int32_t k = t.sampling.top_logprobs;
  if (k > model.vocabulary) {
    throw Error(cat({"top_logprobs is ", k, ", the vocabulary has ", model.vocabulary, " tokens"}));
  }
  const std::size_t size = t.tokens.size() * static_cast<std::size_t>(k);
  if (t.top_tokens.size() > size || (k > 0 && t.top_tokens.size() % static_cast<std::size_t>(k))) {
    throw Error(
        cat({"prompt ", t.prompt.value, ", sample ", t.sample, " comes with ", t.top_tokens.size(),
             " top tokens for ", t.tokens.size(), " tokens and top_logprobs = ", k}));
  }
  t.top_tokens.resize(size, 0);
  t.top_logp.resize(size, 0.0f);
}

}  // namespace

void check_options(const Options& options) {
  if (!(options.drift.noise >= 0.0f) || !std::isfinite(options.drift.noise)) {
    throw Error(cat({"drift.noise is ", options.drift.noise, ", not a number from 0 on"}));
  }
  if (options.residual_permille < 0 || options.residual_permille > 1000) {
    throw Error(
        cat({"residual_permille is ", options.residual_permille, ", not between 0 and 1000"}));
  }
}

void check_guide(const Agreement& agreement) {
  for (std::int32_t l = 0; l < agreement.model.num_layers; ++l) {
    for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV}) {
      const Place place = {Layer{l}, site};
      if (agreement.encoding(place) == Encoding::kNone) continue;
      if (agreement.contract.layers.has(place.layer) && agreement.rule(site).quantizes()) {
        continue;
      }
      const char* name = site == Site::kW13In  ? "w13_in"
                         : site == Site::kW2In ? "w2_in"
                         : site == Site::kK    ? "k"
                                               : "v";
      throw Error(cat({"guide.sites has ", name, " in layer ", l,
                       ", where the contract does not quantize it: leave it out, or quantize it"}));
    }
  }
}

void check_request(Request& request, const ModelConfig& model, bool recorded) {
  Trajectory& t = request.prefix;
  check_tokens(t, model);
  check_sampling(t.sampling, recorded);
  if (request.num_samples < 1) {
    throw Error(cat(
        {"prompt ", t.prompt.value, ": num_samples is ", request.num_samples, ", not at least 1"}));
  }
  if (t.sample < 0 || std::int64_t{t.sample} + request.num_samples > kSamples) {
    throw Error(cat({"prompt ", t.prompt.value, ": samples ", t.sample, " to ",
                     std::int64_t{t.sample} + request.num_samples - 1,
                     " are asked for, there are 0 to ", kSamples - 1}));
  }
  if (static_cast<std::int64_t>(t.tokens.size()) >= model.max_positions) {
    throw Error(
        cat({"prompt ", t.prompt.value, " has ", t.tokens.size(), " tokens, the model's context ",
             model.max_positions, ": shorten it so that one more fits"}));
  }
  check_path(t);
  check_sizes(t);
  t.response_mask.resize(t.tokens.size(), 0);
  t.rollout_logp.resize(t.tokens.size(), 0.0f);
  fit_top(t, model);
  t.finish = Finish::kNone;
}

void prepare_scoring(Trajectory& t, const ModelConfig& model) {
  check_tokens(t, model);
  Sampling temperature_only = {.temperature = t.sampling.temperature};
  check_sampling(temperature_only, true);
  if (t.sample < 0 || t.sample >= kSamples) {
    throw Error(cat({"prompt ", t.prompt.value, ": there is no sample ", t.sample}));
  }
  if (static_cast<std::int64_t>(t.tokens.size()) > model.max_positions) {
    throw Error(cat({"prompt ", t.prompt.value, ", sample ", t.sample, " has ", t.tokens.size(),
                     " tokens, the model's context ", model.max_positions}));
  }
  check_sizes(t);
  if (t.response_mask.empty()) t.response_mask.assign(t.tokens.size(), 1);
  t.response_mask.resize(t.tokens.size(), 0);
  t.response_mask[0] = 0;
  t.rollout_logp.assign(t.tokens.size(), 0.0f);
  t.top_tokens.clear();
  t.top_logp.clear();
}

void abort_quietly(Engine& engine) noexcept {
  try {
    engine.abort();
  } catch (...) {  // the engine is idle all the same
  }
}

void throw_held_back(const std::string& why) {
  throw Error(cat({"the record store has no room for one more sequence",
                   why.empty() ? std::string(": raise its budget") : "; " + why,
                   "; or lower rollout.max_new_tokens"}));
}

}  // namespace lockstep::rollout
