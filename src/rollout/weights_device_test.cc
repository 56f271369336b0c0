/// Weights on every device: what is put, from the host or from the device, is what lies there.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/dense/w4a16.h"
#include "kernels/exact/place_numbers.h"
#include "kernels/exact/place_weights.h"
#include "model/checksum.h"
#include "rollout/forward_fixture.h"
#include "rollout/weights.h"

namespace lockstep::rollout {
namespace {

using fixture::OwnedWeight;
using fixture::random_weights;
using Role = WeightId::Role;

Agreement agreement_of(const Contract& contract) {
  return {.model = fixture::small_model(), .contract = contract, .guide = {}, .seed = 0};
}

/// Experts in BF16, exact NVFP4, MXFP4, and as the values of codes.
std::vector<Agreement> agreements() {
  Contract wide = contracts::bf16();
  wide.weight = contracts::format("mxfp8", contracts::Tensor::kWeight);
  wide.layers = LayerSet::range(0, 3);
  Contract weights_alone = fixture::w4a4_contract(fixture::small_model());
  weights_alone.activation = {};
  weights_alone.layers = LayerSet::range(1, 3);
  std::vector<Agreement> all;
  for (const Contract& contract :
       {contracts::bf16(), fixture::w4a4_contract(fixture::small_model()),
        contracts::preset("mx-rceil", 3), wide, weights_alone}) {
    all.push_back(agreement_of(contract));
  }
  all.back().model.tied_embeddings = true;
  return all;
}

std::vector<std::uint32_t> checksums_of(const std::vector<OwnedWeight>& weights) {
  std::vector<std::uint32_t> sent;
  for (const OwnedWeight& w : weights) {
    sent.push_back(w.coded ? checksum(w.code_view()) : checksum(w.plain_view()));
  }
  return sent;
}

/// A weight whose numbers lie on the device.
class There {
 public:
  There(const OwnedWeight& w, Device device) : owned_(w), device_(device) {
    if (w.coded) {
      parts_[0] = to_device(w.codes, device);
      parts_[1] = to_device(w.scales, device);
      parts_[2] = to_device(std::vector<float>{w.global}, device);
    } else {
      parts_[0] = to_device(w.plain, device);
    }
  }
  Weight weight() const {
    const auto moved = [&](auto view, const Buffer& to) {
      view.data = to.as<std::remove_pointer_t<decltype(view.data)>>();
      view.device = device_;
      return view;
    };
    if (!owned_.coded) return {owned_.id, moved(owned_.plain_view(), parts_[0])};
    PackedView<const std::uint8_t> view = owned_.code_view();
    view.codes = moved(view.codes, parts_[0]);
    view.scales = moved(view.scales, parts_[1]);
    view.global = moved(view.global, parts_[2]);
    return {owned_.id, view};
  }

 private:
  OwnedWeight owned_;
  Device device_;
  Buffer parts_[3];
};

void put_all(Weights& weights, const std::vector<OwnedWeight>& all, const Contract& contract,
             std::int64_t version, bool from_device) {
  weights.begin({version}, contract.id());
  for (const OwnedWeight& w : all) {
    if (!from_device) {
      weights.put(w.weight());
      continue;
    }
    const There there(w, weights.device());
    weights.put(there.weight());
    synchronize(weights.device());
  }
}

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class WeightsOn : public ::testing::TestWithParam<Device> {};

TEST_P(WeightsOn, HoldWhatCameFromEitherSideAndCountAsTheCpuDoes) {
  for (const Agreement& agreement : agreements()) {
    const Contract& contract = agreement.contract;
    SCOPED_TRACE(to_string(contract));
    const auto first = random_weights(agreement, 3), second = random_weights(agreement, 4);
    for (const bool from_device : {false, true}) {
      Weights weights(agreement, GetParam()), cpu(agreement);
      put_all(weights, first, contract, 1, from_device);
      put_all(cpu, first, contract, 1, false);
      EXPECT_EQ(weights.commit(), checksums_of(first));
      EXPECT_EQ(cpu.commit(), checksums_of(first));
      const Metrics alone = weights.metrics();
      EXPECT_EQ(alone.size(), cpu.metrics().size());
      if (const auto found = alone.find("fp4/refit/probe_err"); found != alone.end()) {
        EXPECT_LT(found->second, 1e-4);
      }
      const LayerWeights& layer = weights.layer(1);
      const std::vector<const void*> before = {weights.embedding().data, weights.head().data,
                                               layer.qkv.data,           layer.gate_up.data,
                                               layer.down_codes.data,    layer.down_mx.codes.data};
      put_all(weights, second, contract, 2, from_device);
      put_all(cpu, second, contract, 2, false);
      EXPECT_EQ(weights.commit(), checksums_of(second));
      cpu.commit();
      Metrics here = cpu.metrics(), there = weights.metrics();
      EXPECT_EQ(here.erase("fp4/refit/probe_err"), there.erase("fp4/refit/probe_err"));
      EXPECT_EQ(here, there);  // flips
      EXPECT_EQ(before, (std::vector<const void*>{
                            weights.embedding().data, weights.head().data, layer.qkv.data,
                            layer.gate_up.data, layer.down_codes.data, layer.down_mx.codes.data}));
    }
  }
}

/// NVFP4 experts of BF16 activations stay codes where one product serves all rows.
TEST_P(WeightsOn, KeepCodesForBf16Activations) {
  if (!kernels::w4a16_takes_any(GetParam())) GTEST_SKIP() << "they are BF16 copies there";
  Agreement agreement = agreement_of({});
  agreement.contract = fixture::w4a4_contract(agreement.model);
  agreement.contract.activation = {};
  const Contract& contract = agreement.contract;
  const auto first = random_weights(agreement, 3), second = random_weights(agreement, 4);
  Agreement coded = agreement;  // counts codes' flips, as these do
  coded.contract = fixture::w4a4_contract(agreement.model);
  for (const bool from_device : {false, true}) {
    Weights weights(agreement, GetParam(), {}, true), cpu(coded);
    EXPECT_EQ(weights.layer(1).format, ExpertFormat::kW4a16);
    put_all(weights, first, contract, 1, from_device);
    put_all(cpu, first, coded.contract, 1, false);
    EXPECT_EQ(weights.commit(), checksums_of(first));
    cpu.commit();
    EXPECT_LT(weights.metrics().at("fp4/refit/probe_err"), 1e-4);
    put_all(weights, second, contract, 2, from_device);
    put_all(cpu, second, coded.contract, 2, false);
    EXPECT_EQ(weights.commit(), checksums_of(second));
    cpu.commit();
    Metrics here = cpu.metrics(), there = weights.metrics();
    EXPECT_EQ(here.erase("fp4/refit/probe_err"), there.erase("fp4/refit/probe_err"));
    EXPECT_EQ(here, there);
  }
}

TEST_P(WeightsOn, PlainRowsLieWhereProductsReadThem) {
  Agreement agreement = agreement_of(contracts::bf16());
  agreement.model.tied_embeddings = true;
  const auto all = random_weights(agreement, 6);
  Weights weights(agreement, GetParam());
  put_all(weights, all, agreement.contract, 1, true);
  weights.commit();
  std::vector<Bf16> row(64);
  for (const OwnedWeight& w : all) {
    const LayerWeights& layer = weights.layer(w.id.layer.value);
    const auto expect = [&](const kernels::PackedMatrix& matrix, std::int64_t at,
                            std::int64_t from) {
      kernels::unpack_row(matrix, at, row);
      EXPECT_TRUE(std::equal(row.begin(), row.end(), w.plain.begin() + from * 64))
          << to_string(w.id);
    };
    switch (w.id.role) {
      case Role::kEmbedding: expect(weights.head(), 49, 49); break;
      case Role::kK: expect(layer.qkv, agreement.model.q_width() + 5, 5); break;
      case Role::kV:
        expect(layer.qkv, agreement.model.q_width() + agreement.model.kv_width() + 63, 63);
        break;
      case Role::kRouter: expect(layer.router, 5, 5); break;
      default: break;
    }
  }
  std::vector<Bf16> norm(64);
  copy_bytes(norm.data(), {}, weights.layer(2).mlp_norm.data(), GetParam(), 128);
  synchronize(GetParam());
  for (const OwnedWeight& w : all) {
    if (w.id == WeightId{Role::kMlpNorm, {2}, {}}) {
      EXPECT_EQ(norm, w.plain);
    }
  }
}

/// R61: checksums are of what lies in memory, so that a byte which is damaged there is seen.
TEST_P(WeightsOn, R61_DamageBetweenPutAndCommitIsFound) {
  const Device device = GetParam();
  for (const Agreement& agreement : agreements()) {
    SCOPED_TRACE(to_string(agreement.contract));
    const auto all = random_weights(agreement, 7);
    const auto sent = checksums_of(all);
    Weights weights(agreement, device);
    const auto found = [&](const void* data, std::int64_t at, int bit) {
      put_all(weights, all, agreement.contract, 1, false);
      if (data != nullptr) {
        auto* byte = static_cast<std::uint8_t*>(const_cast<void*>(data)) + at;
        std::uint8_t value = 0;
        copy_bytes(&value, {}, byte, device, 1);
        synchronize(device);
        value = static_cast<std::uint8_t>(value ^ bit);
        copy_bytes(byte, device, &value, {}, 1);
      }
      const auto now = weights.commit();
      std::vector<std::string> names;
      for (std::size_t i = 0; i < now.size(); ++i) {
        if (now[i] != sent[i]) names.push_back(to_string(all[i].id));
      }
      return names;
    };
    using Names = std::vector<std::string>;
    const LayerWeights& layer = weights.layer(1);
    EXPECT_EQ(found(nullptr, 0, 0), Names{});
    EXPECT_EQ(found(layer.router.data, 4, 1), Names{to_string({Role::kRouter, {1}, {}})});
    EXPECT_EQ(found(weights.head().data, 4, 1).size(), 1u);
    EXPECT_EQ(found(weights.embedding().data, 4, 1).size(), 1u);
    EXPECT_EQ(found(layer.q_norm.data(), 1, 0x80), Names{to_string({Role::kQNorm, {1}, {}})});
    const Names second = {to_string({Role::kGateUp, {1}, {1}})};
    switch (layer.format) {
      case ExpertFormat::kW4a4:
        EXPECT_EQ(found(layer.gate_up_codes.expert(1), 0, 1), second);
        EXPECT_EQ(found(layer.gate_up_codes.expert(1), 64 + 5, 1), second);
        EXPECT_EQ(found(layer.gate_up_codes.expert(1), 64 + 512 + 3, 1), second);
        break;
      case ExpertFormat::kMx:
        EXPECT_EQ(found(layer.gate_up_mx.codes.data, 64 * layer.gate_up_mx.codes.stride[0], 1),
                  second);
        EXPECT_EQ(found(layer.gate_up_mx.scales.data, 64 * layer.gate_up_mx.scales.stride[0], 1),
                  second);
        break;
      default:
        EXPECT_EQ(found(layer.gate_up.data, 2 * kernels::packed_elements(64, 64) + 7, 1), second);
    }
  }
}

TEST_P(WeightsOn, WhatIsNotANumberIsNamedAndNothingRuns) {
  const Agreement agreement = agreement_of(fixture::w4a4_contract(fixture::small_model()));
  auto all = random_weights(agreement, 2);
  const auto router = std::find_if(all.begin(), all.end(), [](const OwnedWeight& w) {
    return w.id == WeightId{Role::kRouter, {2}, {}};
  });
  const Bf16 good = std::exchange(router->plain[64 + 5], to_bf16(INFINITY));
  const std::string name = to_string(router->id);
  Weights weights(agreement, GetParam());
  const std::string host = refusal([&] { put_all(weights, all, agreement.contract, 1, false); });
  EXPECT_NE(host.find(name), std::string::npos) << host;
  Weights other(agreement, GetParam());
  const std::string there = refusal([&] {
    put_all(other, all, agreement.contract, 1, true);
    other.commit();
  });
  EXPECT_NE(there.find(name), std::string::npos) << there;
  EXPECT_NE(refusal([&] { other.require_ready(); }), "");
  router->plain[64 + 5] = good;
  if (GetParam().kind == Device::Kind::kCpu) return;
  put_all(other, all, agreement.contract, 2, true);  // another set may come
  EXPECT_EQ(other.commit(), checksums_of(all));
  other.require_ready();
}

/// Masters quantized into their places, and all else put.
std::vector<std::uint32_t> place_all(Weights& weights, const std::vector<OwnedWeight>& all,
                                     const Contract& contract, std::int64_t version,
                                     const std::function<void(const WeightId&)>& before_commit) {
  const Device device = weights.device();
  weights.begin({version}, contract.id());
  std::vector<Buffer> masters;
  std::vector<kernels::PlacedWeight> placed;
  std::vector<kernels::PlacedNumbers> plain;
  const Buffer bad = to_device(std::vector<std::uint64_t>{~std::uint64_t{0}}, device);
  const Buffer sums = to_device(std::vector<std::uint32_t>(all.size()), device);
  WeightId last;
  for (const OwnedWeight& w : all) {
    std::vector<float> master;
    for (const Bf16 x : w.plain) master.push_back(to_float(x));
    masters.push_back(to_device(master, device));
    const TensorView<const float, 2> view = {
        masters.back().as<float>(), {w.rows, w.cols}, {w.cols, 1}, device};
    if (!w.coded) {
      EXPECT_FALSE(weights.place(w.id).has_value());
      const TensorView<Bf16, 2> to = weights.place_numbers(w.id).value();
      EXPECT_EQ(to.shape, view.shape);
      plain.push_back({view, to.data, bad.as<std::uint64_t>(), sums.as<std::uint32_t>()});
      continue;
    }
    EXPECT_FALSE(weights.place_numbers(w.id).has_value());
    const CodesPlace place = weights.place(w.id).value();
    placed.push_back({.master = view,
                      .place = {place.expert, 1, place.out, place.cols, device},
                      .expert = 0,
                      .flips = place.flips,
                      .bad = bad.as<std::uint64_t>(),
                      .sum = sums.as<std::uint32_t>() + placed.size(),
                      .sample = place.sample,
                      .sample_step = place.sample_step});
    if (place.sample != nullptr) last = w.id;
    EXPECT_NE(refusal([&] { weights.place(w.id); }), "");  // twice
  }
  kernels::WeightSums errors(device, {});
  kernels::WeightPlacer placer(device, {});
  placer.place(placed, contract.weight, errors);
  kernels::NumberPlacer number_placer(device, {});
  number_placer.place(plain);
  synchronize(device);
  before_commit(last);
  return weights.commit();
}

TEST_P(WeightsOn, HoldWhatWasQuantizedIntoItsPlace) {
  if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "nothing is placed there";
  Agreement agreement = agreement_of({});
  agreement.model.expert_width = 64;
  agreement.contract = fixture::w4a4_contract(agreement.model);
  const Contract& contract = agreement.contract;
  const auto first = random_weights(agreement, 3), second = random_weights(agreement, 4);
  Weights weights(agreement, GetParam()), cpu(agreement);
  const auto nothing = [](const WeightId&) {};
  EXPECT_EQ(place_all(weights, first, contract, 1, nothing), checksums_of(first));
  put_all(cpu, first, contract, 1, false);
  cpu.commit();
  EXPECT_EQ(place_all(weights, second, contract, 2, nothing), checksums_of(second));
  put_all(cpu, second, contract, 2, false);
  cpu.commit();
  Metrics here = cpu.metrics(), there = weights.metrics();
  EXPECT_LT(there.at("fp4/refit/probe_err"), 1e-6);
  EXPECT_EQ(here.erase("fp4/refit/probe_err"), there.erase("fp4/refit/probe_err"));
  EXPECT_EQ(here, there);  // flips
  // A header that lies: the product is not what was computed.
  const auto damage = [&](const WeightId& id) {
    const LayerWeights& layer = weights.layer(id.layer.value);
    const kernels::W4a4Weights& codes =
        id.role == Role::kGateUp ? layer.gate_up_codes : layer.down_codes;
    const std::int32_t wrong = 3;
    copy_bytes(codes.expert(id.expert.value), GetParam(), &wrong, {}, sizeof wrong);
    synchronize(GetParam());
  };
  const std::string said = refusal([&] { place_all(weights, first, contract, 3, damage); });
  EXPECT_NE(said.find("does not lie as the kernel reads it"), std::string::npos) << said;
}

INSTANTIATE_TEST_SUITE_P(Devices, WeightsOn, ::testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::rollout
