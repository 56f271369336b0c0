#include "instruments/decompose.h"

#include <gtest/gtest.h>

#include <map>

#include "tiny_fixture.h"

namespace lockstep::instruments {
namespace {

class Decompose : public TinyFixture {
 protected:
  Decompose() {
    agreement_.guide.replay_experts = true;
    Trajectory t;
    t.tokens = text_;
    t.response_mask.assign(text_.size(), 1);
    t.response_mask[0] = 0;
    batch_ = {t};
  }

  std::map<std::string, PartGap> run(bool by_layer = false) {
    std::map<std::string, PartGap> by_name;
    const DecomposeArgs args{agreement_,  qat_,   rollout_, {.bf16 = false},
                             checkpoint_, batch_, by_layer};
    for (const PartGap& gap : decompose(args, [](const PartGap&) {})) {
      by_name[name_of(gap.part) + (gap.layer < 0 ? "" : std::to_string(gap.layer))] = gap;
    }
    return by_name;
  }

  train::Qat qat_;
  rollout::Options rollout_;
  std::vector<Trajectory> batch_;
};

// R92: attribution of the gap by weights, activations, cache and routing on a fixed batch.
TEST_F(Decompose, R92_EachPartAloneAndAllTogether) {
  const auto naive = run();
  for (const char* part :
       {"engine", "routing", "weights", "activations", "experts", "k", "v", "kv", "all"}) {
    ASSERT_TRUE(naive.at(part).there) << part << ": " << naive.at(part).why;
    EXPECT_EQ(naive.at(part).tokens, static_cast<double>(batch_[0].tokens.size() - 1));
  }
  // Whatever the rollout alone quantizes adds to what the engines differ by; together it is most.
  for (const char* part : {"weights", "activations", "k", "v", "kv"}) {
    EXPECT_GT(naive.at(part).mean, 3 * naive.at("engine").mean) << part;
  }
  EXPECT_GT(naive.at("all").mean, naive.at("weights").mean);

  // A trainer that imitates the weights has their part down at the engines' own.
  qat_ = {.weights = true};
  const auto w4a16 = run();
  EXPECT_LT(w4a16.at("weights").mean, naive.at("weights").mean / 3);
  EXPECT_EQ(w4a16.at("activations").mean, naive.at("activations").mean);
  EXPECT_EQ(w4a16.at("engine").mean, naive.at("engine").mean);
}

TEST_F(Decompose, TheSecondPassStandsWhereWeightsAndActivationsDo) {
  qat_ = {.weights = true, .activations = true, .k = true, .v = true, .residual_alpha = 0.5f};
  qat_.residual_sites = {Site::kW13In};
  rollout_.residual = rollout::Residual::kDense;
  rollout_.residual_alpha = 0.5f;
  const DecomposeArgs args{agreement_, qat_, rollout_, {}, checkpoint_, batch_};
  const LayerSet all = agreement_.contract.layers;
  for (const Part part : {Part::kExperts, Part::kAll}) {
    const Restricted r = restricted(args, part, all);
    EXPECT_EQ(r.rollout.residual, rollout::Residual::kDense);
    EXPECT_EQ(r.qat.residual_alpha, 0.5f);
    EXPECT_TRUE(r.qat.residual_sites.has(Site::kW13In));
  }
  for (const Part part : {Part::kWeights, Part::kActivations, Part::kKv, Part::kEngine}) {
    const Restricted r = restricted(args, part, all);
    EXPECT_EQ(r.rollout.residual, rollout::Residual::kNone);
    EXPECT_EQ(r.qat.residual_alpha, 0);
  }
  // On both sides it takes from the experts' part of an unguided trainer.
  const double with = run().at("experts").mean;
  qat_ = {.weights = true};
  rollout_.residual = rollout::Residual::kNone;
  EXPECT_LT(with, run().at("experts").mean);
}

TEST_F(Decompose, ALayerAtATimeIsLessThanAll) {
  const auto gaps = run(true);
  const Metrics metrics = metrics_of(std::vector<PartGap>{gaps.at("kv"), gaps.at("v3")});
  EXPECT_EQ(metrics.at("fp4/decomposition/kv"), gaps.at("kv").mean);
  EXPECT_EQ(metrics.at("fp4/decomposition_layer/v/layer_3"), gaps.at("v3").mean);
  for (std::int32_t l = 0; l < agreement_.model.num_layers; ++l) {
    const PartGap& one = gaps.at("activations" + std::to_string(l));
    ASSERT_TRUE(one.there) << one.why;
    EXPECT_GT(one.mean, 0);
    EXPECT_LT(one.mean, gaps.at("all").mean);
  }
}

TEST_F(Decompose, APartFollowsItsOwnRecordsOnly) {
  qat_ = {.weights = true, .activations = true, .k = true, .v = true};
  agreement_.guide.mode = Guidance::kLsb;
  agreement_.guide.sites = {Site::kW13In, Site::kK};
  agreement_.guide.layers = LayerSet::range(3, 6);
  const DecomposeArgs args{agreement_, qat_, rollout_, {}, checkpoint_, batch_};
  const LayerSet all = agreement_.contract.layers;

  const Restricted v = restricted(args, Part::kV, all);
  EXPECT_EQ(v.agreement.guide.mode, Guidance::kOwnScale);
  EXPECT_TRUE(v.qat.v && !v.qat.k && !v.qat.weights);
  const Restricted k = restricted(args, Part::kK, all);
  EXPECT_EQ(k.agreement.guide.mode, Guidance::kLsb);
  EXPECT_EQ(k.agreement.guide.sites.bits, SiteSet{Site::kK}.bits);
  EXPECT_EQ(k.agreement.guide.layers, agreement_.guide.layers);
  const Restricted early = restricted(args, Part::kActivations, LayerSet::range(1, 2));
  EXPECT_EQ(early.agreement.guide.mode, Guidance::kOwnScale);
  agreement_.guide.kv_layers = LayerSet::range(5, 6);
  const DecomposeArgs apart{agreement_, qat_, rollout_, {}, checkpoint_, batch_};
  EXPECT_EQ(restricted(apart, Part::kK, LayerSet::range(3, 5)).agreement.guide.mode,
            Guidance::kOwnScale);
  EXPECT_EQ(restricted(apart, Part::kK, all).agreement.guide.kv_layers, LayerSet::range(5, 6));
  agreement_.guide.kv_layers.reset();
  const Restricted engine = restricted(args, Part::kEngine, all);
  EXPECT_EQ(engine.agreement.contract.id(), contracts::bf16().id());
  EXPECT_TRUE(engine.agreement.guide.replay_experts);
  EXPECT_FALSE(restricted(args, Part::kRouting, all).agreement.guide.replay_experts);
}

}  // namespace
}  // namespace lockstep::instruments
