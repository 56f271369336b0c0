#include "train/trainer.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/torch.h"
#include "train/network.h"
#include "train/optimizer.h"
#include "train/pack.h"
#include "train/parameters.h"
#include "train/sites.h"
#include "train/state_file.h"
#include "train/tally.h"

namespace lockstep::train {
namespace {

using at::Tensor;

constexpr const char* kStateFile = "trainer_state.bin";

/// A layer's graph: its input as a leaf, and its output. Without the output it is computed again.
struct Step {
  Tensor in;
  Tensor out;
};

Parameters::Numbers numbers(const Agreement& agreement, const Qat& qat, const Options& options) {
  return {.contract = agreement.contract,
          .fp4_experts = qat.weights && agreement.contract.weight.element == Element::kE2m1,
          .bf16 = options.bf16};
}

}  // namespace

struct Trainer::Impl {
  Impl(const Agreement& a, const Qat& q, const Options& o, Comm& c)
      : agreement(a),
        qat(q),
        options(o),
        comm(c),
        parameters(a.model, numbers(a, q, o)),
        network(agreement.model, parameters, o.bf16),
        source(masters_source(parameters)),
        sink(masters_sink(parameters, [this] { restart(); })) {}

  std::vector<Pack> cut(std::span<const Trajectory> batch) const {
    return pack(batch, {.tokens_per_pass = options.tokens_per_pass,
                        .max_positions = agreement.model.max_positions,
                        .vocabulary = agreement.model.vocabulary});
  }

  void restart() {
    for (Floats* numbers : {&parameters.grads, &parameters.moment1, &parameters.moment2}) {
      std::ranges::fill(numbers->all(), 0.0f);
    }
    updates = 0;
    tally = {};
    parameters.refresh();
    ready = true;
  }

  /// The residual stream behind the last layer. Fills `steps` where a backward pass will follow.
  Tensor forward(const Pack& pack, const Sites& sites, std::vector<Step>* steps) const {
    if (!ready) throw Error("the trainer has no weights yet: load a checkpoint first");
    Tensor h = network.embed(pack);
    for (std::int32_t layer = 0; layer < agreement.model.num_layers; ++layer) {
      const bool keeps = steps != nullptr && !options.recompute;
      const at::AutoGradMode mode(keeps);
      const Tensor in = h.detach().requires_grad_(keeps);
      const Tensor out = network.layer(layer, in, pack, sites);
      if (steps != nullptr) steps->push_back({in, keeps ? out : Tensor()});
      h = out.detach();
    }
    return h;
  }

  void backward(const Pack& pack, const Sites& sites, std::vector<Step>& steps, Tensor dh) {
    for (auto layer = static_cast<std::int32_t>(steps.size()) - 1; !steps.empty(); --layer) {
      Step step = std::move(steps.back());
      steps.pop_back();
      if (!step.out.defined()) {
        const at::AutoGradMode mode(true);
        step.in.requires_grad_(true);
        step.out = network.layer(layer, step.in, pack, sites);
      }
      step.out.backward(dh);
      dh = step.in.grad();
    }
    network.embed_backward(dh, pack);
  }

  double accumulate(std::span<const Trajectory> batch, const Pack& pack, const TraceSource* trace,
                    const TokenLoss& loss);

  const Agreement agreement;
  const Qat qat;
  const Options options;
  Comm& comm;
  Parameters parameters;
  Network network;
  std::unique_ptr<WeightSource> source;
  std::unique_ptr<WeightSink> sink;
  Tally tally;
  std::int64_t updates = 0;
  bool ready = false;
};

namespace {

/// Calls visit(i, t, s): scored row s belongs to position t of trajectory i of the batch.
template <typename Visit>
void each_scored(std::span<const Trajectory> batch, const Pack& pack, Visit&& visit) {
  std::size_t s = 0;
  for (std::size_t i = pack.first; i < pack.first + pack.start.size(); ++i) {
    const std::vector<std::uint8_t>& mask = batch[i].response_mask;
    for (std::size_t t = 1; t < mask.size(); ++t) {
      if (mask[t] != 0) visit(i, t, s++);
    }
  }
}

PerToken zeros(std::span<const Trajectory> batch) {
  PerToken values;
  for (const Trajectory& trajectory : batch) {
    values.emplace_back(trajectory.tokens.size(), 0.0f);
  }
  return values;
}

void check(const Agreement& agreement, const Options& options, Device device) {
  if (device.kind != Device::Kind::kCpu) {
    throw Error("the trainer runs on the CPU only; set device = \"cpu\"");
  }
  if (options.tokens_per_pass <= 0) {
    throw Error("tokens_per_pass is " + std::to_string(options.tokens_per_pass) +
                "; it must be positive");
  }
  if (agreement.model.head_dim % 2 != 0) {
    throw Error("head_dim is " + std::to_string(agreement.model.head_dim) +
                "; rotary embeddings need an even one");
  }
}

}  // namespace

double Trainer::Impl::accumulate(std::span<const Trajectory> batch, const Pack& pack,
                                 const TraceSource* trace, const TokenLoss& loss) {
  const Sites sites(agreement, qat, pack, trace, &tally);
  std::vector<Step> steps;
  const Tensor h = forward(pack, sites, &steps);
  const Scores scores = network.score(h, pack, true);
  tally.entropy += scores.entropy;
  tally.scored += static_cast<std::int64_t>(scores.logp.size());

  const std::span<const Trajectory> members = batch.subspan(pack.first, pack.start.size());
  PerToken logp = zeros(members);
  PerToken dlogp = zeros(members);
  each_scored(batch, pack, [&](std::size_t i, std::size_t t, std::size_t s) {
    logp[i - pack.first][t] = scores.logp[s];
  });
  double total = 0.0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    total += loss(pack.first + i, logp[i], dlogp[i]);
  }
  if (scores.logp.empty()) return total;

  std::vector<float> upstream(scores.logp.size());
  each_scored(batch, pack, [&](std::size_t i, std::size_t t, std::size_t s) {
    upstream[s] = dlogp[i - pack.first][t];
  });
  // What is computed again was counted the first time.
  const Sites again(agreement, qat, pack, trace, nullptr);
  backward(pack, again, steps, network.score_backward(scores, pack, upstream));
  return total;
}

Trainer::Trainer(const Agreement& agreement, const Qat& qat, const Options& options, Device device,
                 Comm& comm) {
  check(agreement, options, device);
  at::set_num_threads(threads());
  impl_ = std::make_unique<Impl>(agreement, qat, options, comm);
}

Trainer::~Trainer() = default;

PerToken Trainer::logprobs(std::span<const Trajectory> batch, const TraceSource* trace) const {
  PerToken logp = zeros(batch);
  const at::AutoGradMode none(false);
  for (const Pack& pack : impl_->cut(batch)) {
    if (pack.scored_row.empty()) continue;
    const Sites sites(impl_->agreement, impl_->qat, pack, trace, nullptr);
    const Scores scores = impl_->network.score(impl_->forward(pack, sites, nullptr), pack, false);
    each_scored(batch, pack,
                [&](std::size_t i, std::size_t t, std::size_t s) { logp[i][t] = scores.logp[s]; });
  }
  return logp;
}

double Trainer::accumulate(std::span<const Trajectory> batch, const TraceSource* trace,
                           const TokenLoss& loss) {
  double total = 0.0;
  for (const Pack& pack : impl_->cut(batch)) total += impl_->accumulate(batch, pack, trace, loss);
  return total;
}

Metrics Trainer::update() {
  Impl& t = *impl_;
  sum_gradients(t.parameters, t.comm);
  const double norm = gradient_norm(t.parameters);
  if (!std::isfinite(norm)) {
    throw Error("the gradient of update " + std::to_string(t.updates) +
                " is not finite; lower the learning rate or look for a loss that is not");
  }
  const double limit = t.options.max_grad_norm;
  const double scale = limit > 0.0 && norm > limit ? limit / norm : 1.0;
  adamw(t.parameters, t.options, t.updates, scale);
  std::ranges::fill(t.parameters.grads.all(), 0.0f);

  Metrics metrics = t.tally.metrics(t.comm);
  metrics["actor/grad_norm"] = norm;
  metrics["actor/lr"] = learning_rate(t.options, t.updates);
  t.tally = {};
  ++t.updates;
  t.parameters.refresh();
  return metrics;
}

const WeightSource& Trainer::weights() const { return *impl_->source; }

WeightSink& Trainer::initial_weights() { return *impl_->sink; }

void Trainer::save(const std::filesystem::path& folder) const {
  if (impl_->comm.rank() != 0) return;
  std::filesystem::create_directories(folder);
  write_state(folder / kStateFile, impl_->parameters, impl_->updates);
}

void Trainer::load(const std::filesystem::path& folder) {
  Impl& t = *impl_;
  const std::int64_t updates = read_state(folder / kStateFile, t.parameters);
  std::ranges::fill(t.parameters.grads.all(), 0.0f);
  t.tally = {};
  t.updates = updates;
  t.parameters.refresh();
  t.ready = true;
}

}  // namespace lockstep::train
