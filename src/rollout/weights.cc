#include "rollout/weights.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/dense/w4a16.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/mx_product.h"
#include "kernels/exact/quantize.h"
#include "model/checksum.h"
#include "model/names.h"
#include "numerics/bf16.h"
#include "numerics/scale.h"
#include "rollout/probe.h"
#include "rollout/weights_device.h"

namespace lockstep::rollout {
namespace {

using kernels::PackedMatrix;
using Role = WeightId::Role;

/// `from` becomes the rows of `to` from `first` on.
void copy_rows(const TensorView<const std::uint8_t, 2>& from, std::int64_t first,
               const TensorView<std::uint8_t, 2>& to) {
  for (std::int64_t row = 0; row < from.shape[0]; ++row) {
    std::copy_n(from.data + row * from.stride[0], from.shape[1],
                to.data + (first + row) * to.stride[0]);
  }
}

/// What stands there of the global scale.
std::uint32_t crc_of_header(const kernels::W4a4Weights& weights, std::int32_t expert) {
  return crc32c({weights.expert(expert), kernels::W4a4Weights::kHeaderBytes});
}

constexpr std::int32_t kProbeExperts = 16;

void require_width(const char* name, std::int32_t width, std::int32_t unit, const char* why) {
  if (width > 0 && width % unit == 0) return;
  throw Error(cat({name, " is ", width, "; ", why, " needs a multiple of ", unit}));
}

}  // namespace

Weights::Weights(const Agreement& agreement, Device device, Stream stream, bool packs)
    : model_(agreement.model),
      contract_(agreement.contract),
      order_(weight_ids(model_)),
      device_(device),
      stream_(stream),
      packs_(packs) {
  require_width("hidden", model_.hidden, 2, "the product");
  require_width("expert_width", model_.expert_width, 2, "the product");
  require_width("head_dim", model_.head_dim, 2, "rotary embedding");
  require_width("num_heads", model_.num_heads, model_.num_kv_heads, "sharing KV heads");
  for (const Quantizer* rule : {&contract_.weight, &contract_.activation}) {
    if (!rule->quantizes() || rule->is_wide()) continue;  // FP8's blocks may end early
    require_width("hidden", model_.hidden, rule->block, "quantization in blocks");
    require_width("expert_width", model_.expert_width, rule->block, "quantization in blocks");
  }
  if (contract_.scope != Scope::kRoutedExperts) {
    throw Error("contract.scope is all_linear; this engine quantizes routed_experts alone");
  }
  if (contract_.source != SourceDtype::kBf16) {
    throw Error("contract.source is f32; this engine quantizes what was rounded to bf16 alone");
  }
  for (std::size_t i = 0; i < order_.size(); ++i) index_[order_[i]] = i;
  seen_.resize(order_.size());
  sent_.resize(order_.size());
  placed_.resize(order_.size());
  globals_.resize(order_.size());
  make_room();
  if (device.kind == Device::Kind::kCpu) return;
  there_ = std::make_unique<DeviceWeights>(
      DeviceWeights::Places{model_, contract_, order_, homes_, layers_, head_}, device, stream);
}

Weights::~Weights() = default;

/// Memory for all weights, and where each has its place.
void Weights::make_room() {
  const std::int64_t d = model_.hidden;
  const std::int64_t f = model_.expert_width;
  std::map<WeightId, std::span<Bf16>> vectors;
  const auto room = [&](Role role, Layer layer, std::int64_t size) {
    return vectors[{role, layer, {}}] = vector(size);
  };
  const std::span<Bf16> embedding = room(Role::kEmbedding, {}, model_.vocabulary * d);
  embedding_ = {embedding.data(), {model_.vocabulary, d}, {d, 1}, device_};
  final_norm_ = room(Role::kFinalNorm, {}, d);
  head_ = matrix(model_.vocabulary, d);
  layers_.resize(static_cast<std::size_t>(model_.num_layers));
  for (std::int32_t i = 0; i < model_.num_layers; ++i) {
    LayerWeights& layer = layers_[static_cast<std::size_t>(i)];
    layer.attention_norm = room(Role::kAttentionNorm, {i}, d);
    layer.mlp_norm = room(Role::kMlpNorm, {i}, d);
    layer.q_norm = room(Role::kQNorm, {i}, model_.head_dim);
    layer.k_norm = room(Role::kKNorm, {i}, model_.head_dim);
    layer.qkv = matrix(model_.q_width() + 2 * model_.kv_width(), d);
    layer.o = matrix(d, model_.q_width());
    layer.router = matrix(model_.num_experts, d);
    layer.format = format({i});
    if (in_tiles(layer.format)) {
      layer.gate_up_codes = coded_matrix(2 * model_.expert_width, model_.hidden);
      layer.down_codes = coded_matrix(model_.hidden, model_.expert_width);
    } else if (layer.format == ExpertFormat::kMx) {
      layer.gate_up_mx = mx_matrix(2 * f, d);
      layer.down_mx = mx_matrix(d, f);
    } else {
      layer.gate_up = matrix(2 * f, d, model_.num_experts);
      layer.down = matrix(d, f, model_.num_experts);
    }
  }
  for (const WeightId& id : order_) {
    const auto found = vectors.find(id);
    homes_.push_back(found != vectors.end() ? WeightHome{.plain = found->second} : packed_home(id));
  }
}

std::byte* Weights::take(std::int64_t bytes) {
  const Buffer& memory = memory_.emplace_back(device_, bytes, stream_);
  fill_bytes(memory.as<void>(), device_, 0, bytes, stream_);
  return memory.as<>();
}

std::span<Bf16> Weights::vector(std::int64_t size) {
  return {reinterpret_cast<Bf16*>(take(2 * size)), static_cast<std::size_t>(size)};
}

PackedMatrix Weights::matrix(std::int64_t out, std::int64_t in, std::int64_t copies) {
  std::byte* memory = take(2 * copies * kernels::packed_elements(out, in));
  return {reinterpret_cast<Bf16*>(memory), out, in, device_};
}

kernels::W4a4Weights Weights::coded_matrix(std::int32_t out, std::int32_t in) {
  const std::int64_t bytes = kernels::W4a4Weights::expert_bytes(out, in);
  const bool scaled = !contract_.weight.global_is_power_of_two;
  return {take(model_.num_experts * bytes), model_.num_experts, out, in, device_, scaled};
}

PackedView<std::uint8_t> Weights::mx_matrix(std::int64_t out, std::int64_t in) {
  const std::int64_t rows = model_.num_experts * out;
  const auto plain = [&](std::int64_t cols) {
    auto* memory = reinterpret_cast<std::uint8_t*>(take(rows * cols));
    return TensorView<std::uint8_t, 2>{memory, {rows, cols}, {cols, 1}, device_};
  };
  return {plain(in / 2), plain(in / contract_.weight.block), {}};
}

bool Weights::arrives_as_codes(const WeightId& id) const {
  return of_expert(id.role) && contract_.layers.has(id.layer) &&
         contract_.weight.element != Element::kBf16;
}

ExpertFormat Weights::format(Layer layer) const {
  if (!arrives_as_codes({Role::kGateUp, layer, {}})) return ExpertFormat::kBf16;
  switch (expert_product(contract_)) {
    case ExpertProduct::kNvfp4: return ExpertFormat::kW4a4;
    case ExpertProduct::kMxfp4: return ExpertFormat::kMx;
    case ExpertProduct::kBf16: break;
  }
  return packs_ && is_nvfp4(contract_.weight) && contract_.weight.global_is_power_of_two
             ? ExpertFormat::kW4a16
             : ExpertFormat::kCodeBf16;
}

void Weights::begin(WeightVersion version, ContractId contract) {
  if (state_ == State::kOpen) {
    throw Error(cat({"weights: version ", version.value, " is begun while version ", version_.value,
                     " lacks ", first_missing()}));
  }
  if (contract != contract_.id()) {
    throw Error(
        cat({"weights: they come under contract ", contract.value, ", the engine was built for ",
             contract_.id().value, "; give both the same one"}));
  }
  // A set that was never committed is a mixture, and nothing to be held against.
  probe_error_ = -1;
  const bool compares = state_ == State::kReady;
  flips_.assign(compares ? layers_.size() : 0, {});
  if (there_) there_->begin(compares);
  state_ = State::kOpen;
  version_ = version;
  std::fill(seen_.begin(), seen_.end(), std::uint8_t{0});
}

/// The number of a weight that may be put now.
std::size_t Weights::index_to_put(const WeightId& id) const {
  if (state_ != State::kOpen) {
    throw Error(cat({"weights: ", to_string(id), " was put before begin()"}));
  }
  const auto found = index_.find(id);
  if (found == index_.end()) {
    throw Error(cat({"weight ", to_string(id), " is not one of this model's"}));
  }
  if (seen_[found->second] != 0) throw Error(cat({"weight ", to_string(id), " was put twice"}));
  return found->second;
}

std::size_t Weights::admit(const Weight& weight) const {
  const std::size_t index = index_to_put(weight.id);
  require_kind(weight);
  require_numbers(weight);
  return index;
}

void Weights::put(const Weight& weight) {
  if (there_) return put_all({&weight, 1});
  const std::size_t index = admit(weight);
  if (arrives_as_codes(weight.id)) {
    const auto& codes = std::get<PackedView<const std::uint8_t>>(weight.value);
    sent_[index] = checksum(codes);
    put_codes(weight.id, codes);
  } else {
    place(weight.id, std::get<TensorView<const Bf16, 2>>(weight.value));
    sent_[index] = placed_[index];
  }
  seen_[index] = 1;
}

void Weights::put_all(std::span<const Weight> weights) {
  if (!there_) return WeightSink::put_all(weights);
  std::vector<DeviceWeights::Arrival> arrivals;
  for (const Weight& weight : weights) {
    arrivals.push_back({admit(weight), &weight, arrives_as_codes(weight.id) && probes(weight.id)});
    seen_[arrivals.back().index] = 1;
  }
  there_->put(arrivals);
}

std::optional<CodesPlace> Weights::place(const WeightId& id) {
  const std::size_t index = index_to_put(id);
  const bool exact = in_tiles(format(id.layer)) && contract_.weight.global_is_power_of_two;
  if (!there_ || !of_expert(id.role) || !exact) return {};
  seen_[index] = 1;
  return there_->place(index, probes(id));
}

std::optional<TensorView<Bf16, 2>> Weights::place_numbers(const WeightId& id) {
  const std::size_t index = index_to_put(id);
  const bool twice = id.role == Role::kEmbedding && model_.tied_embeddings;
  if (!there_ || arrives_as_codes(id) || twice) return {};
  seen_[index] = 1;
  return there_->numbers_at(index);
}

std::vector<std::uint32_t> Weights::commit() {
  if (state_ != State::kOpen) throw Error("weights: commit() without begin()");
  const std::string missing = first_missing();
  if (!missing.empty()) {
    throw Error(
        cat({"weights: version ", version_.value, " cannot be committed without ", missing}));
  }
  if (there_) {
    state_ = State::kEmpty;  // unless all is found well
    std::vector<std::uint32_t> checksums = there_->commit();
    flips_ = there_->flips();
    probe_error_ = there_->probe_error();
    state_ = State::kReady;
    return checksums;
  }
  std::vector<std::uint32_t> checksums(order_.size());
  parallel_for(std::ssize(order_), 1, [&](std::int64_t first, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(end); ++i) {
      checksums[i] = held(i);
    }
  });
  state_ = State::kReady;
  return checksums;
}

void Weights::require_ready() const {
  if (state_ == State::kReady) return;
  if (state_ == State::kEmpty) throw Error("weights: none have been put and committed yet");
  throw Error(cat({"weights: version ", version_.value, " has been begun and not committed"}));
}

std::string Weights::first_missing() const {
  const auto count = std::count(seen_.begin(), seen_.end(), std::uint8_t{0});
  if (count == 0) return "";
  const auto first = std::find(seen_.begin(), seen_.end(), std::uint8_t{0}) - seen_.begin();
  const std::string name = to_string(order_[static_cast<std::size_t>(first)]);
  return count == 1 ? name : cat({name, " and ", count - 1, " more"});
}

/// One expert in so many, others each time.
bool Weights::probes(const WeightId& id) const {
  const std::int64_t every = std::min(kProbeExperts, model_.num_experts);
  return id.expert.value % every == version_.value % every;
}

/// Where flips of the layer are counted; nullptr: there was nothing to be held against.
WeightFlips* Weights::flips(Layer layer) {
  return flips_.empty() ? nullptr : &flips_[static_cast<std::size_t>(layer.value)];
}

/// What lies there, about to be overwritten.
void Weights::remember(const void* data, std::int64_t bytes) {
  const auto* first = static_cast<const std::uint8_t*>(data);
  before_.assign(first, first + bytes);
}

Metrics Weights::metrics() const {
  Metrics metrics = rollout::metrics(flips_);
  if (probe_error_ >= 0) metrics["fp4/refit/probe_err"] = probe_error_;
  return metrics;
}

void Weights::put_codes(const WeightId& id, const PackedView<const std::uint8_t>& value) {
  switch (layers_[static_cast<std::size_t>(id.layer.value)].format) {
    case ExpertFormat::kW4a4:
    case ExpertFormat::kW4a16: put_coded(id, value); break;
    case ExpertFormat::kMx: put_mx(id, value); break;
    default: put_values(id, value);
  }
  if (probes(id)) probe(id, value);
}

/// A product with the weight where the kernels will read it.
void Weights::probe(const WeightId& id, const PackedView<const std::uint8_t>& value) {
  const LayerWeights& layer = layers_[static_cast<std::size_t>(id.layer.value)];
  const bool up = id.role == Role::kGateUp;
  const auto [out, in] = weight_shape(model_, id.role);
  const Quantizer& rule = contract_.activation;
  const auto coded = [&](TensorView<const Bf16, 2> x, auto&& multiply) {
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(rule.code_bytes(in)));
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(rule.scale_cols(in)));
    float global = 1.0f;
    const PackedView<std::uint8_t> a = {{codes.data(), {1, std::ssize(codes)}, {0, 1}},
                                        {scales.data(), {1, std::ssize(scales)}, {0, 1}},
                                        {&global, {1}, {1}}};
    kernels::quantize({.x = x, .rule = rule, .out = a});
    multiply(a);
  };
  const double error = probe_error(
      value, contract_.weight, [&](TensorView<const Bf16, 2> x, TensorView<float, 2> y) {
        if (layer.format == ExpertFormat::kW4a4) {
          kernels::W4a4Weights w = up ? layer.gate_up_codes : layer.down_codes;
          w.data = w.expert(id.expert.value);
          w.experts = 1;
          coded(x, [&](const auto& a) { kernels::w4a4({.a = a, .w = w, .out = y, .rule = rule}); });
        } else if (layer.format == ExpertFormat::kW4a16) {
          kernels::W4a4Weights w = up ? layer.gate_up_codes : layer.down_codes;
          w.data = w.expert(id.expert.value);
          w.experts = 1;
          kernels::w4a16({.x = x, .w = w, .out = y});
        } else if (layer.format == ExpertFormat::kMx) {
          PackedView<std::uint8_t> w = up ? layer.gate_up_mx : layer.down_mx;
          for (auto* part : {&w.codes, &w.scales}) {
            part->data += id.expert.value * out * part->stride[0];
            part->shape[0] = out;
          }
          coded(x, [&](const auto& a) { kernels::mx_product({.a = a, .w = w, .out = y}); });
        } else {
          PackedMatrix w = up ? layer.gate_up : layer.down;
          w.data += id.expert.value * kernels::packed_elements(w.out, w.in);
          kernels::linear_bf16({.x = x, .weight = w, .y = y}, {});
        }
      });
  probe_error_ = std::max(probe_error_, error);
  require_probe(id, error);
}

void Weights::put_coded(const WeightId& id, const PackedView<const std::uint8_t>& value) {
  const LayerWeights& layer = layers_[static_cast<std::size_t>(id.layer.value)];
  const kernels::W4a4Weights& to =
      id.role == Role::kGateUp ? layer.gate_up_codes : layer.down_codes;
  const auto* memory = reinterpret_cast<const std::uint8_t*>(to.expert(id.expert.value));
  const std::int64_t bytes = kernels::W4a4Weights::expert_bytes(to.out, to.cols);
  WeightFlips* const flips = this->flips(id.layer);
  if (flips != nullptr) remember(memory, bytes);
  kernels::w4a4_fill(to, id.expert.value, 0, value, {}, contract_.weight);
  placed_[index_.at(id)] = crc_of_header(to, id.expert.value);
  globals_[index_.at(id)] = value.global.data[0];
  if (flips == nullptr) return;
  const std::int64_t tile = kernels::W4a4Weights::tile_bytes(to.cols);
  const auto codes = static_cast<std::size_t>(to.cols / 16 * 128);
  for (std::int64_t at = kernels::W4a4Weights::kHeaderBytes; at < bytes; at += tile) {
    const std::uint8_t *then = before_.data() + at, *now = memory + at;
    flips->add_codes({then, codes}, {now, codes});
    flips->add_scales({then + codes, codes / 8}, {now + codes, codes / 8});
  }
}

void Weights::put_mx(const WeightId& id, const PackedView<const std::uint8_t>& value) {
  const LayerWeights& layer = layers_[static_cast<std::size_t>(id.layer.value)];
  const PackedView<std::uint8_t>& to = id.role == Role::kGateUp ? layer.gate_up_mx : layer.down_mx;
  const auto copy = [&](const auto& from, const auto& into, const auto& count) {
    const std::int64_t first = id.expert.value * from.shape[0];
    const std::uint8_t* now = into.data + first * into.stride[0];
    const auto bytes = static_cast<std::size_t>(from.shape[0] * into.stride[0]);
    WeightFlips* const flips = this->flips(id.layer);
    if (flips != nullptr) remember(now, static_cast<std::int64_t>(bytes));
    copy_rows(from, first, into);
    if (flips != nullptr) count(*flips, std::span(now, bytes));
  };
  copy(value.codes, to.codes, [&](WeightFlips& flips, std::span<const std::uint8_t> now) {
    flips.add_codes(before_, now);
  });
  copy(value.scales, to.scales, [&](WeightFlips& flips, std::span<const std::uint8_t> now) {
    flips.add_scales(before_, now);
  });
}

void Weights::put_values(const WeightId& id, const PackedView<const std::uint8_t>& value) {
  const LayerWeights& layer = layers_[static_cast<std::size_t>(id.layer.value)];
  const PackedMatrix& to = id.role == Role::kGateUp ? layer.gate_up : layer.down;
  const std::int64_t size = kernels::packed_elements(to.out, to.in);
  const Bf16* memory = to.data + id.expert.value * size;
  WeightFlips* const flips = this->flips(id.layer);
  if (flips != nullptr) remember(memory, 2 * size);
  const auto shape = weight_shape(model_, id.role);
  dequantized_.resize(static_cast<std::size_t>(shape[0] * shape[1]));
  const TensorView<Bf16, 2> plain = {dequantized_.data(), shape, {shape[1], 1}};
  kernels::dequantize({.codes = value, .rule = contract_.weight, .bf16 = plain});
  place(id, plain);
  if (flips == nullptr) return;
  std::vector<std::uint16_t> now(static_cast<std::size_t>(size)), then(now.size());
  std::memcpy(now.data(), memory, before_.size());
  std::memcpy(then.data(), before_.data(), before_.size());
  flips->add_values(then, now);
}

WeightHome Weights::packed_home(const WeightId& id) const {
  const auto expert = [&](PackedMatrix base) {
    base.data += id.expert.value * kernels::packed_elements(base.out, base.in);
    return WeightHome{.packed = base};
  };
  if (id.role == Role::kHead) return {.packed = head_};
  const LayerWeights& layer = layers_[static_cast<std::size_t>(id.layer.value)];
  switch (id.role) {
    case Role::kQ: return {.packed = layer.qkv};
    case Role::kK: return {.packed = layer.qkv, .first = model_.q_width()};
    case Role::kV: return {.packed = layer.qkv, .first = model_.q_width() + model_.kv_width()};
    case Role::kO: return {.packed = layer.o};
    case Role::kRouter: return {.packed = layer.router};
    case Role::kGateUp: return expert(layer.gate_up);
    default: return expert(layer.down);
  }
}

void Weights::place(const WeightId& id, TensorView<const Bf16, 2> value) {
  placed_[index_.at(id)] = checksum(value);
  const WeightHome& to = home(id);
  if (to.plain.empty()) return kernels::pack_rows(value, to.first, to.packed);
  Bf16* out = to.plain.data();
  for (std::int64_t row = 0; row < value.shape[0]; ++row) {
    out = std::copy_n(value.data + row * value.stride[0], value.shape[1], out);
  }
  if (id.role == Role::kEmbedding && model_.tied_embeddings) kernels::pack_rows(value, 0, head_);
}

namespace {

std::uint32_t crc_of_rows(const PackedMatrix& from, std::int64_t first, std::int64_t rows) {
  std::vector<Bf16> values(static_cast<std::size_t>(from.in));
  std::uint32_t crc = 0;
  for (std::int64_t row = first; row < first + rows; ++row) {
    kernels::unpack_row(from, row, values);
    crc = crc32c(std::as_bytes(std::span(values)), crc);
  }
  return crc;
}

}  // namespace

/// The checksum of a weight as it came, from what lies in memory now. Codes that are kept as BF16
/// cannot be read back: where the BF16 is as it was placed, it stands for them.
std::uint32_t Weights::held(std::size_t index) {
  const WeightId& id = order_[index];
  const ExpertFormat kept = of_expert(id.role) ? format(id.layer) : ExpertFormat::kBf16;
  if (in_tiles(kept) || kept == ExpertFormat::kMx) return held_codes(index);
  const WeightHome& at = home(id);
  const std::int64_t rows = weight_shape(model_, id.role)[0];
  std::uint32_t crc =
      at.plain.empty() ? crc_of_rows(at.packed, at.first, rows) : crc32c(std::as_bytes(at.plain));
  if (id.role == Role::kEmbedding && model_.tied_embeddings && crc_of_rows(head_, 0, rows) != crc) {
    crc = ~crc;
  }
  return crc == placed_[index] ? sent_[index] : ~sent_[index];
}

std::uint32_t Weights::held_codes(std::size_t index) const {
  const WeightId& id = order_[index];
  const LayerWeights& layer = layers_[static_cast<std::size_t>(id.layer.value)];
  const bool up = id.role == Role::kGateUp;
  const auto [rows, cols] = weight_shape(model_, id.role);
  const auto bytes = [](const TensorView<const std::uint8_t, 2>& view, std::int64_t row) {
    return std::as_bytes(
        std::span(view.data + row * view.stride[0], static_cast<std::size_t>(view.shape[1])));
  };
  std::uint32_t crc = 0;
  if (layer.format == ExpertFormat::kMx) {
    const PackedView<const std::uint8_t> all = up ? layer.gate_up_mx : layer.down_mx;
    for (const auto& view : {all.codes, all.scales}) {
      for (std::int64_t row = 0; row < rows; ++row) {
        crc = crc32c(bytes(view, id.expert.value * rows + row), crc);
      }
    }
    return checksum_with_global(crc, 1.0f);
  }
  const kernels::W4a4Weights& from = up ? layer.gate_up_codes : layer.down_codes;
  const auto blocks = static_cast<std::size_t>(cols / 16);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(cols / 2));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows) * blocks);
  for (std::int32_t row = 0; row < static_cast<std::int32_t>(rows); ++row) {
    const auto first = static_cast<std::size_t>(row) * blocks;
    kernels::w4a4_read(from, id.expert.value, row, codes, std::span(scales).subspan(first, blocks));
    crc = crc32c(std::as_bytes(std::span(codes)), crc);
  }
  crc = checksum_with_global(crc32c(std::as_bytes(std::span(scales)), crc), globals_[index]);
  return crc_of_header(from, id.expert.value) == placed_[index] ? crc : ~crc;
}

}  // namespace lockstep::rollout
