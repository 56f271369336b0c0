#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/crc32c.h"
#include "base/folder.h"
#include "base/text.h"
#include "model/checkpoint.h"
#include "model/config_json.h"
#include "model/json.h"
#include "model/names.h"
#include "model/safetensors.h"
#include "numerics/bf16.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kIndex = "model.safetensors.index.json";

// What goes along with a model's weights, where the companion has it.
constexpr std::array kCompanions = {"tokenizer.json",
                                    "tokenizer_config.json",
                                    "special_tokens_map.json",
                                    "added_tokens.json",
                                    "vocab.json",
                                    "merges.txt",
                                    "chat_template.jinja",
                                    "generation_config.json"};

struct Shard {
  std::vector<TensorInfo> tensors{};
  std::uint64_t bytes = 0;
};

std::vector<Shard> plan(const ModelConfig& config, std::uint64_t max_bytes) {
  std::vector<Shard> shards(1);
  for (const WeightId& id : weight_ids(config)) {
    const auto [rows, cols] = weight_shape(config, id.role);
    for (const TensorName& tensor : plain_tensors(id)) {
      TensorInfo info{.name = name(tensor), .dtype = Dtype::kBf16};
      const bool vector = is_vector(id.role);
      if (vector) {
        info.shape = {cols};
      } else {
        info.shape = {tensor.part == Part::kWhole ? rows : rows / 2, cols};
      }
      const auto bytes =
          static_cast<std::uint64_t>(sizeof(Bf16) * static_cast<std::size_t>(info.shape[0]) *
                                     static_cast<std::size_t>(vector ? 1 : cols));
      if (shards.back().bytes > 0 && shards.back().bytes + bytes > max_bytes) {
        shards.emplace_back();
      }
      shards.back().bytes += bytes;
      shards.back().tensors.push_back(std::move(info));
    }
  }
  return shards;
}

std::string shard_name(std::size_t i, std::size_t count) {
  if (count == 1) return "model.safetensors";
  const auto five = [](std::size_t number) {
    std::string digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return cat({"model-", five(i + 1), "-of-", five(count), ".safetensors"});
}

/// Files of a folder that hold weights.
std::set<std::string> weight_files(const fs::path& folder) {
  std::set<std::string> names;
  if (!fs::exists(folder)) return names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    if (file == kIndex || (file.starts_with("model") && file.ends_with(".safetensors"))) {
      names.insert(file);
    }
  }
  return names;
}

/// The values as BF16, in rows without gaps.
void to_codes(const TensorView<const Bf16, 2>& view, std::vector<Bf16>& codes) {
  codes.clear();
  for (std::int64_t r = 0; r < view.shape[0]; ++r) {
    for (std::int64_t c = 0; c < view.shape[1]; ++c) {
      codes.push_back(view.data[r * view.stride[0] + c * view.stride[1]]);
    }
  }
}

void to_codes(const TensorView<const float, 2>& view, std::vector<Bf16>& codes) {
  codes.clear();
  for (std::int64_t r = 0; r < view.shape[0]; ++r) {
    for (std::int64_t c = 0; c < view.shape[1]; ++c) {
      codes.push_back(to_bf16(view.data[r * view.stride[0] + c * view.stride[1]]));
    }
  }
}

}  // namespace

struct CheckpointWriter::Impl {
  fs::path folder;
  fs::path stage;  // where files lie until commit
  bool is_new = false;
  ModelConfig config;
  CheckpointOptions options;
  std::vector<Shard> shards;
  std::vector<SafetensorsWriter> files;
  std::map<std::string, std::size_t> file_of;  // tensor name -> index into files
  std::set<WeightId> there;                    // what has come
  std::vector<Bf16> codes;

  void open();
  void check(const Weight& weight, const std::array<std::int64_t, 2>& shape) const;
  std::vector<std::uint32_t> written() const;
  void write_companions() const;
  void write_index() const;
  void move_in() const;
};

CheckpointWriter::CheckpointWriter(const fs::path& folder, const ModelConfig& config,
                                   const CheckpointOptions& options)
    : impl_(std::make_unique<Impl>()) {
  check_config(config, folder.string());
  impl_->folder = folder.has_filename() ? folder : folder.parent_path();
  impl_->config = config;
  impl_->options = options;
  impl_->shards = plan(config, options.max_shard_bytes);
  impl_->is_new = !fs::exists(impl_->folder);
  impl_->stage =
      impl_->is_new ? fs::path(impl_->folder.string() + ".part") : impl_->folder / ".part";
  std::set<std::string> kept = weight_files(impl_->folder);
  for (std::size_t i = 0; i < impl_->shards.size(); ++i) {
    kept.erase(shard_name(i, impl_->shards.size()));
  }
  if (impl_->shards.size() > 1) kept.erase(std::string(kIndex));
  if (!kept.empty()) {
    throw Error(cat({folder.string(), ": holds ", *kept.begin(),
                     " of another checkpoint; name another folder"}));
  }
}

CheckpointWriter::~CheckpointWriter() {
  impl_->files.clear();
  std::error_code ignored;
  fs::remove_all(impl_->stage, ignored);
}

void CheckpointWriter::Impl::open() {
  std::error_code failed;
  fs::remove_all(stage, failed);
  make_folder(stage, "the checkpoint's folder", "name a place that you may write");
  there.clear();
  files.clear();
  files.reserve(shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const TensorInfo& info : shards[i].tensors) file_of[info.name] = i;
    files.emplace_back(stage / shard_name(i, shards.size()), shards[i].tensors,
                       std::map<std::string, std::string>{{"format", "pt"}});
  }
}

void CheckpointWriter::begin(WeightVersion, ContractId) { impl_->open(); }

void CheckpointWriter::Impl::check(const Weight& weight,
                                   const std::array<std::int64_t, 2>& shape) const {
  const std::string what = cat({folder.string(), ": ", to_string(weight.id)});
  if (files.empty()) throw Error(cat({what, " is put before begin"}));
  if (there.contains(weight.id)) throw Error(cat({what, " is put twice"}));
  if (!file_of.contains(name(plain_tensors(weight.id)[0]))) {
    throw Error(cat({what, " is no weight of this model"}));
  }
  const auto expected = weight_shape(config, weight.id.role);
  if (shape != expected) {
    throw Error(cat({what, " is ", shape_text(shape), "; ", shape_text(expected), " is expected"}));
  }
}

void CheckpointWriter::put(const Weight& weight) {
  Impl& impl = *impl_;
  std::visit(
      [&](const auto& value) {
        if constexpr (requires { value.shape; }) {
          impl.check(weight, value.shape);
          to_codes(value, impl.codes);
        } else {
          throw Error(cat({impl.folder.string(), ": ", to_string(weight.id),
                           " comes in codes; a plain checkpoint takes BF16 or FP32"}));
        }
      },
      weight.value);
  for (std::size_t i = 0; i < impl.codes.size(); ++i) {
    if (is_finite(impl.codes[i])) continue;
    throw Error(cat({impl.folder.string(), ": value ", i, " of ", to_string(weight.id),
                     " is not finite in BF16; nothing is written"}));
  }
  const std::span bytes = std::as_bytes(std::span(impl.codes));
  const std::vector<TensorName> tensors = plain_tensors(weight.id);
  const std::size_t part = bytes.size() / tensors.size();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string tensor = name(tensors[i]);
    impl.files[impl.file_of.at(tensor)].write(tensor, bytes.subspan(i * part, part));
  }
  impl.there.insert(weight.id);
}

/// The checksums of what the files hold, in order.
std::vector<std::uint32_t> CheckpointWriter::Impl::written() const {
  std::vector<Safetensors> shard;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shard.push_back(value_or_throw(Safetensors::open(stage / shard_name(i, shards.size()))));
  }
  std::vector<std::uint32_t> crcs;
  for (const WeightId& id : weight_ids(config)) {
    crcs.push_back(0);
    for (const TensorName& tensor : plain_tensors(id)) {
      const Safetensors& file = shard[file_of.at(name(tensor))];
      crcs.back() = crc32c(file.bytes(*file.find(name(tensor))), crcs.back());
    }
  }
  return crcs;
}

void CheckpointWriter::Impl::write_companions() const {
  write_config(config, stage);
  for (const auto& [file, text] : options.texts) write_text(stage / file, text);
  if (options.companion.empty()) return;
  for (const char* file : kCompanions) {
    const fs::path from = options.companion / file;
    if (!fs::exists(from)) continue;
    // The companion's generation config may say more; but not another stop token.
    if (std::string_view(file) == "generation_config.json") {
      const auto theirs = read_config(options.companion);
      if (!theirs || theirs->stop_tokens != config.stop_tokens) continue;
    }
    std::error_code failed;
    fs::copy_file(from, stage / file, fs::copy_options::overwrite_existing, failed);
    if (failed) throw Error(cat({from.string(), ": cannot copy: ", failed.message()}));
  }
}

void CheckpointWriter::Impl::write_index() const {
  if (shards.size() == 1) return;
  nlohmann::json map = nlohmann::json::object();
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const TensorInfo& info : shards[i].tensors) map[info.name] = shard_name(i, shards.size());
    total += shards[i].bytes;
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  write_text(stage / kIndex, index.dump(2) + "\n");
}

void CheckpointWriter::Impl::move_in() const {
  for (const auto& entry : fs::directory_iterator(stage)) sync_file(entry.path());
  sync_folder(stage);
  if (is_new) {
    fs::rename(stage, folder);
    sync_folder(fs::absolute(folder).parent_path());
    return;
  }
  std::vector<fs::path> rest;
  for (const auto& entry : fs::directory_iterator(stage)) {
    if (entry.path().filename() != "config.json") rest.push_back(entry.path().filename());
  }
  for (const fs::path& file : rest) fs::rename(stage / file, folder / file);
  fs::rename(stage / "config.json", folder / "config.json");
  fs::remove(stage);
  sync_folder(folder);
}

std::vector<std::uint32_t> CheckpointWriter::commit() {
  Impl& impl = *impl_;
  for (const WeightId& id : weight_ids(impl.config)) {
    if (impl.there.contains(id)) continue;
    throw Error(
        cat({impl.folder.string(), ": ", to_string(id), " is missing; nothing is written"}));
  }
  for (SafetensorsWriter& file : impl.files) file.commit();
  impl.files.clear();
  std::vector<std::uint32_t> crcs = impl.written();
  try {
    impl.write_index();
    impl.write_companions();
    impl.move_in();
  } catch (const fs::filesystem_error& error) {
    throw Error(cat({impl.folder.string(), ": cannot write: ", error.code().message()}));
  }
  return crcs;
}

}  // namespace lockstep
