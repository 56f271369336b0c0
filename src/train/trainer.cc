#include "train/trainer.h"

#include <ATen/Parallel.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "ops/device.h"
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
          .fp4_experts = qat.weights && agreement.contract.weight.quantizes(),
          .bf16 = options.bf16,
          .codes = qat.real_product};
}

/// Passes are spread over lanes: each has gradients of its own and computes on one thread, so that
/// no thread waits for another within a layer. The lanes' sums are added in order. Their number
/// follows from the model's size alone, so that the number of threads changes no bit. On a CUDA
/// device there is one.
struct Lane {
  Lane(const ModelConfig& config, const Parameters& parameters, const ops::RopeTable& rope,
       bool bf16)
      : grads(parameters.size(), parameters.device(), ops::stream_on(parameters.device())),
        network(config, parameters, grads, rope, bf16),
        tally(config.num_layers) {}

  Floats grads;
  Network network;
  Tally tally;
};

constexpr std::int64_t kMaxLanes = 8;
constexpr std::int64_t kMinPass = 1024;                          // tokens
constexpr std::int64_t kMaxLaneNumbers = std::int64_t{1} << 28;  // of gradients, over all lanes

}  // namespace

struct Trainer::Impl {
  Impl(const Agreement& a, const Qat& q, const Options& o, Device device, Comm& c)
      : agreement(a),
        qat(q),
        options(o),
        comm(c),
        parameters(a.model, numbers(a, q, o), device, ops::stream_on(device)),
        rope(a.model.max_positions, a.model.head_dim, a.model.rope_theta, device),
        source(masters_source(parameters, [this] { return stream(); })),
        sink(masters_sink(parameters, [this] { restart(); })) {
    const std::int64_t fit = device.kind == Device::Kind::kCpu
                                 ? kMaxLaneNumbers / std::max<std::int64_t>(parameters.size(), 1)
                                 : 1;
    for (std::int64_t i = 0; i < std::clamp<std::int64_t>(fit, 1, kMaxLanes); ++i) {
      lanes.push_back(std::make_unique<Lane>(agreement.model, parameters, rope, o.bf16));
    }
    limit_memory();
  }

  std::int64_t own_bytes() const { return parameters.bytes() + lanes[0]->grads.bytes(); }

  void limit_memory() const {
    const std::int64_t all = options.memory_bytes;
    if (parameters.device().kind == Device::Kind::kCpu) return;
    const std::int64_t own = own_bytes();
    if (all > 0 && all <= own) {
      throw Error(
          cat({"trainer.memory is ", all, " bytes, and weights, gradients and moments take ", own,
               " of it: raise it"}));
    }
    ops::limit_memory(parameters.device(), all > 0 ? all - own : -1);
  }

  /// As many passes as there are lanes, unless they would be very short or longer than allowed.
  std::vector<Pack> cut(std::span<const Trajectory> batch) const {
    std::size_t tokens = 0;
    for (const Trajectory& trajectory : batch) tokens += trajectory.tokens.size();
    const auto fair = static_cast<std::int64_t>(tokens / lanes.size() + 1);
    const std::int64_t limit =
        std::min<std::int64_t>(options.tokens_per_pass, std::max(fair, kMinPass));
    return pack(batch, {.tokens_per_pass = static_cast<std::int32_t>(limit),
                        .max_positions = agreement.model.max_positions,
                        .vocabulary = agreement.model.vocabulary});
  }

  /// In whose order the arrays are written and read: that of the ops.
  Stream stream() const { return ops::stream_on(parameters.device()); }

  void forget() {
    for (const auto& lane : lanes) {
      lane->grads.zero(stream());
      lane->tally = Tally(agreement.model.num_layers);
    }
    norms.clear();
  }

  void restart() {
    parameters.moment1.zero(stream());
    parameters.moment2.zero(stream());
    updates = 0;
    forget();
    parameters.refresh(stream());
    ready = true;
  }

  /// Calls body(lane, pass) for every pass; those of a lane one after the other. Torch's own
  /// threads rest where there is more than one lane.
  template <typename Body>
  void each_pass(std::size_t passes, Body&& body) const {
    at::set_num_threads(lanes.size() == 1 ? threads() : 1);
    const std::size_t count = lanes.size();
    if (count == 1) {
      for (std::size_t i = 0; i < passes; ++i) body(*lanes[0], i);
      return;
    }
    parallel_for(static_cast<std::int64_t>(std::min(count, passes)), 1,
                 [&](std::int64_t first, std::int64_t end) {
                   const InPlace in_place;
                   for (auto lane = static_cast<std::size_t>(first);
                        lane < static_cast<std::size_t>(end); ++lane) {
                     for (std::size_t i = lane; i < passes; i += count) body(*lanes[lane], i);
                   }
                 });
  }

  /// The sites of a pass after the other. Where passes do not run side by side, the records of the
  /// next are on their way while the device is still at work on this one.
  class NextSites {
   public:
    using Make = std::function<std::unique_ptr<Sites>(std::size_t pass)>;

    /// `make` may give null where nobody takes any.
    NextSites(const Impl& trainer, std::size_t passes, Make make)
        : device_(ops::torch_device(trainer.parameters.device())),
          most_bytes_(trainer.options.read_ahead_bytes),
          passes_(trainer.lanes.size() == 1 ? passes : 0),
          make_(std::move(make)) {}

    std::unique_ptr<Sites> take(std::size_t pass) {
      return pass == pass_ && sites_ != nullptr ? std::move(sites_) : made(pass);
    }
    void begin(std::size_t pass) {
      if (pass >= passes_) return;
      pass_ = pass;
      sites_ = made(pass);
    }

   private:
    std::unique_ptr<Sites> made(std::size_t pass) const {
      std::unique_ptr<Sites> sites = make_(pass);
      if (sites != nullptr) sites->read_ahead(device_, most_bytes_);
      return sites;
    }

    at::Device device_;
    std::int64_t most_bytes_;
    std::size_t passes_;
    Make make_;
    std::size_t pass_ = 0;
    std::unique_ptr<Sites> sites_;
  };

  Tensor forward(const Network& network, const Pack& pack, const Sites& sites,
                 std::vector<Step>* steps) const;
  void backward(const Network& network, const Pack& pack, const Sites& sites,
                std::vector<Step>& steps, Tensor dh) const;
  PerToken logprobs(std::span<const Trajectory> batch, const TraceSource* trace,
                    const Reveal& reveal, Routes* chosen) const;
  double accumulate(Lane& lane, std::span<const Trajectory> batch, const Pack& pack,
                    const Sites& sites, const TraceSource* trace, const TokenLoss& loss,
                    OwnRoutes own, const std::function<void()>& after_forward);
  void check(const Routes& routes, std::span<const Trajectory> batch) const;

  const Agreement agreement;
  const Qat qat;
  const Options options;
  Comm& comm;
  Parameters parameters;
  const ops::RopeTable rope;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::unique_ptr<WeightSource> source;
  std::unique_ptr<WeightSink> sink;
  std::mutex loss_mutex;
  std::vector<double> norms;  // of the gradients of the updates that metrics() has yet to tell of
  std::int64_t updates = 0;
  bool ready = false;
};

/// The residual stream behind the last layer. Fills `steps` where a backward pass will follow.
Tensor Trainer::Impl::forward(const Network& network, const Pack& pack, const Sites& sites,
                              std::vector<Step>* steps) const {
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

void Trainer::Impl::backward(const Network& network, const Pack& pack, const Sites& sites,
                             std::vector<Step>& steps, Tensor dh) const {
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

/// `each` numbers a token.
PerToken zeros(std::span<const Trajectory> batch, std::int64_t each = 1) {
  PerToken values;
  for (const Trajectory& trajectory : batch) {
    values.emplace_back(trajectory.tokens.size() * static_cast<std::size_t>(each), 0.0f);
  }
  return values;
}

/// A pass allocates and frees what it allocated the pass before. Without this glibc gives large
/// pieces back to the system each time, and takes them again page by page: a seventh of the time.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
#endif
}

void require_weights(bool ready) {
  if (!ready) throw Error("the trainer has no weights yet: load a checkpoint first");
}

/// What preflight asks of a recipe, of those who build a trainer themselves.
void check_product(const Agreement& agreement, const Qat& qat, const Options& options) {
  if (!qat.real_product) return;
  const SiteSet guided = agreement.guide.sites;
  if (!qat.weights || !qat.activations || !options.bf16 || qat.residual_alpha != 0.0f ||
      expert_product(agreement.contract) == ExpertProduct::kBf16 || guided.has(Site::kW13In) ||
      guided.has(Site::kW2In)) {
    throw Error(
        "qat.real_product multiplies the trainer's own codes, NVFP4's or MXFP4's, of weights and "
        "activations in BF16: nothing else may be quantized, guided or compensated there");
  }
}

void check(const Agreement& agreement, const Options& options, Device device) {
  require_runs(device);
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

void require_runs(Device device) { ops::prepare_torch(device); }

double Trainer::Impl::accumulate(Lane& lane, std::span<const Trajectory> batch, const Pack& pack,
                                 const Sites& sites, const TraceSource* trace,
                                 const TokenLoss& loss, OwnRoutes own,
                                 const std::function<void()>& after_forward) {
  std::vector<Step> steps;
  const Tensor h = forward(lane.network, pack, sites, &steps);
  // While a device is still at work on that.
  sites.fetch();
  after_forward();
  // What is computed again was counted the first time.
  std::optional<Sites> again;
  if (options.recompute) again.emplace(agreement, qat, pack, trace, nullptr, Reveal{}, own);
  const Scores scores = lane.network.score(h, pack, true);
  lane.tally.entropy += scores.entropy;
  lane.tally.scored += static_cast<std::int64_t>(scores.logp.size());

  const std::span<const Trajectory> members = batch.subspan(pack.first, pack.start.size());
  PerToken logp = zeros(members);
  PerToken dlogp = zeros(members);
  const auto k = static_cast<std::ptrdiff_t>(pack.top);
  PerToken top_logp = zeros(members, pack.top), dtop_logp = top_logp;
  const auto row = [k](auto& values, std::size_t at) {
    return values.begin() + static_cast<std::ptrdiff_t>(at) * k;
  };
  each_scored(batch, pack, [&](std::size_t i, std::size_t t, std::size_t s) {
    logp[i - pack.first][t] = scores.logp[s];
    std::copy_n(row(scores.top_logp, s), k, row(top_logp[i - pack.first], t));
  });
  double total = 0.0;
  {
    // A loss is called from one thread at a time, whatever it is.
    const std::lock_guard lock(loss_mutex);
    for (std::size_t i = 0; i < members.size(); ++i) {
      total += loss(pack.first + i, {logp[i], top_logp[i]}, {dlogp[i], dtop_logp[i]});
    }
  }
  sites.settle();
  if (scores.logp.empty()) return total;

  std::vector<float> upstream(scores.logp.size()), top_upstream(scores.top_logp.size());
  each_scored(batch, pack, [&](std::size_t i, std::size_t t, std::size_t s) {
    upstream[s] = dlogp[i - pack.first][t];
    std::copy_n(row(dtop_logp[i - pack.first], t), k, row(top_upstream, s));
  });
  backward(lane.network, pack, again ? *again : sites, steps,
           lane.network.score_backward(scores, pack, upstream, top_upstream));
  return total;
}

Trainer::Trainer(const Agreement& agreement, const Qat& qat, const Options& options, Device device,
                 Comm& comm) {
  check(agreement, options, device);
  check_product(agreement, qat, options);
  keep_freed_memory();
  impl_ = std::make_unique<Impl>(agreement, qat, options, device, comm);
}

Trainer::~Trainer() = default;

PerToken Trainer::logprobs(std::span<const Trajectory> batch, const TraceSource* trace,
                           Routes* chosen) const {
  return impl_->logprobs(batch, trace, {}, chosen);
}

PerToken Trainer::reveal(std::span<const Trajectory> batch, const TraceSource* trace,
                         TraceSink& dump) const {
  std::mutex mutex;
  return impl_->logprobs(batch, trace, {&dump, &mutex}, nullptr);
}

/// How many numbers a trajectory's row of Routes has.
std::size_t route_numbers(const ModelConfig& model, const Trajectory& t) {
  const std::size_t rows = t.tokens.empty() ? 0 : t.tokens.size() - 1;
  return rows * static_cast<std::size_t>(model.num_layers * model.experts_per_token);
}

void Trainer::Impl::check(const Routes& routes, std::span<const Trajectory> batch) const {
  if (routes.size() != batch.size()) {
    throw Error("there are routes of " + std::to_string(routes.size()) + " trajectories for " +
                std::to_string(batch.size()));
  }
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const std::size_t expected = route_numbers(agreement.model, batch[i]);
    if (!routes[i].empty() && routes[i].size() != expected) {
      throw Error("the routes of trajectory " + std::to_string(i) + " are " +
                  std::to_string(routes[i].size()) + " numbers, not " + std::to_string(expected));
    }
  }
}

PerToken Trainer::Impl::logprobs(std::span<const Trajectory> batch, const TraceSource* trace,
                                 const Reveal& reveal, Routes* chosen) const {
  PerToken logp = zeros(batch);
  if (chosen != nullptr) {
    chosen->assign(batch.size(), {});
    for (std::size_t i = 0; i < batch.size(); ++i) {
      (*chosen)[i].resize(route_numbers(agreement.model, batch[i]));
    }
  }
  const std::vector<Pack> packs = cut(batch);
  require_weights(ready);
  const auto wanted = [&](std::size_t p) {
    return !packs[p].scored_row.empty() || reveal.sink != nullptr;
  };
  NextSites next(*this, packs.size(), [&](std::size_t p) {
    return !wanted(p) ? nullptr
                      : std::make_unique<Sites>(agreement, qat, packs[p], trace, nullptr, reveal,
                                                OwnRoutes{.keep = chosen});
  });
  each_pass(packs.size(), [&](const Lane& lane, std::size_t p) {
    const Pack& pack = packs[p];
    if (!wanted(p)) return;
    const at::AutoGradMode none(false);
    const std::unique_ptr<Sites> sites = next.take(p);
    const Tensor h = forward(lane.network, pack, *sites, nullptr);
    next.begin(p + 1);
    const Scores scores = lane.network.score(h, pack, false);
    each_scored(batch, pack, [&](std::size_t i, std::size_t position, std::size_t s) {
      logp[i][position] = scores.logp[s];
    });
  });
  return logp;
}

double Trainer::accumulate(std::span<const Trajectory> batch, const TraceSource* trace,
                           const TokenLoss& loss, const Routes* routes) {
  Impl& t = *impl_;
  if (routes != nullptr) t.check(*routes, batch);
  const std::vector<Pack> packs = t.cut(batch);
  require_weights(t.ready);
  ops::begin_backward();
  std::vector<double> losses(packs.size());
  const OwnRoutes own = {.follow = routes};
  // Where passes run side by side, each has a tally of its own; else there is one.
  Impl::NextSites next(t, packs.size(), [&](std::size_t p) {
    Tally& tally = t.lanes[p % t.lanes.size()]->tally;
    return std::make_unique<Sites>(t.agreement, t.qat, packs[p], trace, &tally, Reveal{}, own);
  });
  t.each_pass(packs.size(), [&](Lane& lane, std::size_t p) {
    const std::unique_ptr<Sites> sites = next.take(p);
    losses[p] =
        t.accumulate(lane, batch, packs[p], *sites, trace, loss, own, [&] { next.begin(p + 1); });
  });
  return std::accumulate(losses.begin(), losses.end(), 0.0);
}

void Trainer::update() {
  Impl& t = *impl_;
  for (std::size_t i = 1; i < t.lanes.size(); ++i) add(t.lanes[0]->grads, t.lanes[i]->grads);
  const Floats& grads = t.lanes[0]->grads;
  sum_over_ranks(grads, t.comm);
  const double norm = norm_of(grads, t.stream());
  if (!std::isfinite(norm)) {
    throw Error("the gradient of update " + std::to_string(t.updates) +
                " is not finite; lower the learning rate or look for a loss that is not");
  }
  const double limit = t.options.max_grad_norm;
  const double scale = limit > 0.0 && norm > limit ? limit / norm : 1.0;
  adamw(t.parameters, grads, t.options, t.updates, scale, t.stream());
  for (const auto& lane : t.lanes) lane->grads.zero(t.stream());
  t.norms.push_back(norm);
  ++t.updates;
  t.parameters.refresh(t.stream());
}

void Trainer::rest(std::int64_t wanted) {
  const Device device = impl_->parameters.device();
  if (is_short_of_memory(device, wanted)) ops::empty_cache(device);
}

std::int64_t Trainer::may_take() const {
  const Impl& t = *impl_;
  if (t.options.memory_bytes == 0) return -1;
  const std::int64_t kept = ops::kept_memory(t.parameters.device());
  return std::max<std::int64_t>(t.options.memory_bytes - t.own_bytes() - kept, 0);
}

Metrics Trainer::metrics() {
  Impl& t = *impl_;
  Tally tally(t.agreement.model.num_layers);
  for (const auto& lane : t.lanes) {
    tally += lane->tally;
    lane->tally = Tally(t.agreement.model.num_layers);
  }
  Metrics metrics = tally.metrics(t.comm);
  const std::vector<double> norms = std::exchange(t.norms, {});
  if (norms.empty()) return metrics;
  metrics["actor/grad_norm"] =
      std::accumulate(norms.begin(), norms.end(), 0.0) / static_cast<double>(norms.size());
  metrics["actor/grad_norm/max"] = *std::ranges::max_element(norms);
  metrics["actor/lr"] = learning_rate(t.options, t.updates - 1);
  return metrics;
}

const WeightSource& Trainer::weights() const { return *impl_->source; }

WeightSink& Trainer::initial_weights() { return *impl_->sink; }

void Trainer::save(const std::filesystem::path& folder) const {
  if (impl_->comm.rank() != 0) return;
  std::filesystem::create_directories(folder);
  write_state(folder / kStateFile, impl_->parameters, impl_->updates, impl_->stream());
}

void Trainer::load(const std::filesystem::path& folder) {
  Impl& t = *impl_;
  const std::int64_t updates = read_state(folder / kStateFile, t.parameters, t.stream());
  t.forget();
  t.updates = updates;
  t.parameters.refresh(t.stream());
  t.ready = true;
}

}  // namespace lockstep::train
