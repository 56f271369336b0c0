/// refit() of masters on every device: what arrives there is what the CPU would have sent.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/crc32c.h"
#include "base/error.h"
#include "device/testing.h"
#include "model/checksum.h"
#include "model/names.h"
#include "model/values.h"
#include "numerics/bf16.h"
#include "sync/refit.h"
#include "sync/testing.h"

namespace lockstep::sync {
namespace {

using testing::Masters;

constexpr ModelConfig kModel = testing::small_model(64);

/// Masters, and as BF16 what is asked for in it, in memory of a device.
class MastersThere final : public WeightSource {
 public:
  MastersThere(const Masters& masters, Device device, bool bf16 = false)
      : device_(device), bf16_(bf16) {
    masters.each([&](const Weight& weight) {
      const std::vector<float> values = f32_of(weight);
      std::vector<Bf16> rounded;
      for (const float x : values) rounded.push_back(to_bf16(x));
      memory_.emplace_back(weight.id,
                           bf16 ? to_device(rounded, device) : to_device(values, device));
    });
  }
  void each(const std::function<void(const Weight&)>& visit) const override {
    for (const auto& [id, buffer] : memory_) {
      const auto shape = weight_shape(kModel, id.role);
      if (bf16_) {
        visit({id, TensorView<const Bf16, 2>{buffer.as<Bf16>(), shape, {shape[1], 1}, device_}});
      } else {
        visit({id, TensorView<const float, 2>{buffer.as<float>(), shape, {shape[1], 1}, device_}});
      }
    }
  }

 private:
  Device device_;
  bool bf16_;
  std::vector<std::pair<WeightId, Buffer>> memory_;
};

/// Keeps the bytes of all that it is given, which must lie on its device.
class KeeperThere final : public WeightSink {
 public:
  explicit KeeperThere(Device device) : device_(device) {}
  Device device() const override { return device_; }
  void begin(WeightVersion, ContractId) override {
    crc_.clear();
    bytes.clear();
  }
  void put(const Weight& weight) override {
    std::vector<std::uint8_t>& all = bytes[weight.id];
    const auto take = [&](const auto& view) {
      using T = std::remove_cv_t<std::remove_pointer_t<decltype(view.data)>>;
      if (view.shape[0] == 0 || view.shape[1] == 0) return;
      EXPECT_EQ(view.device, device_) << to_string(weight.id);
      EXPECT_EQ(view.stride[0], view.shape[1]);
      const auto size = static_cast<std::size_t>(view.shape[0] * view.shape[1]) * sizeof(T);
      all.resize(all.size() + size);
      copy_bytes(all.data() + all.size() - size, {}, view.data, device_,
                 static_cast<std::int64_t>(size));
    };
    if (const auto* codes = std::get_if<PackedView<const std::uint8_t>>(&weight.value)) {
      take(codes->codes);
      take(codes->scales);
      take(TensorView<const float, 2>{codes->global.data, {1, 1}, {1, 1}, codes->global.device});
    } else {
      take(std::get<TensorView<const Bf16, 2>>(weight.value));
    }
    synchronize(device_);
    crc_.push_back(crc32c(std::as_bytes(std::span(all))) ^ (damage == weight.id ? 1u : 0u));
  }
  std::vector<std::uint32_t> commit() override {
    ++commits;
    return crc_;
  }

  std::map<WeightId, std::vector<std::uint8_t>> bytes;
  std::optional<WeightId> damage;
  int commits = 0;

 private:
  Device device_;
  std::vector<std::uint32_t> crc_;
};

class RefitOn : public ::testing::TestWithParam<Device> {};

TEST_P(RefitOn, SendsTheCpusBytesAndTellsItsErrors) {
  const Masters masters(kModel, 0.1f);
  Contract mxfp8 = contracts::lockstep(kModel.num_layers);
  mxfp8.weight = contracts::format("mxfp8", contracts::Tensor::kWeight);
  Contract first_alone = contracts::lockstep(kModel.num_layers);
  first_alone.layers = LayerSet::range(0, 1);
  // Blocks of 32 do not fit the width of the small experts.
  for (const Contract& contract :
       {contracts::lockstep(kModel.num_layers), first_alone, mxfp8,
        contracts::preset("fp8", kModel.num_layers), contracts::bf16()}) {
    SCOPED_TRACE(to_string(contract));
    for (const bool bf16 : {false, true}) {
      const MastersThere here(masters, {}, bf16), there(masters, GetParam(), bf16);
      KeeperThere expected{Device{}}, got{GetParam()};
      const Metrics a = refit(here, expected, contract, WeightVersion{3});
      const Metrics b = refit(there, got, contract, WeightVersion{3});
      EXPECT_EQ(expected.bytes, got.bytes);
      EXPECT_EQ(got.bytes.size(), weight_ids(kModel).size());
      EXPECT_EQ(a.at("fp4/refit/bytes"), b.at("fp4/refit/bytes"));
      EXPECT_NEAR(a.at("fp4/refit/rel_err"), b.at("fp4/refit/rel_err"), 1e-7);
      EXPECT_EQ(a.size(), b.size());
    }
  }
}

TEST_P(RefitOn, ASinkOnTheHostTakesWhatLiesThere) {
  const Masters masters(kModel, 0.1f);
  const Contract contract = contracts::lockstep(kModel.num_layers);
  KeeperThere expected{Device{}}, got{Device{}};
  refit(masters, expected, contract, WeightVersion{1});
  refit(MastersThere(masters, GetParam()), got, contract, WeightVersion{1});
  EXPECT_EQ(expected.bytes, got.bytes);
}

TEST_P(RefitOn, R62_AChecksumThatDiffersNamesTheWeight) {
  const MastersThere masters(Masters(kModel, 0.1f), GetParam());
  for (const auto role : {WeightId::Role::kDown, WeightId::Role::kRouter}) {
    KeeperThere keeper(GetParam());
    keeper.damage = WeightId{role, Layer{1}, Expert{role == WeightId::Role::kDown ? 2 : 0}};
    try {
      refit(masters, keeper, contracts::lockstep(2), {});
      FAIL() << "a damaged weight was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(to_string(*keeper.damage)), std::string::npos)
          << error.what();
    }
  }
}

TEST_P(RefitOn, ANanIsNamedAndNothingCommitted) {
  for (const auto role : {WeightId::Role::kGateUp, WeightId::Role::kQ}) {
    Masters masters(kModel, 0.1f);
    masters.poison = WeightId{role, Layer{1}, Expert{role == WeightId::Role::kGateUp ? 1 : 0}};
    KeeperThere keeper(GetParam());
    try {
      refit(MastersThere(masters, GetParam()), keeper, contracts::lockstep(2), {});
      FAIL() << "a NaN was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(to_string(*masters.poison)), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(keeper.commits, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, RefitOn, ::testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep::sync
