#include "model/checkpoint.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/philox.h"
#include "base/sync_testing.h"
#include "model/config_json.h"
#include "model/json.h"
#include "model/names.h"
#include "model/safetensors.h"
#include "numerics/bf16.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Role = WeightId::Role;

ModelConfig small() {
  return {.num_layers = 2,
          .hidden = 8,
          .expert_width = 4,
          .num_experts = 3,
          .experts_per_token = 2,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 6,
          .vocabulary = 10,
          .rope_theta = 1e4,
          .stop_tokens = {9}};
}

/// A folder that is gone with the test.
class Checkpoint : public testing::Test {
 protected:
  Checkpoint() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / (std::string("checkpoint_") + test->name());
    fs::remove_all(folder_);
  }
  ~Checkpoint() override { fs::remove_all(folder_); }

  fs::path folder_;
};

/// Values that follow from name and place.
std::vector<float> values_of(const WeightId& id, std::int64_t n) {
  const std::string text = to_string(id);
  const std::uint32_t seed = crc32c(std::as_bytes(std::span(text)));
  std::vector<float> values;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto words = philox(seed, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
    values.push_back(static_cast<float>(unit(words[0], words[1]) - 0.5));
  }
  return values;
}

struct Made {
  std::vector<float> values;
  Weight weight;
};

Made make(const ModelConfig& config, const WeightId& id) {
  const auto shape = weight_shape(config, id.role);
  Made made{.values = values_of(id, shape[0] * shape[1]), .weight = {}};
  made.weight = {id, TensorView<const float, 2>{made.values.data(), shape, {shape[1], 1}}};
  return made;
}

std::vector<std::uint32_t> write(const fs::path& folder, const ModelConfig& config,
                                 const CheckpointOptions& options = {}) {
  CheckpointWriter writer(folder, config, options);
  writer.begin({}, {});
  for (const WeightId& id : weight_ids(config)) writer.put(make(config, id).weight);
  return writer.commit();
}

std::map<WeightId, std::vector<float>> read(const fs::path& folder) {
  std::map<WeightId, std::vector<float>> weights;
  const CheckpointSource source(folder);
  source.each([&](const Weight& weight) {
    std::vector<float>& out = weights[weight.id];
    if (const auto* bf16 = std::get_if<TensorView<const Bf16, 2>>(&weight.value)) {
      for (std::int64_t i = 0; i < bf16->shape[0] * bf16->shape[1]; ++i) {
        out.push_back(to_float(bf16->data[i]));
      }
    } else {
      const auto& floats = std::get<TensorView<const float, 2>>(weight.value);
      out.assign(floats.data, floats.data + floats.shape[0] * floats.shape[1]);
    }
  });
  return weights;
}

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
    return error.what();
  }
  return "";
}

void expect_has(const std::string& message, std::string_view part) {
  EXPECT_NE(message.find(part), std::string::npos) << "\"" << message << "\" lacks " << part;
}

TEST_F(Checkpoint, ReadsBackWhatItWroteRoundedToBf16) {
  const ModelConfig config = small();
  const auto crcs = write(folder_, config);
  EXPECT_EQ(crcs.size(), weight_ids(config).size());
  EXPECT_EQ(CheckpointSource(folder_).config(), config);
  const auto weights = read(folder_);
  std::size_t i = 0;
  for (const WeightId& id : weight_ids(config)) {
    const Made made = make(config, id);
    ASSERT_EQ(weights.at(id).size(), made.values.size());
    std::vector<Bf16> rounded;
    for (std::size_t j = 0; j < made.values.size(); ++j) {
      rounded.push_back(to_bf16(made.values[j]));
      EXPECT_EQ(weights.at(id)[j], to_float(rounded[j])) << to_string(id);
    }
    EXPECT_EQ(crcs[i++], crc32c(std::as_bytes(std::span(rounded)))) << to_string(id);
  }
  EXPECT_FALSE(fs::exists(folder_.string() + ".part"));
}

TEST_F(Checkpoint, SourceYieldsTheOrderOfWeightIds) {
  ModelConfig config = small();
  config.tied_embeddings = true;
  write(folder_, config);
  std::vector<WeightId> ids;
  CheckpointSource(folder_).each([&](const Weight& weight) { ids.push_back(weight.id); });
  EXPECT_EQ(ids, weight_ids(config));
}

TEST_F(Checkpoint, ShardsHoldAtMostWhatIsAsked) {
  const fs::path one = folder_ / "one", many = folder_ / "many";
  fs::create_directories(folder_);
  write(one, small());
  write(many, small(), {.max_shard_bytes = 500});
  EXPECT_FALSE(fs::exists(many / "model.safetensors"));
  ASSERT_TRUE(fs::exists(many / "model.safetensors.index.json"));
  std::size_t shards = 0;
  for (const auto& entry : fs::directory_iterator(many)) {
    if (entry.path().extension() != ".safetensors") continue;
    ++shards;
    const auto file = value_or_throw(Safetensors::open(entry.path()));
    EXPECT_LE(file.tensors().back().end - file.tensors().front().first, 500u);
  }
  EXPECT_GT(shards, 3u);
  EXPECT_EQ(read(one), read(many));
  write(many, small(), {.max_shard_bytes = 500});  // the same shards again: in their place
  expect_has(message_of([&] { write(many, small()); }), "of another checkpoint");
}

/// The folder's tensors, each changed as `edit` says, in one file of its own.
struct Edited {
  TensorInfo info;
  std::vector<std::byte> bytes;
};

void rewrite(const fs::path& folder, const std::function<void(std::vector<Edited>&)>& edit) {
  std::vector<Edited> tensors;
  {
    const auto file = value_or_throw(Safetensors::open(folder / "model.safetensors"));
    for (const TensorInfo& info : file.tensors()) {
      const auto bytes = file.bytes(info);
      tensors.push_back({info, {bytes.begin(), bytes.end()}});
    }
  }
  edit(tensors);
  std::vector<TensorInfo> infos;
  for (const Edited& tensor : tensors) infos.push_back(tensor.info);
  SafetensorsWriter writer(folder / "model.safetensors", infos);
  for (const Edited& tensor : tensors) writer.write(tensor.info.name, tensor.bytes);
  writer.commit();
}

Edited& named(std::vector<Edited>& tensors, std::string_view name) {
  for (Edited& tensor : tensors) {
    if (tensor.info.name == name) return tensor;
  }
  throw Error("no such tensor in the test");
}

TEST_F(Checkpoint, FusedExpertsReadAsSingleOnes) {
  const ModelConfig config = small();
  write(folder_, config);
  const auto before = read(folder_);
  rewrite(folder_, [&](std::vector<Edited>& tensors) {
    std::vector<Edited> kept;
    std::map<std::string, std::vector<std::byte>> fused;
    for (const WeightId& id : weight_ids(config)) {
      for (const TensorName& tensor : plain_tensors(id)) {
        Edited& edited = named(tensors, name(tensor));
        if (!of_expert(id.role)) {
          kept.push_back(edited);
          continue;
        }
        TensorName all = tensor;
        all.part = Part::kAllExperts;
        auto& bytes = fused[name(all)];
        bytes.insert(bytes.end(), edited.bytes.begin(), edited.bytes.end());
      }
    }
    for (auto& [fused_name, bytes] : fused) {
      const auto shape = weight_shape(config, parse_name(fused_name)->id.role);
      kept.push_back({{.name = fused_name,
                       .dtype = Dtype::kBf16,
                       .shape = {config.num_experts, shape[0], shape[1]}},
                      bytes});
    }
    tensors = kept;
  });
  EXPECT_EQ(read(folder_), before);
  rewrite(folder_, [&](std::vector<Edited>& tensors) {  // and one expert by itself beside them
    tensors.push_back({{.name = "model.layers.0.mlp.experts.1.up_proj.weight",
                        .dtype = Dtype::kBf16,
                        .shape = {4, 8}},
                       std::vector<std::byte>(64)});
  });
  expect_has(message_of([&] { CheckpointSource{folder_}; }), "twice");
}

TEST_F(Checkpoint, F32AndF16AreReadExactly) {
  write(folder_, small());
  auto expected = read(folder_);
  const std::vector<std::uint16_t> halves = {0x3C00, 0xC000, 0x0001, 0x8000, 0x7BFF, 0x03FF};
  rewrite(folder_, [&](std::vector<Edited>& tensors) {
    Edited& norm = named(tensors, "model.layers.1.self_attn.q_norm.weight");
    norm.info.dtype = Dtype::kF16;
    const auto bytes = std::as_bytes(std::span(halves));
    norm.bytes.assign(bytes.begin(), bytes.end());
    Edited& gate = named(tensors, "model.layers.1.mlp.experts.2.gate_proj.weight");
    gate.info.dtype = Dtype::kF32;
    const std::vector<float> thirds(32, 1.0f / 3);
    const auto wide = std::as_bytes(std::span(thirds));
    gate.bytes.assign(wide.begin(), wide.end());
  });
  expected[{Role::kQNorm, {1}, {}}] = {1.0f, -2.0f, 0x1p-24f, -0.0f, 65504.0f, 1023 * 0x1p-24f};
  auto& joined = expected[{Role::kGateUp, {1}, {2}}];
  std::fill(joined.begin(), joined.begin() + 32, 1.0f / 3);
  EXPECT_EQ(read(folder_), expected);
}

TEST_F(Checkpoint, WrongShapesDtypesAndNamesAreRefusedByName) {
  write(folder_, small());
  fs::copy_file(folder_ / "model.safetensors", folder_ / "good");
  const auto refused = [&](const std::function<void(std::vector<Edited>&)>& edit,
                           std::string_view part) {
    fs::copy_file(folder_ / "good", folder_ / "model.safetensors",
                  fs::copy_options::overwrite_existing);
    rewrite(folder_, edit);
    expect_has(message_of([&] { CheckpointSource{folder_}; }), part);
  };
  const std::string router = "model.layers.0.mlp.gate.weight";
  refused([&](auto& t) { named(t, router).info.shape = {8, 3}; }, router);
  refused([&](auto& t) { named(t, router).info.shape = {24}; }, "[3, 8]");
  refused([&](auto& t) { named(t, router).info.dtype = Dtype::kI16; }, "I16");
  refused([&](auto& t) { named(t, router).info.name = "model.layers.0.mlp.router.weight"; },
          "model.layers.0.mlp.router.weight");
  refused([&](auto& t) { named(t, router).info.name = "model.layers.2.mlp.gate.weight"; },
          "model.layers.2.mlp.gate.weight");
  refused([&](auto& t) { named(t, router).info.name += "_scale"; }, "quantized");
  refused([&](auto& t) { t.erase(t.begin()); }, "model.embed_tokens.weight is missing");
  refused([&](auto& t) { named(t, "lm_head.weight").info.shape = {8, 10}; }, "lm_head.weight");
}

TEST_F(Checkpoint, ANotANumberIsRefusedByTensor) {
  write(folder_, small());
  const std::string up = "model.layers.1.mlp.experts.2.up_proj.weight";
  rewrite(folder_, [&](std::vector<Edited>& tensors) {
    Edited& tensor = named(tensors, up);
    tensor.bytes[10] = std::byte{0xC0};
    tensor.bytes[11] = std::byte{0x7F};
  });
  const std::string message = message_of([&] { read(folder_); });
  expect_has(message, up);
  expect_has(message, "value 5 ");
}

TEST_F(Checkpoint, TruncatedFilesAreNamed) {
  write(folder_, small());
  const fs::path file = folder_ / "model.safetensors";
  const auto size = fs::file_size(file);
  for (std::uintmax_t cut : {size - 1, size / 2, std::uintmax_t{100}, std::uintmax_t{9},
                             std::uintmax_t{3}, std::uintmax_t{0}}) {
    fs::resize_file(file, cut);
    expect_has(message_of([&] { CheckpointSource{folder_}; }), file.string());
  }
}

TEST_F(Checkpoint, AnIndexThatLiesIsRefused) {
  write(folder_, small(), {.max_shard_bytes = 2000});
  const fs::path index = folder_ / "model.safetensors.index.json";
  const auto good = nlohmann::json::parse(value_or_throw(read_text(index)));
  const auto refused = [&](const nlohmann::json& changed, std::string_view part) {
    write_text(index, changed.dump());
    expect_has(message_of([&] { CheckpointSource{folder_}; }), part);
  };
  auto changed = good;
  changed["weight_map"]["model.norm.weight"] = "../outside.safetensors";
  refused(changed, "no file of this folder");
  changed = good;
  changed["weight_map"]["model.norm.weight"] = "model-00001-of-00099.safetensors";
  refused(changed, "model-00001-of-00099.safetensors");
  changed = good;
  changed["weight_map"]["model.norm.weight"] = changed["weight_map"]["model.embed_tokens.weight"];
  refused(changed, "but the index says so");
  refused(nlohmann::json::object(), "weight_map");
  write_text(index, good.dump());
  CheckpointSource{folder_};
  fs::copy_file(folder_ / good["weight_map"]["model.norm.weight"].get<std::string>(),
                folder_ / "model.safetensors");
  expect_has(message_of([&] { CheckpointSource{folder_}; }), "both");
}

TEST_F(Checkpoint, TheWriterRefusesWhatIsNotAWholeModel) {
  const ModelConfig config = small();
  {
    CheckpointWriter writer(folder_, config);
    Made made = make(config, {Role::kQ, {1}, {}});
    expect_has(message_of([&] { writer.put(made.weight); }), "before begin");
    writer.begin({}, {});
    made.values[3] = std::numeric_limits<float>::quiet_NaN();
    expect_has(message_of([&] { writer.put(made.weight); }), "q_proj");
    made.values[3] = 3.4e38f;  // rounds to infinity in BF16
    expect_has(message_of([&] { writer.put(made.weight); }), "not finite");
    made.values[3] = 0;
    writer.put(made.weight);
    expect_has(message_of([&] { writer.put(made.weight); }), "twice");
    made.weight.id.role = Role::kK;
    expect_has(message_of([&] { writer.put(made.weight); }), "[12, 8]");
    made.weight.id = {Role::kQ, {2}, {}};
    expect_has(message_of([&] { writer.put(made.weight); }), "no weight of this model");
    Weight packed{{Role::kQ, {0}, {}}, PackedView<const std::uint8_t>{}};
    expect_has(message_of([&] { writer.put(packed); }), "comes in codes");
    expect_has(message_of([&] { writer.commit(); }), "is missing");
  }
  EXPECT_FALSE(fs::exists(folder_));
  EXPECT_FALSE(fs::exists(folder_.string() + ".part"));
}

TEST_F(Checkpoint, CompanionsAreCopiedAndOtherFilesStay) {
  const fs::path companion = folder_ / "companion", target = folder_ / "target";
  fs::create_directories(companion);
  fs::create_directories(target);
  std::ofstream(companion / "tokenizer.json") << "{}";
  std::ofstream(companion / "secret.txt") << "no part of a model";
  std::ofstream(target / "state.bin") << "beside";
  write(target, small(), {.companion = companion});
  EXPECT_TRUE(fs::exists(target / "tokenizer.json"));
  EXPECT_TRUE(fs::exists(target / "state.bin"));
  EXPECT_FALSE(fs::exists(target / "secret.txt"));
  EXPECT_FALSE(fs::exists(target / ".part"));
  EXPECT_EQ(read(target).size(), weight_ids(small()).size());
}

/// Of one file there can be no doubt, since folder and name come last: all else is on the disk.
TEST_F(Checkpoint, EveryFileIsOnTheDiskBeforeItsFolderHasItsName) {
  const fs::path companion = folder_ / "companion", target = folder_ / "target";
  fs::create_directories(companion);
  write_config(small(), companion);
  std::ofstream(companion / "tokenizer.json") << "{}";
  auto& synced = SyncedFiles::all();
  for (const bool is_new : {true, false}) {
    const fs::path stage = is_new ? fs::path(target.string() + ".part") : target / ".part";
    synced.take();
    write(target, small(), {.max_shard_bytes = 600, .companion = companion});
    const std::set<std::string> names = synced.take();
    int files = 0;
    for (const auto& entry : fs::directory_iterator(target)) {
      ++files;
      EXPECT_TRUE(names.contains(stage / entry.path().filename())) << entry.path();
    }
    EXPECT_GE(files, 6);
    EXPECT_TRUE(names.contains(stage));
    EXPECT_TRUE(names.contains(is_new ? folder_ : target));
  }
}

/// R61: the checksums are of what the files hold.
TEST_F(Checkpoint, R61_ChecksumsAreReadBackFromTheFiles) {
  CheckpointWriter writer(folder_ / "c", small());
  writer.begin({}, {});
  for (const WeightId& id : weight_ids(small())) {
    const auto [rows, cols] = weight_shape(small(), id.role);
    const std::vector<float> values = values_of(id, rows * cols);
    writer.put({id, TensorView<const float, 2>{values.data(), {rows, cols}, {cols, 1}}});
  }
  // The last byte of the last tensor, the head.
  std::fstream file(folder_ / "c.part" / "model.safetensors.part",
                    std::ios::in | std::ios::out | std::ios::binary);
  ASSERT_TRUE(file);
  file.seekp(-1, std::ios::end);
  file.put('\x11');
  file.close();
  const std::vector<std::uint32_t> sums = writer.commit();
  int differ = 0;
  const std::vector<WeightId> ids = weight_ids(small());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto [rows, cols] = weight_shape(small(), ids[i].role);
    std::vector<Bf16> values;
    for (const float x : values_of(ids[i], rows * cols)) values.push_back(to_bf16(x));
    differ += sums[i] != crc32c(std::as_bytes(std::span(values)));
  }
  EXPECT_EQ(differ, 1);
}

}  // namespace
}  // namespace lockstep
