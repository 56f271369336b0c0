#include "rollout/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "kernels/exact/dequantize.h"
#include "model/checksum.h"
#include "rollout/forward_fixture.h"
#include "rollout/probe.h"

namespace lockstep::rollout {
namespace {

using fixture::load;
using fixture::OwnedWeight;
using fixture::random_weights;
using fixture::Runner;
using Role = WeightId::Role;

Agreement agreement_of(const Contract& contract) {
  return {.model = fixture::small_model(), .contract = contract, .guide = {}, .seed = 0};
}

/// The line that `act` throws; it must hold every one of `words`.
void expect_error(const std::function<void()>& act, const std::vector<std::string>& words) {
  try {
    act();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    const std::string line = error.what();
    for (const std::string& word : words) {
      EXPECT_NE(line.find(word), std::string::npos) << line << " lacks " << word;
    }
  }
}

/// R67: an update that is not finished cannot be used, nor can its end be left out.
TEST(Weights, R67_NothingRunsBeforeCommit) {
  const Agreement agreement = agreement_of(contracts::bf16());
  const ContractId id = agreement.contract.id();
  const auto all = random_weights(agreement, 1);
  Weights weights(agreement);
  expect_error([&] { weights.require_ready(); }, {"none"});
  expect_error([&] { weights.put(all[0].weight()); }, {"before begin()"});
  expect_error([&] { weights.commit(); }, {"without begin()"});
  weights.begin({7}, id);
  expect_error([&] { weights.require_ready(); }, {"version 7", "not committed"});
  for (std::size_t i = 0; i + 1 < all.size(); ++i) weights.put(all[i].weight());
  expect_error([&] { weights.commit(); }, {"version 7", "lm_head.weight"});
  expect_error([&] { weights.begin({8}, id); }, {"version 7 lacks", "lm_head.weight"});
  weights.put(all.back().weight());
  EXPECT_EQ(weights.commit().size(), all.size());
  weights.require_ready();
  EXPECT_EQ(weights.version().value, 7);
  weights.begin({8}, id);
  expect_error([&] { weights.require_ready(); }, {"version 8", "not committed"});
  expect_error([&] { weights.commit(); }, {"embed_tokens", "more"});
}

TEST(Weights, NamesWhatItRefuses) {
  const Agreement agreement = agreement_of(fixture::w4a4_contract(fixture::small_model()));
  const auto all = random_weights(agreement, 2);
  Weights weights(agreement);
  expect_error([&] { weights.begin({1}, contracts::bf16().id()); }, {"contract"});
  weights.begin({1}, agreement.contract.id());
  weights.put(all[0].weight());
  expect_error([&] { weights.put(all[0].weight()); }, {"embed_tokens", "twice"});
  OwnedWeight w = all[1];  // the attention's norm of layer 0
  w.cols = 63;
  expect_error([&] { weights.put(w.weight()); },
               {"layers.0.input_layernorm", "[1, 63]", "[1, 64]"});
  w = all[1];
  w.plain[5] = to_bf16(NAN);
  expect_error([&] { weights.put(w.weight()); }, {"layers.0.input_layernorm", "nan", "[0, 5]"});
  w.id.layer = {3};
  expect_error([&] { weights.put(w.weight()); }, {"layers.3.input_layernorm", "not one of"});
  for (const OwnedWeight& coded : all) {
    if (!coded.coded) continue;
    OwnedWeight plain = coded;
    plain.coded = false;
    expect_error([&] { weights.put(plain.weight()); }, {"experts.0.gate_up_proj", "codes"});
    OwnedWeight damaged = coded;
    damaged.scales[3] = 0x7F;
    expect_error([&] { weights.put(damaged.weight()); }, {"127"});
    OwnedWeight narrow = coded;
    narrow.scales.resize(narrow.scales.size() / 2);
    expect_error([&] { weights.put(narrow.weight()); }, {"experts.0.gate_up_proj", "scales"});
    break;
  }
}

TEST(Weights, DamagedScalesAreRefusedUnderEveryFormat) {
  for (const char* format : {"nvfp4", "mxfp4", "mxfp8"}) {
    Contract contract = contracts::bf16();
    contract.weight = contracts::format(format, contracts::Tensor::kWeight);
    contract.activation = contracts::format(format, contracts::Tensor::kActivation);
    contract.layers = LayerSet::range(0, 3);
    const Agreement agreement = agreement_of(contract);
    const auto all = random_weights(agreement, 2);
    const auto coded = std::find_if(all.begin(), all.end(), [](const auto& w) { return w.coded; });
    OwnedWeight damaged = *coded;
    damaged.scales[3] = 253;
    Weights weights(agreement);
    weights.begin({1}, contract.id());
    expect_error([&] { weights.put(damaged.weight()); }, {"scale byte", "253"});
    weights.put(coded->weight());
  }
}

/// R56: a refit writes where the last one did, and what runs then is the new model as a fresh load
/// would run it.
TEST(Weights, R56_RefitsInPlace) {
  for (const bool coded : {false, true}) {
    const Contract contract =
        coded ? fixture::w4a4_contract(fixture::small_model()) : contracts::bf16();
    const Agreement agreement = agreement_of(contract);
    Weights weights(agreement);
    const auto addresses = [&] {
      std::vector<const void*> list = {weights.embedding().data, weights.head().data,
                                       weights.final_norm().data()};
      for (std::int32_t i = 0; i < agreement.model.num_layers; ++i) {
        const LayerWeights& layer = weights.layer(i);
        list.insert(list.end(), {layer.qkv.data, layer.o.data, layer.router.data,
                                 layer.gate_up.data, layer.down.data, layer.gate_up_codes.data,
                                 layer.down_codes.data, layer.q_norm.data()});
      }
      return list;
    };
    const auto first = load(weights, random_weights(agreement, 3), contract, 1);
    const auto before = addresses();
    const auto second = load(weights, random_weights(agreement, 4), contract, 2);
    EXPECT_EQ(before, addresses());
    EXPECT_NE(first, second) << "checksums of other weights";
    EXPECT_EQ(first, load(weights, random_weights(agreement, 3), contract, 3));

    Runner refitted(contract), fresh(contract);
    const auto tokens = fixture::random_tokens(20, agreement.model, 5);
    refitted.prefill(tokens, 20, 16);
    load(refitted.forward.weights(), random_weights(agreement, 4), contract, 2);
    load(fresh.forward.weights(), random_weights(agreement, 4), contract, 1);
    EXPECT_EQ(refitted.prefill(tokens, 20, 16), fresh.prefill(tokens, 20, 16));
  }
}

std::vector<std::uint32_t> checksums_of(const std::vector<OwnedWeight>& weights) {
  std::vector<std::uint32_t> sent;
  for (const OwnedWeight& w : weights) {
    sent.push_back(w.coded ? checksum(w.code_view()) : checksum(w.plain_view()));
  }
  return sent;
}

template <typename T>
std::span<std::uint8_t> bytes_at(T* data, std::int64_t first, std::int64_t count) {
  return {reinterpret_cast<std::uint8_t*>(const_cast<std::remove_const_t<T>*>(data)) + first,
          static_cast<std::size_t>(count)};
}

/// R61: the checksums are of what lies where the products read it: a byte that is damaged there,
/// and tiles in another order, are seen whatever the format; and nothing else is.
TEST(Weights, R61_ChecksumsAreOfWhatLiesInMemory) {
  Contract wide = contracts::bf16();
  wide.weight = contracts::format("mxfp8", contracts::Tensor::kWeight);
  wide.layers = LayerSet::range(0, 3);
  Contract mx = wide;
  mx.weight = contracts::format("mxfp4", contracts::Tensor::kWeight);
  mx.activation = contracts::format("mxfp4", contracts::Tensor::kActivation);
  for (const Contract& contract :
       {contracts::bf16(), fixture::w4a4_contract(fixture::small_model()), mx, wide}) {
    Agreement agreement = agreement_of(contract);
    agreement.model.tied_embeddings = contract == wide;
    const auto all = random_weights(agreement, 7);
    const std::vector<std::uint32_t> sent = checksums_of(all);
    Weights weights(agreement);
    EXPECT_EQ(load(weights, all, contract), sent);
    // What is seen of a change between the last put and commit.
    const auto found = [&](const std::function<void()>& damage) {
      weights.begin({2}, contract.id());
      for (const OwnedWeight& w : all) weights.put(w.weight());
      damage();
      const auto now = weights.commit();
      std::vector<std::string> names;
      for (std::size_t i = 0; i < now.size(); ++i) {
        if (now[i] != sent[i]) names.push_back(to_string(all[i].id));
      }
      return names;
    };
    const LayerWeights& layer = weights.layer(1);
    using Names = std::vector<std::string>;
    EXPECT_EQ(found([] {}), Names{});
    EXPECT_EQ(found([&] { bytes_at(layer.router.data, 4, 1)[0] ^= 1; }),
              Names{to_string({Role::kRouter, {1}, {}})});
    EXPECT_EQ(found([&] { bytes_at(weights.head().data, 4, 1)[0] ^= 1; }).size(), 1u);
    EXPECT_EQ(found([&] { bytes_at(weights.embedding().data, 4, 1)[0] ^= 1; }).size(), 1u);
    EXPECT_EQ(found([&] { bytes_at(layer.q_norm.data(), 0, 1)[0] ^= 0x80; }),
              Names{to_string({Role::kQNorm, {1}, {}})});
    // Experts: a byte of the second one's, then two tiles of 16 or 32 outputs exchanged.
    const Names second = {to_string({Role::kGateUp, {1}, {1}})};
    std::span<std::uint8_t> expert;
    std::int64_t half = 0;
    if (layer.format == ExpertFormat::kW4a4) {
      const auto& codes = layer.gate_up_codes;
      half = kernels::W4a4Weights::tile_bytes(codes.cols);
      expert = bytes_at(codes.expert(1) + kernels::W4a4Weights::kHeaderBytes, 0, 2 * half);
    } else if (layer.format == ExpertFormat::kMx) {
      half = 16 * layer.gate_up_mx.codes.stride[0];
      expert =
          bytes_at(layer.gate_up_mx.codes.data, 64 * layer.gate_up_mx.codes.stride[0], 2 * half);
    } else {
      const std::int64_t elements = kernels::packed_elements(64, 64);
      half = elements;
      expert = bytes_at(layer.gate_up.data + elements, 0, 2 * half);
    }
    EXPECT_EQ(found([&] { expert[5] ^= 1; }), second);
    if (layer.format == ExpertFormat::kW4a4) {  // the exponent
      EXPECT_EQ(found([&] { bytes_at(layer.gate_up_codes.expert(1), 0, 1)[0] ^= 1; }), second);
    }
    EXPECT_EQ(found([&] {
                std::swap_ranges(expert.begin(), expert.begin() + half, expert.begin() + half);
              }),
              second);
  }
}

TEST(Weights, TiedEmbeddingsServeAsHead) {
  Agreement agreement = agreement_of(contracts::bf16());
  agreement.model.tied_embeddings = true;
  const auto all = random_weights(agreement, 6);
  Weights weights(agreement);
  load(weights, all, agreement.contract);
  std::vector<Bf16> row(64);
  kernels::unpack_row(weights.head(), 17, row);
  EXPECT_TRUE(std::equal(row.begin(), row.end(), all[0].plain.begin() + 17 * 64));
  EXPECT_TRUE(std::equal(row.begin(), row.end(), weights.embedding().data + 17 * 64));
}

/// The first expert weight of that number.
std::size_t expert_weight(const std::vector<OwnedWeight>& all, std::int32_t expert) {
  std::size_t i = 0;
  while (!(all[i].coded && all[i].id.expert.value == expert)) ++i;
  return i;
}

Agreement nvfp4() { return agreement_of(fixture::w4a4_contract(fixture::small_model())); }

TEST(Weights, R28_AScaleThatIsMissingOrNoneNamesTensorAndExpert) {
  const Agreement agreement = nvfp4();
  const auto all = random_weights(agreement, 8);
  const std::size_t five = expert_weight(all, 5);
  for (const float global : {0.0f, 1e-45f, -1.0f, NAN, INFINITY, 0.3f}) {
    Weights weights(agreement);
    weights.begin({1}, agreement.contract.id());
    OwnedWeight w = all[five];
    w.global = global;
    expect_error([&] { weights.put(w.weight()); }, {"experts.5.gate_up_proj", "global scale"});
  }
  Weights weights(agreement);
  weights.begin({1}, agreement.contract.id());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i != five) weights.put(all[i].weight());
  }
  expect_error([&] { weights.commit(); }, {"experts.5.gate_up_proj"});
}

TEST(Weights, R30_ALayerThatCameInBf16IsNamedWithTheRemedy) {
  const Agreement agreement = nvfp4();
  auto all = random_weights(agreement, 9);
  Weights weights(agreement);
  weights.begin({1}, agreement.contract.id());
  OwnedWeight plain = all[expert_weight(all, 2)];
  plain.coded = false;
  expect_error([&] { weights.put(plain.weight()); },
               {"layers.0.mlp.experts.2.gate_up_proj", "leave layer 0 out of contract.layers"});
  // The other way round: codes of a layer that the contract leaves in BF16.
  Agreement fewer = agreement;
  fewer.contract.layers = LayerSet::range(1, 3);
  Weights mixed(fewer);
  mixed.begin({1}, fewer.contract.id());
  expect_error([&] { mixed.put(all[expert_weight(all, 2)].weight()); },
               {"layers.0.mlp.experts.2.gate_up_proj", "BF16"});
  // Half of the scales is not all of them.
  OwnedWeight half = all[expert_weight(all, 2)];
  half.bands /= 2;
  half.scales.resize(half.scales.size() / 2);
  expect_error([&] { weights.put(half.weight()); }, {"experts.2.gate_up_proj", "scales"});
}

TEST(Weights, R32_Mxfp4NeedsNoGlobalScale) {
  const Agreement agreement = agreement_of(contracts::preset("mx-rceil", 3));
  const auto all = random_weights(agreement, 10);
  Weights with(agreement), without(agreement);
  with.begin({1}, agreement.contract.id());
  without.begin({1}, agreement.contract.id());
  for (const OwnedWeight& w : all) {
    Weight plain = w.weight();
    with.put(plain);
    if (auto* codes = std::get_if<PackedView<const std::uint8_t>>(&plain.value)) codes->global = {};
    without.put(plain);
  }
  EXPECT_EQ(with.commit(), without.commit());
}

TEST(Weights, R33_SwappedNibblesAndPaddedScalesAreFound) {
  const Agreement agreement = nvfp4();
  const auto all = random_weights(agreement, 11);
  const std::size_t at = expert_weight(all, 1);
  // The low nibble is the even element.
  const std::vector<std::uint8_t> pair = {0x21, 0, 0, 0, 0, 0, 0, 0}, one = {0x38};
  const float global = 1.0f;
  std::vector<float> values(16);
  kernels::dequantize(
      {.codes = {{pair.data(), {1, 8}, {8, 1}}, {one.data(), {1, 1}, {1, 1}}, {&global, {1}, {1}}},
       .rule = agreement.contract.weight,
       .f32 = {values.data(), {1, 16}, {16, 1}}});
  EXPECT_EQ(values[0], 0.5f);
  EXPECT_EQ(values[1], 1.0f);
  // A sender's checksum is not that of the same nibbles in the other order.
  Weights good(agreement), bad(agreement);
  const auto sent = load(good, all, agreement.contract);
  auto swapped = all;
  for (std::uint8_t& byte : swapped[at].codes) {
    byte = static_cast<std::uint8_t>(byte << 4 | byte >> 4);
  }
  EXPECT_NE(load(bad, swapped, agreement.contract)[at], sent[at]);
  // A plane of scales that was padded to fours does not pass for one of another group size.
  Weights padded(agreement);
  padded.begin({1}, agreement.contract.id());
  OwnedWeight w = all[at];
  w.scales.resize(static_cast<std::size_t>(w.bands * (w.cols / 16 + 1)), 0x38);
  expect_error([&] { padded.put(w.weight()); }, {"experts.1", "scales [", "expected ["});
}

TEST(Weights, R61_AProductTellsARepackedWeightFromAnotherLayout) {
  const Agreement agreement = nvfp4();
  const OwnedWeight w = [&] {
    const auto all = random_weights(agreement, 12);
    return all[expert_weight(all, 0)];
  }();
  const std::int64_t bytes = kernels::W4a4Weights::expert_bytes(static_cast<std::int32_t>(w.rows),
                                                                static_cast<std::int32_t>(w.cols));
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> memory(static_cast<std::size_t>(bytes / 64));
  const kernels::W4a4Weights to = {memory.front().bytes, 1, static_cast<std::int32_t>(w.rows),
                                   static_cast<std::int32_t>(w.cols)};
  kernels::w4a4_fill(to, 0, 0, w.code_view());
  const auto error = [&] {
    return probe_error(
        w.code_view(), agreement.contract.weight,
        [&](TensorView<const Bf16, 2> x, TensorView<float, 2> y) {
          std::vector<std::uint8_t> codes(static_cast<std::size_t>(w.cols / 2)),
              scales(static_cast<std::size_t>(w.cols / 16));
          float global = 0;
          const PackedView<std::uint8_t> a = {{codes.data(), {1, w.cols / 2}, {0, 1}},
                                              {scales.data(), {1, w.cols / 16}, {0, 1}},
                                              {&global, {1}, {1}}};
          kernels::quantize({.x = x, .rule = agreement.contract.activation, .out = a});
          kernels::w4a4({.a = a, .w = to, .out = y});
        });
  };
  EXPECT_LT(error(), 1e-6);
  // The same shape and bytes, two runs of 64 in each other's place: what a checksum of the weight
  // as it arrived does not see.
  for (std::size_t i = 1; i + 1 < memory.size(); i += 2) std::swap(memory[i], memory[i + 1]);
  EXPECT_GT(error(), 0.25);

  Weights weights(agreement);
  load(weights, random_weights(agreement, 12), agreement.contract);
  EXPECT_LT(weights.metrics().at("fp4/refit/probe_err"), 1e-6);
}

TEST(Weights, FlipsAreCountedAgainstTheSetBefore) {
  Contract macro = contracts::preset("mx-rceil", 3);
  macro.activation = contracts::format("mxfp8", contracts::Tensor::kActivation);
  for (const Contract& contract :
       {fixture::w4a4_contract(fixture::small_model()), contracts::preset("mx-rceil", 3), macro}) {
    const Agreement agreement = agreement_of(contract);
    const bool coded = expert_product(contract) != ExpertProduct::kBf16;
    const std::string name = coded ? "fp4/weight/flip_frac" : "fp4/weight/value_flip_frac";
    Weights weights(agreement);
    auto all = random_weights(agreement, 13);
    load(weights, all, contract, 1);
    EXPECT_FALSE(weights.metrics().contains(name)) << "a first set has none before it";
    load(weights, all, contract, 2);
    EXPECT_EQ(weights.metrics().at(name), 0);
    // One code of layer 0 a step up or down, another one's sign.
    OwnedWeight& w = all[expert_weight(all, 4)];
    std::size_t at = 0;
    while ((w.codes[at] & 7) == 0 ||
           w.scales[2 * at / static_cast<std::size_t>(contract.weight.block)] == 0) {
      ++at;
    }
    w.codes[at] ^= 1;
    load(weights, all, contract, 3);
    std::int64_t size = 0;
    for (const OwnedWeight& one : all) size += one.coded ? one.rows * one.cols : 0;
    const Metrics metrics = weights.metrics();
    EXPECT_DOUBLE_EQ(metrics.at(name), 1.0 / static_cast<double>(size));
    EXPECT_DOUBLE_EQ(metrics.at(name + "/layer_0"), 3.0 / static_cast<double>(size));
    EXPECT_EQ(metrics.at(name + "/layer_1"), 0);
    if (coded) {
      EXPECT_EQ(metrics.at("fp4/weight/adjacent_frac"), 1);
      EXPECT_EQ(metrics.at("fp4/weight/scale_flip_frac"), 0);
    }
    load(weights, random_weights(agreement, 14), contract, 4);
    EXPECT_GT(weights.metrics().at(name), 0.5);
  }
}

}  // namespace
}  // namespace lockstep::rollout
