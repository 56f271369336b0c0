#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "base/parallel.h"
#include "base/text.h"
#include "model/checkpoint.h"
#include "model/config_json.h"
#include "model/json.h"
#include "model/names.h"
#include "model/safetensors.h"
#include "numerics/bf16.h"

namespace lockstep {
namespace {

using nlohmann::json;

/// A tensor, or one expert's part of a fused one.
struct Place {
  const Safetensors* file = nullptr;
  const TensorInfo* info = nullptr;
  std::uint64_t first = 0, bytes = 0;  // within the tensor

  std::span<const std::byte> values() const { return file->bytes(*info).subspan(first, bytes); }
};

/// The shards of a folder: the one file, or those that the index names.
std::vector<Safetensors> open_shards(const std::filesystem::path& folder) {
  const std::filesystem::path one = folder / "model.safetensors";
  const std::filesystem::path index = folder / "model.safetensors.index.json";
  const bool has_index = std::filesystem::exists(index);
  if (std::filesystem::exists(one)) {
    if (has_index) {
      throw Error(cat({folder.string(),
                       ": has both model.safetensors and an index of shards; "
                       "remove what is stale"}));
    }
    return {value_or_throw(Safetensors::open(one))};
  }
  if (!has_index) {
    throw Usage(cat({folder.string(),
                     ": has neither model.safetensors nor model.safetensors.index.json; name a "
                     "Hugging Face directory that has weights"}));
  }
  const json root = value_or_throw(read_json(index));
  const auto map = root.is_object() ? root.find("weight_map") : root.end();
  if (map == root.end() || !map->is_object()) {
    throw Error(cat({index.string(), ": weight_map is missing, or no object"}));
  }
  std::map<std::string, std::vector<std::string>> by_file;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || file.get_ref<const std::string&>().find('/') != std::string::npos) {
      throw Error(cat({index.string(), ": tensor ", tensor, " is in ", file.dump(),
                       ", which is no file of this folder"}));
    }
    by_file[file.get<std::string>()].push_back(tensor);
  }
  std::vector<Safetensors> shards;
  for (const auto& [file, tensors] : by_file) {
    shards.push_back(value_or_throw(Safetensors::open(folder / file)));
    for (const std::string& tensor : tensors) {
      if (!shards.back().find(tensor)) {
        throw Error(cat({(folder / file).string(), ": tensor ", tensor,
                         " is not in it, but the index says so"}));
      }
    }
  }
  return shards;
}

bool readable(Dtype dtype) {
  return dtype == Dtype::kBf16 || dtype == Dtype::kF16 || dtype == Dtype::kF32;
}

std::string where(const Safetensors& file, const TensorInfo& info) {
  return cat({file.path().string(), ": tensor ", info.name});
}

/// Finds where every weight's values lie.
class Locator {
 public:
  explicit Locator(const ModelConfig& config) : config_(config) {}

  void add(const Safetensors& file, const TensorInfo& info) {
    if (info.name.ends_with("rotary_emb.inv_freq")) return;  // follows from rope_theta
    const auto name = parse_name(info.name);
    if (!name || !in_model(name->id)) return refuse(file, info);
    if (config_.tied_embeddings && name->id.role == WeightId::Role::kHead) return;
    check(file, info, *name);
    if (name->part == Part::kAllExperts) {
      const std::uint64_t bytes = (info.end - info.first) / experts();
      for (std::int32_t e = 0; e < config_.num_experts; ++e) {
        TensorName each = *name;
        each.id.expert = {e};
        // one expert's gate over up is the whole weight
        each.part = Part::kWhole;
        put(each, {&file, &info, static_cast<std::uint64_t>(e) * bytes, bytes});
      }
    } else {
      put(*name, {&file, &info, 0, info.end - info.first});
    }
  }

  /// One place, or gate's and up's. Throws Error where there is none.
  std::vector<Place> of(const WeightId& id, const std::filesystem::path& folder) const {
    if (const Place* whole = find({id, Part::kWhole})) return {*whole};
    std::vector<Place> parts;
    for (const TensorName& tensor : plain_tensors(id)) {
      const Place* part = find(tensor);
      if (!part) throw Error(cat({folder.string(), ": tensor ", name(tensor), " is missing"}));
      parts.push_back(*part);
    }
    return parts;
  }

 private:
  using Key = std::pair<WeightId, Part>;

  std::uint64_t experts() const { return static_cast<std::uint64_t>(config_.num_experts); }

  bool in_model(const WeightId& id) const {
    return id.layer.value < config_.num_layers && id.expert.value < config_.num_experts;
  }

  [[noreturn]] static void refuse(const Safetensors& file, const TensorInfo& info) {
    const bool quantized = info.name.ends_with("_scale") || info.name.ends_with("_scale_2") ||
                           info.name.ends_with("weight_packed");
    throw Error(
        cat({where(file, info), " belongs to no Qwen3-MoE of this config",
             quantized ? "; a quantized checkpoint is not read, only BF16, F16 or F32" : ""}));
  }

  std::vector<std::int64_t> expected_shape(const TensorName& tensor) const {
    const auto [rows, cols] = weight_shape(config_, tensor.id.role);
    switch (tensor.part) {
      case Part::kAllExperts: return {config_.num_experts, rows, cols};
      case Part::kGate:
      case Part::kUp: return {rows / 2, cols};
      default: break;
    }
    if (is_vector(tensor.id.role)) return {cols};
    return {rows, cols};
  }

  void check(const Safetensors& file, const TensorInfo& info, const TensorName& tensor) const {
    if (!readable(info.dtype)) {
      throw Error(cat(
          {where(file, info), " is ", dtype_name(info.dtype), "; BF16, F16 or F32 is expected"}));
    }
    const std::vector<std::int64_t> expected = expected_shape(tensor);
    if (info.shape != expected) {
      throw Error(cat({where(file, info), " is ", shape_text(info.shape), "; config.json asks for ",
                       shape_text(expected)}));
    }
  }

  void put(const TensorName& tensor, const Place& place) {
    const WeightId& id = tensor.id;
    const bool gate_or_up = tensor.part == Part::kGate || tensor.part == Part::kUp;
    const bool fused_too = id.role == WeightId::Role::kGateUp &&
                           (gate_or_up ? find({id, Part::kWhole}) != nullptr
                                       : find({id, Part::kGate}) || find({id, Part::kUp}));
    if (fused_too || !places_.emplace(Key{id, tensor.part}, place).second) {
      throw Error(cat({where(*place.file, *place.info), ": ", to_string(id), " is there twice"}));
    }
  }

  const Place* find(const TensorName& tensor) const {
    const auto found = places_.find({tensor.id, tensor.part});
    return found == places_.end() ? nullptr : &found->second;
  }

  const ModelConfig& config_;
  std::map<Key, Place> places_;
};

float from_f16(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1Fu;
  const std::uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0) {
    const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  const std::uint32_t widened = exponent == 31 ? 255 : exponent + 112;
  return float_of(sign | widened << 23 | mantissa << 13);
}

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

void to_floats(const Place& place, float* out) {
  const std::span<const std::byte> bytes = place.values();
  const auto size = static_cast<std::size_t>(dtype_size(place.info->dtype));
  for (std::size_t i = 0; i < bytes.size() / size; ++i) {
    const std::byte* at = bytes.data() + i * size;
    switch (place.info->dtype) {
      case Dtype::kBf16: out[i] = to_float(static_cast<Bf16>(load<std::uint16_t>(at))); break;
      case Dtype::kF16: out[i] = from_f16(load<std::uint16_t>(at)); break;
      default: out[i] = load<float>(at); break;
    }
  }
}

/// Where the first value stands that is not finite; -1 where all are.
template <typename T>
std::int64_t first_not_finite(const T* values, std::int64_t n) {
  // In blocks: the inner loop has no branch, so that it is vectorized.
  constexpr std::int64_t kBlock = 4096;
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t end = std::min(n, first + kBlock);
    bool finite = true;
    for (std::int64_t i = first; i < end; ++i) finite &= is_finite(values[i]);
    for (std::int64_t i = first; !finite && i < end; ++i) {
      if (!is_finite(values[i])) return i;
    }
  }
  return -1;
}

template <typename T>
void check_finite(const T* values, std::int64_t n, const std::vector<Place>& places) {
  const std::int64_t bad = first_not_finite(values, n);
  if (bad < 0) return;
  const std::size_t part = places.size() == 2 && bad >= n / 2 ? 1 : 0;
  throw Error(cat({where(*places[part].file, *places[part].info), ": value ",
                   bad - (part ? n / 2 : 0), " is not finite; the checkpoint is damaged"}));
}

}  // namespace

struct CheckpointSource::Impl {
  std::filesystem::path folder;
  ModelConfig config;
  std::vector<Safetensors> shards;
  std::vector<WeightId> ids;
  std::vector<std::vector<Place>> places;  // of each id
};

CheckpointSource::CheckpointSource(const std::filesystem::path& folder) {
  auto impl = std::make_unique<Impl>();
  impl->folder = folder;
  impl->config = value_or_throw(read_config(folder));
  impl->shards = open_shards(folder);
  Locator locator(impl->config);
  for (const Safetensors& shard : impl->shards) {
    for (const TensorInfo& info : shard.tensors()) locator.add(shard, info);
  }
  impl->ids = weight_ids(impl->config);
  for (const WeightId& id : impl->ids) impl->places.push_back(locator.of(id, folder));
  impl_ = std::move(impl);
}

CheckpointSource::~CheckpointSource() = default;

const ModelConfig& CheckpointSource::config() const { return impl_->config; }

void CheckpointSource::each(const std::function<void(const Weight&)>& visit) const {
  std::vector<Bf16> codes;
  std::vector<float> floats;
  for (std::size_t i = 0; i < impl_->ids.size(); ++i) {
    const WeightId& id = impl_->ids[i];
    const std::vector<Place>& places = impl_->places[i];
    const auto [rows, cols] = weight_shape(impl_->config, id.role);
    const std::array<std::int64_t, 2> shape = {rows, cols};
    const std::array<std::int64_t, 2> stride = {cols, 1};
    const bool bf16 = std::all_of(places.begin(), places.end(), [](const Place& place) {
      return place.info->dtype == Dtype::kBf16;
    });
    if (bf16) {
      const auto* mapped = reinterpret_cast<const Bf16*>(places[0].values().data());
      const bool aligned = reinterpret_cast<std::uintptr_t>(mapped) % alignof(Bf16) == 0;
      if (places.size() > 1 || !aligned) {
        codes.resize(static_cast<std::size_t>(rows * cols));
        auto* out = reinterpret_cast<std::byte*>(codes.data());
        for (const Place& place : places) {
          std::memcpy(out, place.values().data(), place.bytes);
          out += place.bytes;
        }
        mapped = codes.data();
      }
      check_finite(mapped, rows * cols, places);
      visit({id, TensorView<const Bf16, 2>{mapped, shape, stride}});
    } else {
      floats.resize(static_cast<std::size_t>(rows * cols));
      float* out = floats.data();
      for (const Place& place : places) {
        to_floats(place, out);
        out += static_cast<std::int64_t>(place.bytes) / dtype_size(place.info->dtype);
      }
      check_finite(floats.data(), rows * cols, places);
      visit({id, TensorView<const float, 2>{floats.data(), shape, stride}});
    }
  }
}

}  // namespace lockstep
