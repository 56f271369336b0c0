#include "rollout/weights.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "base/error.h"
#include "rollout/forward_fixture.h"

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

/// R56: a refit writes where the last one did, and what runs then is the new model as a fresh load
/// would run it.
TEST(Weights, R56_RefitsInPlace) {
  for (const bool coded : {false, true}) {
    const Contract contract =
        coded ? fixture::w4a4_contract(fixture::small_model()) : contracts::bf16();
    const Agreement agreement = agreement_of(contract);
    Weights weights(agreement);
    const auto addresses = [&] {
      std::vector<const void*> list = {weights.embedding(), weights.head().data,
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

TEST(Weights, TiedEmbeddingsServeAsHead) {
  Agreement agreement = agreement_of(contracts::bf16());
  agreement.model.tied_embeddings = true;
  const auto all = random_weights(agreement, 6);
  Weights weights(agreement);
  load(weights, all, agreement.contract);
  std::vector<Bf16> row(64);
  kernels::unpack_row(weights.head(), 17, row);
  EXPECT_TRUE(std::equal(row.begin(), row.end(), all[0].plain.begin() + 17 * 64));
  EXPECT_TRUE(std::equal(row.begin(), row.end(), weights.embedding() + 17 * 64));
}

}  // namespace
}  // namespace lockstep::rollout
