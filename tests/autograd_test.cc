// The claim behind rl/ without torch: handing the closed-form derivative to backward() gives the
// gradient that autograd gets from the same loss written in tensors.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "rl/objective.h"
#include "rl/surrogate.h"

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

TEST_P(Autograd, ScoreCentering) {
  constexpr int kTop = 8;
  constexpr double kCap = 1.5;
  Case c;
  // The rollout's policy is near the trainer's; the head is its likeliest quarter.
  const at::Tensor all = c.logits.log_softmax(-1);
  const at::Tensor rollout =
      (c.logits + 0.5 * torch::randn_like(c.logits)).log_softmax(-1).detach();
  const auto [q_top, head] = rollout.topk(kTop, -1);
  const at::Tensor top = all.gather(-1, head);
  for (int i = 0; i < kG; ++i) {
    Trajectory& t = c.trajectories[static_cast<std::size_t>(i)];
    t.top_logp = floats(q_top[i]);
    for (const float token : floats(head[i].to(at::kFloat))) {
      t.top_tokens.push_back(static_cast<Token>(token));
    }
  }
  const at::Tensor p = top.exp(), q = q_top.exp();
  const at::Tensor tail = (1 - q.sum(-1, true)) / (1 - p.sum(-1, true));
  const at::Tensor alpha = (kCap * tail).clamp_max(1);
  const at::Tensor center = (torch::min(p, kCap * q) - alpha * p).detach();
  const at::Tensor weight = (c.now - c.rolled).exp().clamp_max(kCap).detach();
  const at::Tensor loss =
      c.aggregate(-c.advantage * (weight * c.now - (center * top).sum(-1)), GetParam(), 40);

  const auto comm = Comm::single();
  rl::Objective objective({.surrogate = rl::Surrogate::kScoreCentering,
                           .correction = rl::Correction::kNone,
                           .correction_cap = kCap,
                           .aggregation = GetParam(),
                           .sum_length = 40},
                          {.trajectories = c.trajectories,
                           .rewards = c.rewards,
                           .old_logp = c.old_logp,
                           .group_size = kG},
                          *comm);
  std::vector<float> slope(kG * kT), top_slope(kG * kT * kTop);
  double value = 0;
  for (std::size_t i = 0; i < kG; ++i) {
    const std::vector<float> now = floats(c.now[static_cast<int>(i)]);
    const std::vector<float> tops = floats(top[static_cast<int>(i)]);
    value += objective(i, {now, tops},
                       {std::span(slope).subspan(i * kT, kT),
                        std::span(top_slope).subspan(i * kT * kTop, kT * kTop)});
  }
  EXPECT_NEAR(value, loss.item<double>(), 1e-6);
  ((c.now * torch::from_blob(slope.data(), {kG, kT})).sum() +
   (top * torch::from_blob(top_slope.data(), {kG, kT, kTop})).sum())
      .backward({}, /*retain_graph=*/true);
  const at::Tensor ours = c.logits.grad().clone();
  c.logits.mutable_grad().zero_();
  loss.backward();
  EXPECT_TRUE(torch::allclose(ours, c.logits.grad(), 1e-4, 1e-8));
  EXPECT_GT(ours.abs().max().item<double>(), 1e-4);
}

TEST(ScoreCentering, ScoresHaveNoMeanUnderTheRollout) {
  // Over all tokens y of the vocabulary, q_y times the gradient of their terms is zero where the
  // head is everything; without the centre it is not.
  torch::manual_seed(1);
  const at::Tensor logits = torch::randn({kV}).set_requires_grad(true);
  const at::Tensor log_p = logits.log_softmax(-1);
  const at::Tensor log_q = (logits.detach() + torch::randn({kV})).log_softmax(-1);
  const std::vector<float> p = floats(log_p), q = floats(log_q);
  for (const bool centred : {true, false}) {
    std::vector<float> slope(kV), top(kV);
    for (std::size_t y = 0; y < kV; ++y) {
      std::vector<float> dtop(kV);
      const double mass = std::exp(q[y]);
      const rl::Term term = rl::centered_score(1.2, mass, p[y], q[y], {p, q}, dtop);
      slope[y] += static_cast<float>(term.slope);
      for (std::size_t v = 0; centred && v < kV; ++v) slope[v] += dtop[v];
    }
    if (logits.grad().defined()) logits.mutable_grad().zero_();
    log_p.backward(torch::from_blob(slope.data(), {kV}), /*retain_graph=*/true);
    const double most = logits.grad().abs().max().item<double>();
    if (centred) {
      EXPECT_LT(most, 1e-6);
    } else {
      EXPECT_GT(most, 1e-3);
    }
  }
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
