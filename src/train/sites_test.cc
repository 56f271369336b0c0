#include "train/sites.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "numerics/bf16.h"
#include "ops/experts.h"
#include "train/testing.h"

namespace lockstep::train {
namespace {

using at::Tensor;

constexpr Layer kLayer{1};
constexpr std::int32_t kTokens = 24;

Agreement agreement(Guidance mode) {
  Agreement a;
  a.model.num_layers = 2;
  a.model.hidden = 64;
  a.model.expert_width = 32;
  a.model.num_experts = 8;
  a.model.experts_per_token = 2;
  a.model.num_heads = 4;
  a.model.num_kv_heads = 2;
  a.model.head_dim = 16;
  a.model.vocabulary = 16;
  a.model.max_positions = 64;
  a.contract = contracts::lockstep(2);
  a.contract.kv_exponents = {-9, -9, -9, -9};
  a.guide = {.mode = mode,
             .sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV},
             .layers = LayerSet::range(1, 2),
             .replay_experts = true,
             .audit_every = 0};
  return a;
}

Trajectory sequence() {
  Trajectory t;
  t.tokens.assign(kTokens + 1, Token{3});
  t.response_mask.assign(kTokens + 1, 1);
  t.path = {{.id = SpanId{5}, .first = 0, .count = 10},
            {.id = SpanId{6}, .first = 10, .count = kTokens - 10}};
  return t;
}

Tensor random_rows(std::int64_t rows, std::int64_t cols, std::uint64_t seed, float size = 1.0f) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, size);
  Tensor x = at::empty({rows, cols}, at::kFloat);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data_ptr<float>()[i] = to_float(to_bf16(normal(random)));
  }
  return x;
}

struct Rollout {
  Tensor values;  // what the rollout computed with
  std::vector<std::vector<std::uint8_t>> records;
};

/// Quantizes x [tokens, layout.width] as an engine would, in rows of `cols`.
Rollout quantize(const Agreement& a, Place place, Encoding encoding, const Tensor& x,
                 std::int64_t cols) {
  const Quantizer rule = a.rule(place.site);
  const RowLayout layout = a.layout(place, encoding);
  const std::int64_t rows = x.numel() / cols, tokens = x.size(0);
  std::vector<Bf16> numbers(static_cast<std::size_t>(x.numel()));
  ops::store_bf16(x, numbers.data());
  std::vector<std::uint8_t> codes(numbers.size()), scales(numbers.size());
  std::vector<float> global(static_cast<std::size_t>(rows));
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(tokens * layout.bytes()));
  const bool is_static = rule.global == GlobalScale::kStatic;
  const std::int64_t blocks = rule.scale_cols(cols), packed = rule.code_bytes(cols);
  kernels::quantize({.x = {numbers.data(), {rows, cols}, {cols, 1}},
                     .rule = rule,
                     .exponent = static_cast<std::int8_t>(is_static ? -9 : 0),
                     .out = {.codes = {codes.data(), {rows, packed}, {packed, 1}},
                             .scales = {scales.data(), {rows, blocks}, {blocks, 1}},
                             .global = {global.data(), {rows}, {1}}},
                     .layout = layout,
                     .records = {bytes.data(), {tokens, layout.bytes()}, {layout.bytes(), 1}}});
  kernels::guide({.x = {numbers.data(), {rows, cols}, {cols, 1}},
                  .rule = rule,
                  .out = {numbers.data(), {rows, cols}, {cols, 1}},
                  .exponent = static_cast<std::int8_t>(is_static ? -9 : 0)});
  Rollout rollout = {at::empty_like(x), {}};
  ops::load_bf16(numbers.data(), rollout.values);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto* row = bytes.data() + t * layout.bytes();
    rollout.records.emplace_back(row, row + layout.bytes());
  }
  return rollout;
}

class SitesTest : public ::testing::Test {
 protected:
  explicit SitesTest(Guidance mode = Guidance::kLsb) : agreement_(agreement(mode)) {}

  void use(Guidance mode) { agreement_ = agreement(mode); }

  /// Records of x at a place under an encoding; what they are worth.
  Tensor record(Site site, Encoding encoding, const Tensor& x, std::int64_t cols) {
    const Rollout rollout = quantize(agreement_, {kLayer, site}, encoding, x, cols);
    for (std::size_t t = 0; t < rollout.records.size(); ++t) {
      trace_.put(pack_.keys[t], {kLayer, site}, encoding, rollout.records[t]);
    }
    return rollout.values;
  }

  Sites sites(bool traced = true) {
    return Sites(agreement_, qat_, pack_, traced ? &trace_ : nullptr, &tally_);
  }

  Agreement agreement_;
  Qat qat_ = {.weights = true, .activations = true, .k = true, .v = true};
  std::vector<Trajectory> batch_ = {sequence()};
  Pack pack_ = pack(batch_, {.max_positions = 64, .vocabulary = 16})[0];
  FakeTrace trace_;
  Tally tally_{2};
};

/// x as another engine would have it: a little off, less than a quarter of the block's scale.
Tensor drifted(const Tensor& x, float size) {
  const Tensor y = x * (1.0f + size * random_rows(x.size(0), x.size(1), 99));
  std::vector<Bf16> numbers(static_cast<std::size_t>(y.numel()));
  ops::store_bf16(y.contiguous(), numbers.data());
  Tensor out = at::empty_like(x);
  ops::load_bf16(numbers.data(), out);
  return out;
}

class SitesModes : public SitesTest, public ::testing::WithParamInterface<Guidance> {};

TEST_P(SitesModes, SmallDriftLeavesTheRolloutsNumbers) {
  use(GetParam());
  const Encoding encoding = encoding_for(GetParam());
  const bool exact = GetParam() != Guidance::kRolloutScale;
  const struct {
    Site site;
    std::int64_t width, cols;
  } places[] = {
      {Site::kW13In, 64, 64}, {Site::kW2In, 64, 32}, {Site::kK, 32, 32}, {Site::kV, 32, 32}};
  for (const auto& [site, width, cols] : places) {
    const Tensor x = random_rows(kTokens, width, 1 + static_cast<std::uint64_t>(site));
    const Tensor rollout = record(site, encoding, x, cols);
    const Tensor mine = drifted(x, 0.004f);
    Tensor guided;
    if (site == Site::kW2In) {
      std::vector<Bf16> numbers(static_cast<std::size_t>(x.numel()));
      ops::store_bf16(mine, numbers.data());
      const TensorView<Bf16, 2> all = {numbers.data(), {kTokens * 2, cols}, {cols, 1}};
      sites().w2_in(kLayer)(all, all);
      guided = at::empty_like(x);
      ops::load_bf16(numbers.data(), guided);
    } else {
      guided =
          site == Site::kW13In ? sites().w13_in(kLayer, mine) : sites().kv({kLayer, site}, mine);
    }
    const auto differing = (guided != rollout).sum().item<std::int64_t>();
    if (exact) {
      EXPECT_EQ(differing, 0) << static_cast<int>(site);
    } else {
      EXPECT_LT(differing, x.numel() / 20) << static_cast<int>(site);
    }
    EXPECT_EQ(tally_.of(site).covered, site == Site::kW2In ? 2 * kTokens : kTokens);
    EXPECT_EQ(tally_.of(site).absent, 0);
  }
  EXPECT_EQ(tally_.of(Site::kW13In).elements, kTokens * 64);
}

/// The formats of FP8 and of MXFP4 with MXFP8 activations, at every site.
class SitesFormats : public SitesTest, public ::testing::WithParamInterface<Guidance> {
 protected:
  void use(const char* preset, Guidance mode) {
    agreement_ = agreement(mode);
    agreement_.model.head_dim = 32;  // a block of MXFP4
    agreement_.contract = contracts::preset(preset, 2);
    if (agreement_.contract.k.is_mx()) {
      agreement_.contract.activation = contracts::format("mxfp8", contracts::Tensor::kActivation);
    }
    agreement_.contract.kv_exponents = {-9, -9, -9, -9};
  }
};

TEST_P(SitesFormats, NoDriftIsTheRolloutAndTheGradientIsTheUpstreamOne) {
  for (const char* preset : {"fp8", "mx-rceil"}) {
    use(preset, GetParam());
    for (const auto& [site, width] :
         {std::pair{Site::kW13In, 64}, {Site::kK, 64}, {Site::kV, 64}}) {
      const Encoding encoding = agreement_.encoding({kLayer, site});
      const float size = site == Site::kW13In ? 1.0f : 0.1f;  // what the fixed scale holds
      const Tensor x = random_rows(kTokens, width, 1, size);
      const Tensor rollout =
          record(site, encoding == Encoding::kNone ? Encoding::kLsb : encoding, x, width);
      const auto round = [&, site = site](const Tensor& y) {
        return site == Site::kW13In ? sites().w13_in(kLayer, y) : sites().kv({kLayer, site}, y);
      };
      EXPECT_TRUE(round(x).equal(rollout)) << preset << " " << static_cast<int>(site);
      const Tensor leaf = drifted(x, 0.3f).requires_grad_(true);
      const Tensor upstream = random_rows(kTokens, width, 3);
      round(leaf).backward(upstream);
      EXPECT_TRUE(leaf.grad().equal(upstream));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SitesFormats,
                         ::testing::Values(Guidance::kOwnScale, Guidance::kRolloutScale,
                                           Guidance::kLsbScaleMod4, Guidance::kLsb,
                                           Guidance::kFullGuided, Guidance::kFullForced));

INSTANTIATE_TEST_SUITE_P(All, SitesModes,
                         ::testing::Values(Guidance::kRolloutScale, Guidance::kLsbScaleMod4,
                                           Guidance::kLsb, Guidance::kFullGuided,
                                           Guidance::kFullForced));

TEST_F(SitesTest, TheSecondPassIsTheRolloutsOperands) {
  use(Guidance::kOwnScale);
  agreement_.guide.sites = {};
  const Tensor x = random_rows(kTokens, 64, 11);
  const Tensor plain = sites(false).w13_in(kLayer, x);
  double before = (plain - x).norm().item<double>();
  for (const float alpha : {0.5f, 1.0f}) {
    qat_.residual_alpha = alpha;
    qat_.residual_sites = {Site::kW13In};
    const Tensor both = sites(false).w13_in(kLayer, x.clone().requires_grad_());
    const double after = (both - x).norm().item<double>();
    EXPECT_LT(after, (alpha == 0.5f ? 0.6 : 0.15) * before) << alpha;
    EXPECT_GT(after, (alpha == 0.5f ? 0.4 : 0.01) * before) << alpha;
    // Half way, or all the way, from Q(x) to Q(x) - Q(Q(x) - x), but for one rounding to BF16.
    if (alpha == 0.5f) {
      qat_.residual_alpha = 1.0f;
      const Tensor whole = sites(false).w13_in(kLayer, x);
      EXPECT_LT((both - (plain + whole) / 2).abs().max().item<double>(), 0.02);
    }
  }
  qat_.residual_sites = {Site::kW2In};
  EXPECT_TRUE(at::equal(sites(false).w13_in(kLayer, x), plain));
}

TEST_F(SitesTest, FullForcedTakesWhateverTheRolloutHad) {
  use(Guidance::kFullForced);
  const Tensor rollout = record(Site::kW13In, Encoding::kCodes, random_rows(kTokens, 64, 1), 64);
  EXPECT_TRUE(sites().w13_in(kLayer, random_rows(kTokens, 64, 2, 5.0f)).equal(rollout));
}

TEST_F(SitesTest, WithoutATraceOrOutsideTheLayersItRoundsAtItsOwnScale) {
  const Tensor x = random_rows(kTokens, 64, 1);
  record(Site::kW13In, Encoding::kLsb, random_rows(kTokens, 64, 2), 64);
  const Tensor own = quantize(agreement_, {kLayer, Site::kW13In}, Encoding::kCodes, x, 64).values;
  EXPECT_TRUE(sites(false).w13_in(kLayer, x).equal(own));
  EXPECT_TRUE(sites().w13_in(Layer{0}, x).equal(own));  // guided layers begin at 1
  EXPECT_EQ(tally_.of(Site::kW13In).absent + tally_.of(Site::kW13In).covered, 0);
  EXPECT_FALSE(sites().w13_in(kLayer, x).equal(own));
}

TEST_F(SitesTest, R77_AnAbsentRecordFallsBackToOwnRoundingAndIsCounted) {
  const Tensor x = random_rows(kTokens, 64, 1);
  record(Site::kW13In, Encoding::kLsb, random_rows(kTokens, 64, 2), 64);
  trace_.forget(pack_.keys[7], {kLayer, Site::kW13In}, Encoding::kLsb);
  const Tensor own = quantize(agreement_, {kLayer, Site::kW13In}, Encoding::kCodes, x, 64).values;
  const Tensor guided = sites().w13_in(kLayer, x);
  EXPECT_TRUE(guided[7].equal(own[7]));
  EXPECT_FALSE(guided[8].equal(own[8]));
  EXPECT_EQ(tally_.of(Site::kW13In).absent, 1);
  EXPECT_EQ(tally_.of(Site::kW13In).covered, kTokens - 1);
}

TEST_F(SitesTest, R22_TheGradientIsTheUpstreamOneEvenWhereItSaturates) {
  Tensor x = random_rows(kTokens, 64, 1);
  record(Site::kW13In, Encoding::kLsb, x / 64.0, 64);  // recorded scales are far too small
  x.requires_grad_(true);
  const Tensor upstream = random_rows(kTokens, 64, 3);
  sites().w13_in(kLayer, x).backward(upstream);
  EXPECT_TRUE(x.grad().equal(upstream));
}

TEST_F(SitesTest, AnArmThatImitatesNothingPassesItsNumbersOn) {
  qat_ = {};
  const Tensor x = random_rows(kTokens, 64, 1);
  EXPECT_TRUE(sites().w13_in(kLayer, x).equal(x));
  EXPECT_FALSE(static_cast<bool>(sites().w2_in(kLayer)));
}

TEST_F(SitesTest, AuditTokensMeasureFlipsInEveryArm) {
  agreement_.guide.audit_every = 1;
  const Tensor x = random_rows(kTokens, 64, 1);
  record(Site::kW13In, Encoding::kLsb, x, 64);
  record(Site::kW13In, Encoding::kCodes, x, 64);
  const Tensor mine = drifted(x, 0.02f);
  sites().w13_in(kLayer, mine);
  const Tally::Audit guided = tally_.of(Place{kLayer, Site::kW13In});
  const std::int64_t flipped = guided.counts[kernels::kAuditCodeFlips];
  EXPECT_EQ(guided.counts[kernels::kAuditCodes], kTokens * 64);
  EXPECT_EQ(guided.rounded, kTokens * 64);
  EXPECT_GT(flipped, kTokens * 64 / 200);
  EXPECT_LT(guided.counts[kernels::kAuditStillDiffer], flipped / 10);

  qat_ = {};
  tally_ = Tally(2);
  sites().w13_in(kLayer, mine);
  const Tally::Audit naive = tally_.of(Place{kLayer, Site::kW13In});
  EXPECT_EQ(naive.counts[kernels::kAuditCodeFlips], flipped);
  EXPECT_EQ(naive.counts[kernels::kAuditStillDiffer], 0);
  EXPECT_EQ(naive.rounded, 0);

  const auto comm = Comm::single();
  const Metrics metrics = tally_.metrics(*comm);
  EXPECT_NEAR(metrics.at("fp4/act/flip_frac"), static_cast<double>(flipped) / (kTokens * 64),
              1e-12);
  EXPECT_GE(metrics.at("fp4/act/value_flip_frac"), metrics.at("fp4/act/flip_frac"));
  EXPECT_TRUE(metrics.contains("fp4/act/flip_frac/layer_1"));
  EXPECT_FALSE(metrics.contains("fp4/act/flip_frac/layer_0"));
  EXPECT_FALSE(metrics.contains("fp4/act/residual_frac"));
}

// Rows without a record are zeros where they are read. They are no choice of expert 0: such a token
// takes its own experts, which differ and spread, and counts for no share of mismatches.
TEST_F(SitesTest, R72_ARowWithoutARouteKeepsItsOwnExpertsAndLeavesTheStatistics) {
  const Tensor p = at::softmax(random_rows(kTokens, 8, 21), 1);
  const Tensor native = ops::choose_experts(p, 2);
  trace_.put(pack_.keys[0], {kLayer, Site::kRouter}, Encoding::kExperts8,
             {static_cast<std::uint8_t>(native[0][1].item<std::int64_t>()),
              static_cast<std::uint8_t>(native[0][0].item<std::int64_t>())});
  trace_.put(pack_.keys[1], {kLayer, Site::kRouter}, Encoding::kExperts8, {0, 0});  // as padding
  const Tensor chosen = sites().experts(kLayer, p);
  EXPECT_TRUE(chosen.slice(0, 1).equal(native.slice(0, 1)));
  EXPECT_EQ((chosen.select(1, 0) == chosen.select(1, 1)).sum().item<std::int64_t>(), 0);
  EXPECT_GT(std::get<0>(at::_unique(chosen)).numel(), 4);
  EXPECT_EQ(tally_.routes_followed, 1);
  EXPECT_EQ(tally_.routes_absent, kTokens - 1);
  EXPECT_EQ(tally_.routes_mismatched, 0);
  // A pass has no row but its tokens: nothing is padded that would have to be left out.
  EXPECT_EQ(pack_.rows(), kTokens);
}

// The cache's scales come from the contract on both sides, and neither side has one of its own.
TEST_F(SitesTest, R51_NoExponentOfTheCacheIsTakenForGranted) {
  agreement_.contract.kv_exponents.resize(2);  // of layer 0 alone
  const Tensor x = random_rows(kTokens, 32, 5);
  sites(false).kv({Layer{0}, Site::kV}, x);
  EXPECT_THROW(sites(false).kv({kLayer, Site::kK}, x), Error);
  EXPECT_THROW(sites(false).kv({kLayer, Site::kV}, x), Error);
}

TEST_F(SitesTest, RoutesAreReplayedInTheirOrderAndDamagedOnesAreNot) {
  const Tensor p = random_rows(kTokens, 8, 1).softmax(-1);
  const Tensor native = ops::choose_experts(p, 2);
  for (std::size_t t = 0; t < pack_.keys.size(); ++t) {
    trace_.put(pack_.keys[t], {kLayer, Site::kRouter}, Encoding::kExperts8, {5, 2});
  }
  trace_.put(pack_.keys[3], {kLayer, Site::kRouter}, Encoding::kExperts8, {4, 4});
  trace_.put(pack_.keys[4], {kLayer, Site::kRouter}, Encoding::kExperts8, {4, 8});
  trace_.forget(pack_.keys[5], {kLayer, Site::kRouter}, Encoding::kExperts8);
  const Tensor chosen = sites().experts(kLayer, p);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const bool own = t >= 3 && t <= 5;
    EXPECT_EQ(chosen[t][0].item<std::int64_t>(), own ? native[t][0].item<std::int64_t>() : 5);
    EXPECT_EQ(chosen[t][1].item<std::int64_t>(), own ? native[t][1].item<std::int64_t>() : 2);
  }
  EXPECT_EQ(tally_.routes_followed, kTokens - 3);
  EXPECT_EQ(tally_.routes_absent, 3);
  EXPECT_GT(tally_.routes_mismatched, 0);
  EXPECT_TRUE(sites(false).experts(kLayer, p).equal(native));
}

TEST_F(SitesTest, R80_RowsFollowTheirTokensThroughPacking) {
  // A trajectory without a path, then the one with records: its rows are not the pass's first.
  Trajectory bare;
  bare.tokens.assign(9, Token{1});
  bare.response_mask.assign(9, 1);
  const Tensor x = random_rows(kTokens, 64, 1);
  const Tensor rollout = record(Site::kW13In, Encoding::kLsb, x, 64);
  batch_ = {bare, sequence()};
  pack_ = pack(batch_, {.max_positions = 64, .vocabulary = 16})[0];
  ASSERT_EQ(pack_.rows(), 8 + kTokens);
  const Tensor guided = sites().w13_in(kLayer, at::cat({random_rows(8, 64, 4), drifted(x, .004f)}));
  EXPECT_TRUE(guided.narrow(0, 8, kTokens).equal(rollout));
  EXPECT_EQ(tally_.of(Site::kW13In).absent, 8);
}

}  // namespace
}  // namespace lockstep::train
