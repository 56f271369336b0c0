#include "instruments/decompose.h"

#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/text.h"
#include "device/comm.h"
#include "rl/distribution.h"
#include "store/store.h"
#include "sync/refit.h"

namespace lockstep::instruments {
namespace {

bool quantizes(const Quantizer& rule) { return rule.element != Element::kBf16; }

/// Is there anything to switch on?
bool has(const Contract& contract, Part part) {
  switch (part) {
    case Part::kEngine:
    case Part::kRouting: return true;
    case Part::kWeights: return quantizes(contract.weight);
    case Part::kActivations: return quantizes(contract.activation);
    case Part::kExperts: return quantizes(contract.weight) && quantizes(contract.activation);
    case Part::kK: return quantizes(contract.k);
    case Part::kV: return quantizes(contract.v);
    case Part::kKv: return quantizes(contract.k) && quantizes(contract.v);
    case Part::kAll:
      return quantizes(contract.weight) || quantizes(contract.activation) ||
             quantizes(contract.k) || quantizes(contract.v);
  }
  return false;
}

LayerSet common(const LayerSet& a, const LayerSet& b) {
  LayerSet out;
  for (std::size_t i = 0; i < out.bits.size(); ++i) out.bits[i] = a.bits[i] & b.bits[i];
  return out;
}

PartGap measure(const DecomposeArgs& args, const Restricted& r) {
  const std::unique_ptr<Comm> comm = Comm::single();
  const bool follows =
      r.agreement.guide.mode != Guidance::kOwnScale || r.agreement.guide.replay_experts;
  store::Store store({.ram_bytes = std::numeric_limits<std::int64_t>::max() / 4,
                      .run = r.agreement.seed,
                      .contract = r.agreement.contract.id()});
  std::vector<Trajectory> read;
  {
    rollout::Engine engine(r.agreement, r.rollout, args.device, follows ? &store : nullptr, *comm);
    sync::refit(args.weights, engine.weights(), r.agreement.contract, WeightVersion{0});
    read = engine.rescore(args.batch);
  }
  train::Trainer trainer(r.agreement, r.qat, args.trainer, args.device, *comm);
  WeightSink& masters = trainer.initial_weights();
  masters.begin(WeightVersion{0}, contracts::bf16().id());
  args.weights.each([&](const Weight& weight) { masters.put(weight); });
  masters.commit();
  const PerToken logp = trainer.logprobs(read, follows ? &store : nullptr);

  rl::Distribution gap;
  for (std::size_t i = 0; i < read.size(); ++i) {
    for (std::size_t t = 0; t < read[i].tokens.size(); ++t) {
      const double a = logp[i][t], b = read[i].rollout_logp[t];
      if (read[i].response_mask[t] != 0 && std::isfinite(a) && std::isfinite(b)) {
        gap.add(std::abs(a - b));
      }
    }
  }
  return {.there = gap.count() > 0,
          .mean = gap.mean(),
          .median = gap.quantile(0.5),
          .p99 = gap.quantile(0.99),
          .largest = gap.largest(),
          .tokens = gap.count(),
          .why = gap.count() > 0 ? "" : "no token was chosen by the policy"};
}

}  // namespace

Restricted restricted(const DecomposeArgs& args, Part part, const LayerSet& layers) {
  Restricted r{args.agreement, args.qat, args.rollout};
  if (part == Part::kAll && layers == args.agreement.contract.layers) return r;
  const bool all = part == Part::kAll;
  const bool experts = all || part == Part::kExperts;
  const bool weights = experts || part == Part::kWeights,
             activations = experts || part == Part::kActivations,
             k = all || part == Part::kK || part == Part::kKv,
             v = all || part == Part::kV || part == Part::kKv;
  Contract& contract = r.agreement.contract;
  if (!weights) contract.weight = Quantizer{};
  if (!activations) contract.activation = Quantizer{};
  if (!k) contract.k = Quantizer{};
  if (!v) contract.v = Quantizer{};
  if (!k && !v) contract.kv_exponents.clear();
  const bool any = weights || activations || k || v;
  contract.layers = any ? layers : LayerSet{};
  if (!any) contract = contracts::bf16();
  r.qat.weights &= weights;
  r.qat.activations &= activations;
  r.qat.k &= k;
  r.qat.v &= v;
  if (!experts) {
    r.qat.real_product = false;
    r.qat.residual_alpha = 0;
    r.qat.residual_sites = {};
    r.rollout.residual = rollout::Residual::kNone;
  }

  Guide& guide = r.agreement.guide;
  guide.layers = common(guide.layers, contract.layers);
  if (guide.kv_layers) guide.kv_layers = common(*guide.kv_layers, contract.layers);
  unsigned sites = 0;
  for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV}) {
    const bool on = site == Site::kK ? k : site == Site::kV ? v : activations;
    if (on && guide.sites.has(site) && guide.layers_of(site) != LayerSet{})
      sites |= SiteSet{site}.bits;
  }
  guide.sites.bits = static_cast<std::uint8_t>(sites);
  if (guide.sites.bits == 0) {
    guide.mode = Guidance::kOwnScale;
    guide.layers = {};
    guide.kv_layers.reset();
  }
  guide.audit_every = 0;
  if (part == Part::kRouting) guide.replay_experts = false;
  return r;
}

std::vector<PartGap> decompose(const DecomposeArgs& args,
                               const std::function<void(const PartGap&)>& each) {
  std::vector<PartGap> gaps;
  const auto add = [&](Part part, std::int32_t layer, const LayerSet& layers) {
    if (!has(args.agreement.contract, part)) return;
    PartGap gap;
    try {
      gap = measure(args, restricted(args, part, layers));
    } catch (const Error& error) {
      gap.why = error.what();
    }
    gap.part = part;
    gap.layer = layer;
    gaps.push_back(gap);
    each(gap);
  };
  const LayerSet& layers = args.agreement.contract.layers;
  for (const Part part : kParts) add(part, -1, layers);
  for (std::int32_t l = 0; args.by_layer && l < args.agreement.model.num_layers; ++l) {
    if (!layers.has(Layer{l})) continue;
    for (const Part part : {Part::kWeights, Part::kActivations, Part::kK, Part::kV}) {
      add(part, l, LayerSet::range(l, l + 1));
    }
  }
  return gaps;
}

Metrics metrics_of(std::span<const PartGap> gaps) {
  Metrics metrics;
  for (const PartGap& gap : gaps) {
    if (!gap.there) continue;
    const std::string name = name_of(gap.part);
    metrics[gap.layer < 0 ? "fp4/decomposition/" + name
                          : cat({"fp4/decomposition_layer/", name, "/layer_", gap.layer})] =
        gap.mean;
  }
  return metrics;
}

}  // namespace lockstep::instruments
