#include "sync/refit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <set>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"
#include "model/checkpoint.h"
#include "model/names.h"
#include "numerics/bf16.h"
#include "sync/h_scale.h"
#include "sync/testing.h"

namespace lockstep::sync {
namespace {

constexpr ModelConfig kModel = testing::small_model(32);

struct Masters : testing::Masters {
  Masters() : testing::Masters(kModel, 0.1f) {}
};

/// Holds what it was given; answers with checksums of it.
class Keeper final : public WeightSink {
 public:
  void begin(WeightVersion next, ContractId id) override {
    version = next;
    contract = id;
    crc_.clear();
    packed.clear();
    plain.clear();
  }
  void put(const Weight& weight) override {
    std::uint32_t crc = 0;
    if (const auto* codes = std::get_if<PackedView<const std::uint8_t>>(&weight.value)) {
      packed.insert(weight.id);
      std::vector<std::byte> global;
      put_le(global, float_bits(codes->global.data[0]));
      const auto bytes_of = [](const auto& view) {
        return std::as_bytes(
            std::span(view.data, static_cast<std::size_t>(view.shape[0] * view.shape[1])));
      };
      EXPECT_EQ(codes->mantissas.shape[1] > 0, mantissas);
      const std::uint32_t scales = crc32c(bytes_of(codes->scales), crc32c(bytes_of(codes->codes)));
      crc = crc32c(global, crc32c(bytes_of(codes->mantissas), scales));
    } else {
      plain.insert(weight.id);
      const auto& view = std::get<TensorView<const Bf16, 2>>(weight.value);
      crc = crc32c(std::as_bytes(
          std::span(view.data, static_cast<std::size_t>(view.shape[0] * view.shape[1]))));
    }
    crc_.push_back(damage == weight.id ? crc ^ 1 : crc);
    of[weight.id] = crc;
  }
  std::vector<std::uint32_t> commit() override {
    ++commits;
    return crc_;
  }

  WeightVersion version;
  ContractId contract;
  std::set<WeightId> packed, plain;
  std::map<WeightId, std::uint32_t> of;  // of codes, scales and global, or of plain values
  std::optional<WeightId> damage;
  bool mantissas = false;  // are there any?
  int commits = 0;

 private:
  std::vector<std::uint32_t> crc_;
};

TEST(Refit, QuantizesRoutedExpertsOnly) {
  Masters masters;
  Keeper keeper;
  const Contract contract = contracts::lockstep(kModel.num_layers);
  const Metrics m = refit(masters, keeper, contract, WeightVersion{7});
  EXPECT_EQ(keeper.packed.size(), 2u * 3 * 2);
  for (const WeightId& id : keeper.packed) EXPECT_TRUE(of_expert(id.role));
  EXPECT_EQ(keeper.packed.size() + keeper.plain.size(), weight_ids(kModel).size());
  EXPECT_EQ(keeper.contract, contract.id());
  EXPECT_EQ(m.at("fp4/refit/version"), 7);
  EXPECT_GT(m.at("fp4/refit/rel_err"), 0.02);
  EXPECT_LT(m.at("fp4/refit/rel_err"), 0.2);
}

/// Only the experts of one rank, of two that share the masters out.
class OfRank final : public WeightSource {
 public:
  OfRank(const Masters& masters, std::int32_t rank, std::int32_t experts)
      : masters_(masters), rank_(rank), experts_(experts) {}
  void each(const std::function<void(const Weight&)>& visit) const override {
    masters_.each([&](const Weight& weight) {
      const std::int32_t expert = weight.id.expert.value;
      const bool shared = !of_expert(weight.id.role) || experts_ == 1;
      if (expert < experts_ && (shared || expert % 2 == rank_)) visit(weight);
    });
  }

 private:
  const Masters& masters_;
  std::int32_t rank_, experts_;
};

/// Keeps the bytes of every expert's codes, scales and global scale.
class Bytes final : public WeightSink {
 public:
  void begin(WeightVersion, ContractId) override {}
  void put(const Weight& weight) override {
    keeper_.put(weight);
    const auto* codes = std::get_if<PackedView<const std::uint8_t>>(&weight.value);
    if (codes == nullptr) return;
    std::vector<std::uint8_t>& to = all[weight.id];
    for (const auto& view : {codes->codes, codes->scales}) {
      to.insert(to.end(), view.data, view.data + view.shape[0] * view.shape[1]);
    }
    const auto global = std::as_bytes(std::span(codes->global.data, 1));
    for (const std::byte byte : global) to.push_back(static_cast<std::uint8_t>(byte));
  }
  std::vector<std::uint32_t> commit() override { return keeper_.commit(); }

  std::map<WeightId, std::vector<std::uint8_t>> all;

 private:
  Keeper keeper_;
};

TEST(Refit, R27_AnExpertsScaleIsTheSameOnEveryRankHoweverManyThereAre) {
  const Masters masters;
  const Contract contract = contracts::lockstep(kModel.num_layers);
  Bytes whole;
  refit(masters, whole, contract, WeightVersion{1});
  for (const std::int32_t experts : {1, kModel.num_experts}) {
    Bytes ranks[2];
    for (const std::int32_t rank : {0, 1}) {
      refit(OfRank(masters, rank, experts), ranks[rank], contract, WeightVersion{1});
      EXPECT_FALSE(ranks[rank].all.empty());
      for (const auto& [id, bytes] : ranks[rank].all) EXPECT_EQ(bytes, whole.all.at(id));
    }
    // One expert is on both ranks; several are on one each, and none is missing.
    const std::size_t seen = ranks[0].all.size() + ranks[1].all.size();
    EXPECT_EQ(seen, experts == 1 ? 2 * ranks[0].all.size() : whole.all.size());
  }
}

/// Blocks of 32 fit these alone.
class GateAndUp final : public WeightSource {
 public:
  void each(const std::function<void(const Weight&)>& visit) const override {
    Masters().each([&](const Weight& weight) {
      if (weight.id.role == WeightId::Role::kGateUp) visit(weight);
    });
  }
};

TEST(Refit, TellsWhereMxfp4LosesAndWhatMacroBlocksLeave) {
  const GateAndUp masters;
  Contract contract = contracts::preset("mx-rceil", kModel.num_layers);
  contract.k = contract.v = {};
  Keeper plain, macro;
  const Metrics before = refit(masters, plain, contract, WeightVersion{1});
  EXPECT_NEAR(before.at("fp4/mx/weight/rel_err"), before.at("fp4/refit/rel_err"), 0.001);
  EXPECT_GT(before.at("fp4/mx/weight/scale"), 0.1);
  contract.weight.macro_block = 128;
  EXPECT_NE(contract.id(), contracts::preset("mx-rceil", kModel.num_layers).id());
  macro.mantissas = true;
  const Metrics after = refit(masters, macro, contract, WeightVersion{1});
  EXPECT_NEAR(after.at("fp4/mx/weight/rel_err"), after.at("fp4/refit/rel_err"), 0.001);
  EXPECT_LT(after.at("fp4/mx/weight/scale"), before.at("fp4/mx/weight/scale"));
  EXPECT_FALSE(refit(masters, plain, contracts::lockstep(2), WeightVersion{1})
                   .contains("fp4/mx/weight/scale"));
}

TEST(Refit, PacksEveryFormatOfWeights) {
  Masters masters;
  double last = 1;
  for (const char* format : {"nvfp4", "mxfp8"}) {
    Keeper keeper;
    Contract contract = contracts::lockstep(kModel.num_layers);
    contract.weight = contracts::format(format, contracts::Tensor::kWeight);
    const Metrics m = refit(masters, keeper, contract, WeightVersion{1});
    EXPECT_EQ(keeper.packed.size(), 2u * 3 * 2) << format;
    EXPECT_LT(m.at("fp4/refit/rel_err"), last) << format;
    last = m.at("fp4/refit/rel_err");
  }
  Keeper keeper;
  Contract contract = contracts::preset("fp8", kModel.num_layers);
  const Metrics m = refit(masters, keeper, contract, WeightVersion{1});
  EXPECT_EQ(keeper.packed.size(), 2u * 3 * 2);
  EXPECT_LT(m.at("fp4/refit/rel_err"), 0.04);  // three mantissa bits
}

TEST(Refit, Bf16ContractQuantizesNothing) {
  Masters masters;
  Keeper keeper;
  EXPECT_EQ(refit(masters, keeper, contracts::bf16(), {}).at("fp4/refit/rel_err"), 0);
  EXPECT_TRUE(keeper.packed.empty());
}

TEST(Refit, R63_LayersOutsideTheContractStayPlain) {
  Masters masters;
  Keeper keeper;
  Contract contract = contracts::lockstep(kModel.num_layers);
  contract.layers = LayerSet::range(1, 2);
  refit(masters, keeper, contract, {});
  for (const WeightId& id : keeper.packed) EXPECT_EQ(id.layer, Layer{1});
  EXPECT_EQ(keeper.packed.size(), 6u);
}

/// From the trainer's masters in memory, or by way of files: the engine gets the same codes and
/// scales, byte for byte, so no argument was dropped on either way.
TEST(Refit, R51_MemoryAndFilesDeliverTheSameScales) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / "refit_by_way_of_files";
  std::filesystem::remove_all(folder);
  const Masters masters;
  for (const char* preset : {"lockstep", "fp8"}) {
    const Contract contract = contracts::preset(preset, kModel.num_layers);
    Keeper memory, files;
    refit(masters, memory, contract, {});
    {
      CheckpointWriter writer(folder, kModel);
      refit(masters, writer, contracts::bf16(), {});
    }
    refit(CheckpointSource(folder), files, contract, {});
    EXPECT_EQ(files.packed, memory.packed) << preset;
    EXPECT_EQ(files.of, memory.of) << preset;
    EXPECT_EQ(memory.of.size(), weight_ids(kModel).size());
    std::filesystem::remove_all(folder);
  }
}

TEST(Refit, R62_AChecksumThatDiffersNamesTheWeight) {
  Masters masters;
  for (const auto role : {WeightId::Role::kDown, WeightId::Role::kRouter}) {
    Keeper keeper;
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

TEST(Refit, ANanIsNamedAndNothingCommitted) {
  for (const auto role : {WeightId::Role::kGateUp, WeightId::Role::kQ}) {
    Masters masters;
    Keeper keeper;
    masters.poison = WeightId{role, Layer{1}, Expert{role == WeightId::Role::kGateUp ? 1 : 0}};
    try {
      refit(masters, keeper, contracts::lockstep(2), {});
      FAIL() << "a NaN was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(to_string(*masters.poison)), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(keeper.commits, 0);
  }
}

TEST(Refit, R66_TheScalesFormIsAFieldOfTheContractAndMovesTheErrorAlone) {
  Masters masters;
  Keeper keeper;
  Contract ours = contracts::lockstep(kModel.num_layers);
  ours.weight.scale_rule = ScaleRule::kTe;  // which takes either
  Contract theirs = ours;
  theirs.weight.global_is_power_of_two = false;
  EXPECT_EQ(diff(ours, theirs).find("weight.global_is_power_of_two"), 0u) << diff(ours, theirs);
  const double with = refit(masters, keeper, ours, {}).at("fp4/refit/rel_err");
  EXPECT_EQ(keeper.contract, ours.id());
  const double without = refit(masters, keeper, theirs, {}).at("fp4/refit/rel_err");
  EXPECT_EQ(keeper.contract, theirs.id());
  EXPECT_NE(ours.id(), theirs.id());
  EXPECT_NE(with, without);
  EXPECT_NEAR(with, without, 0.1 * with);
}

TEST(Refit, R35_TinyWeightsAreNotFlushed) {
  Masters masters;
  masters.scale = 1e-6f;
  Keeper keeper;
  EXPECT_LT(refit(masters, keeper, contracts::lockstep(2), {}).at("fp4/refit/rel_err"), 0.2);
}

TEST(HScale, CodesPassTheRefitAndLoseLess) {
  Masters masters;
  Keeper plain, refined;
  const Contract contract = contracts::lockstep(2);
  const double before = refit(masters, plain, contract, {}).at("fp4/refit/rel_err");
  const std::vector<double> even(64, 1.0), none(64, 0.0);
  for (const bool counts : {true, false}) {
    const auto source = h_scaled(masters, contract, [&](const WeightId& id) {
      const auto cols = static_cast<std::size_t>(weight_shape(kModel, id.role)[1]);
      return std::span<const double>(counts ? even : none).first(cols);
    });
    std::size_t coded = 0;
    double lost = 0, all = 0;
    source->each([&](const Weight& weight) {
      const auto* codes = std::get_if<PackedView<const std::uint8_t>>(&weight.value);
      ASSERT_EQ(codes != nullptr, quantized(contract, weight.id));
      if (codes == nullptr) return;
      ++coded;
      const auto [rows, cols] = weight_shape(kModel, weight.id.role);
      std::vector<float> back(static_cast<std::size_t>(rows * cols));
      kernels::dequantize({.codes = *codes,
                           .rule = contract.weight,
                           .f32 = {back.data(), {rows, cols}, {cols, 1}}});
      masters.each([&](const Weight& master) {
        if (!(master.id == weight.id)) return;
        const auto& values = std::get<TensorView<const float, 2>>(master.value);
        for (std::size_t i = 0; i < back.size(); ++i) {
          const auto w = static_cast<double>(values.data[i]);
          lost += (static_cast<double>(back[i]) - w) * (static_cast<double>(back[i]) - w);
          all += w * w;
        }
      });
    });
    EXPECT_EQ(coded, 2u * 3 * 2);
    if (counts) {
      EXPECT_LT(std::sqrt(lost / all), 0.97 * before);
    } else {
      EXPECT_NEAR(std::sqrt(lost / all), before, 1e-9);  // nothing counts: the plain scales
    }
    refit(*source, refined, contract, {});  // checksums agree
  }
}

}  // namespace
}  // namespace lockstep::sync
