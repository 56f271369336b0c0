// The claim behind rl/ without torch: handing the closed-form derivative to backward() gives the
// gradient that autograd gets from the same loss written in tensors.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/torch.h"
#include "rl/objective.h"

namespace lockstep {
namespace {

constexpr int kT = 64, kV = 32, kG = 4;

at::Tensor token_logp(const at::Tensor& logits, const at::Tensor& tokens) {
  return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1);
}

std::vector<float> floats(const at::Tensor& t) {
  const at::Tensor c = t.contiguous();
  return {c.const_data_ptr<float>(), c.const_data_ptr<float>() + c.numel()};
}

/// Four samples of one prompt; sample i has 16 (i + 1) response tokens.
struct Case {
  Case() {
    torch::manual_seed(0);
    const at::Tensor tokens = torch::randint(kV, {kG, kT}, torch::kLong);
    logits = torch::randn({kG, kT, kV}).set_requires_grad(true);
    now = token_logp(logits, tokens);
    old = (now + 0.3 * torch::randn({kG, kT})).detach();
    rolled = (old + 0.2 * torch::randn({kG, kT})).detach();
    reference = (old + 0.2 * torch::randn({kG, kT})).detach();
    mask = torch::zeros({kG, kT});
    for (int i = 0; i < kG; ++i) {
      mask[i].slice(0, 0, 16 * (i + 1)).fill_(1);
      Trajectory t;
      t.tokens.resize(kT);
      for (const float m : floats(mask[i])) t.response_mask.push_back(m != 0);
      t.rollout_logp = floats(rolled[i]);
      trajectories.push_back(std::move(t));
      old_logp.push_back(floats(old[i]));
      reference_logp.push_back(floats(reference[i]));
    }
    const at::Tensor r = torch::tensor({1.0f, 0.0f, 0.0f, 0.5f});
    advantage = ((r - r.mean()) / (r.std() + 1e-6)).unsqueeze(1);
    rewards = floats(r);
  }

  at::Tensor aggregate(const at::Tensor& loss, rl::Aggregation aggregation, double length) const {
    const at::Tensor masked = loss * mask;
    switch (aggregation) {
      case rl::Aggregation::kTokenMean: return masked.sum() / mask.sum();
      case rl::Aggregation::kSeqMeanTokenMean: return (masked.sum(1) / mask.sum(1)).mean();
      case rl::Aggregation::kSeqMeanTokenSum: return (masked.sum(1) / length).mean();
    }
    return {};
  }

  at::Tensor logits, now, old, rolled, reference, mask, advantage;
  std::vector<Trajectory> trajectories;
  std::vector<float> rewards;
  PerToken old_logp, reference_logp;
};

/// Compares loss and gradient of our objective with those of `reference`.
void expect_same(Case& c, const rl::Options& options, const at::Tensor& reference,
                 const PerToken& old_logp, double value) {
  const auto comm = Comm::single();
  rl::Objective objective(options,
                          {.trajectories = c.trajectories,
                           .rewards = c.rewards,
                           .old_logp = old_logp,
                           .reference_logp = c.reference_logp,
                           .group_size = kG},
                          *comm);
  std::vector<float> slope(kG * kT);
  double loss = 0;
  for (std::size_t i = 0; i < kG; ++i) {
    loss += objective(i, floats(c.now[static_cast<int>(i)]), std::span(slope).subspan(i * kT, kT));
  }
  c.now.backward(torch::from_blob(slope.data(), {kG, kT}), /*retain_graph=*/true);
  const at::Tensor ours = c.logits.grad().clone();
  c.logits.mutable_grad().zero_();
  reference.backward({}, /*retain_graph=*/true);
  const at::Tensor theirs = c.logits.grad().clone();
  c.logits.mutable_grad().zero_();

  EXPECT_NEAR(loss, value, 1e-6);
  EXPECT_TRUE(torch::allclose(ours, theirs, /*rtol=*/1e-4, /*atol=*/1e-8))
      << (ours - theirs).abs().max().item<double>();
  EXPECT_GT(ours.abs().max().item<double>(), 1e-4);
}

class Autograd : public testing::TestWithParam<rl::Aggregation> {};

TEST_P(Autograd, DecoupledWithTis) {
  Case c;
  const at::Tensor w = (c.old - c.rolled).exp().clamp_max(1.25);
  const at::Tensor r = (c.now - c.old).exp();
  const at::Tensor pg = torch::max(-r * c.advantage, -r.clamp(0.8, 1.27) * c.advantage);
  const at::Tensor loss = c.aggregate(w * pg, GetParam(), 40);
  expect_same(c, {.correction_cap = 1.25f, .aggregation = GetParam(), .sum_length = 40}, loss,
              c.old_logp, loss.item<double>());
}

TEST_P(Autograd, Bypass) {
  Case c;
  PerToken rolled;
  for (const Trajectory& t : c.trajectories) rolled.push_back(t.rollout_logp);
  const at::Tensor r = (c.now - c.rolled).exp();
  const at::Tensor pg = torch::max(-r * c.advantage, -r.clamp(0.8, 1.27) * c.advantage);
  const at::Tensor loss = c.aggregate(pg, GetParam(), 40);
  expect_same(c,
              {.correction = rl::Correction::kNone,
               .bypass = true,
               .aggregation = GetParam(),
               .sum_length = 40},
              loss, rolled, loss.item<double>());
}

TEST_P(Autograd, KlOfValueK3AndGradientK2) {
  Case c;
  const at::Tensor r = (c.now - c.old).exp();
  const at::Tensor pg = torch::max(-r * c.advantage, -r.clamp(0.8, 1.27) * c.advantage);
  const at::Tensor x = c.now - c.reference;
  const at::Tensor k2 = x * x / 2, k3 = (-x).exp() - 1 + x;
  expect_same(c,
              {.correction = rl::Correction::kNone,
               .aggregation = GetParam(),
               .sum_length = 40,
               .kl_weight = 0.1f},
              c.aggregate(pg + 0.1 * k2, GetParam(), 40), c.old_logp,
              c.aggregate(pg + 0.1 * k3, GetParam(), 40).item<double>());
}

TEST_P(Autograd, DualClip) {
  Case c;
  const at::Tensor r = (c.now - c.old).exp();
  at::Tensor pg = torch::max(-r * c.advantage, -r.clamp(0.8, 1.27) * c.advantage);
  pg = torch::where(c.advantage < 0, torch::min(pg, -1.4 * c.advantage), pg);
  const at::Tensor loss = c.aggregate(pg, GetParam(), 40);
  expect_same(c,
              {.dual_clip = 1.4f,
               .correction = rl::Correction::kNone,
               .aggregation = GetParam(),
               .sum_length = 40},
              loss, c.old_logp, loss.item<double>());
}

TEST_P(Autograd, Gspo) {
  Case c;
  const at::Tensor log_r = (c.now - c.old) * c.mask;
  const at::Tensor mean = (log_r.sum(1) / c.mask.sum(1)).unsqueeze(1).expand({kG, kT});
  const at::Tensor s = (mean.detach() + c.now - c.now.detach()).exp();
  const at::Tensor pg = torch::max(-s * c.advantage, -s.clamp(0.97, 1.02) * c.advantage);
  const at::Tensor loss = c.aggregate(pg, GetParam(), 40);
  expect_same(c,
              {.surrogate = rl::Surrogate::kGspo,
               .clip_low = 0.03f,
               .clip_high = 0.02f,
               .correction = rl::Correction::kNone,
               .aggregation = GetParam(),
               .sum_length = 40},
              loss, c.old_logp, loss.item<double>());
}

TEST_P(Autograd, Cispo) {
  Case c;
  const at::Tensor r = (c.now - c.old).exp().clamp(0.8, 1.27).detach();
  const at::Tensor loss = c.aggregate(-r * c.advantage * c.now, GetParam(), 40);
  expect_same(c,
              {.surrogate = rl::Surrogate::kCispo,
               .correction = rl::Correction::kNone,
               .aggregation = GetParam(),
               .sum_length = 40},
              loss, c.old_logp, loss.item<double>());
}

TEST_P(Autograd, Tbpo) {
  Case c;
  const at::Tensor log_r = (c.now - c.old) * c.mask;
  const at::Tensor mean = (log_r.sum(1) / c.mask.sum(1)).unsqueeze(1).expand({kG, kT});
  const at::Tensor s = (mean.detach() + c.now - c.now.detach()).exp();
  const at::Tensor clipped = torch::max(-s * c.advantage, -s.clamp(0.8, 1.27) * c.advantage);
  const at::Tensor band = (s > 0.8) & (s < 1.27);
  const at::Tensor pg = torch::where(c.advantage >= 0, clipped,
                                     torch::where(band, -s * c.advantage, torch::zeros_like(s)));
  const at::Tensor loss = c.aggregate(pg, GetParam(), 40);
  expect_same(c,
              {.surrogate = rl::Surrogate::kTbpo,
               .correction = rl::Correction::kNone,
               .aggregation = GetParam(),
               .sum_length = 40},
              loss, c.old_logp, loss.item<double>());
}

TEST_P(Autograd, AcrUnderTis) {
  Case c;
  const double cap = 1.1;
  const at::Tensor rho = (c.old - c.rolled).exp();
  const at::Tensor r = (c.now - c.old).exp();
  const at::Tensor upper = 1.27 / (cap / rho).clamp_max(1.0);
  const at::Tensor clipped = torch::min(r.clamp_min(0.8), upper);
  const at::Tensor pg = torch::max(-r * c.advantage, -clipped * c.advantage);
  const at::Tensor loss = c.aggregate(rho.clamp_max(cap) * pg, GetParam(), 40);
  expect_same(c,
              {.surrogate = rl::Surrogate::kAcr,
               .correction_cap = 1.1f,
               .aggregation = GetParam(),
               .sum_length = 40},
              loss, c.old_logp, loss.item<double>());
}

TEST_P(Autograd, EveryKlEstimatorOnAndOffPolicy) {
  for (const auto kl : {rl::Kl::kK1, rl::Kl::kK2, rl::Kl::kK3}) {
    for (const bool off_policy : {false, true}) {
      Case c;
      const at::Tensor r = (c.now - c.old).exp();
      const at::Tensor pg = torch::max(-r * c.advantage, -r.clamp(0.8, 1.27) * c.advantage);
      const at::Tensor x = c.now - c.reference;
      at::Tensor k = kl == rl::Kl::kK1 ? x : kl == rl::Kl::kK2 ? x * x / 2 : (-x).exp() - 1 + x;
      if (off_policy) k = (c.now - c.rolled).exp() * k;
      const at::Tensor loss = c.aggregate(pg + 0.1 * k, GetParam(), 40);
      expect_same(c,
                  {.correction = rl::Correction::kNone,
                   .aggregation = GetParam(),
                   .sum_length = 40,
                   .kl_weight = 0.1f,
                   .kl = kl,
                   .kl_off_policy = off_policy},
                  loss, c.old_logp, loss.item<double>());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Aggregations, Autograd,
                         testing::Values(rl::Aggregation::kTokenMean,
                                         rl::Aggregation::kSeqMeanTokenMean,
                                         rl::Aggregation::kSeqMeanTokenSum));

}  // namespace
}  // namespace lockstep
