#include "rollout/weights_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "base/error.h"
#include "base/text.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/w4a16.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/place_weights.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/quantize_weights.h"
#include "kernels/exact/weight_numbers.h"
#include "model/checksum.h"
#include "model/names.h"
#include "numerics/scale.h"
#include "rollout/probe.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kHalfBytes = 8 << 20;
constexpr std::int64_t kPad = 32;  // rows of a packed matrix

bool on_host(Device device) { return device.kind == Device::Kind::kCpu; }

template <typename T>
TensorView<T, 2> rows_at(void* data, std::int64_t rows, std::int64_t cols, Device device) {
  return {static_cast<T*>(data), {rows, cols}, {cols, 1}, device};
}

/// The bytes of numbers.
kernels::Crc32cList::Rows bytes_of(const Bf16* data, std::int64_t rows, std::int64_t cols,
                                   Device device) {
  return {reinterpret_cast<const std::uint8_t*>(data), {rows, 2 * cols}, {2 * cols, 1}, device};
}

std::uint32_t crc_of(const PackedView<const std::uint8_t>& codes, Stream stream) {
  if (on_host(codes.codes.device)) return checksum(codes);
  const Device device = codes.codes.device;
  kernels::Crc32cList list(device, stream);
  list.add({codes.codes, codes.scales});
  float global = 1.0f;
  if (!codes.global.empty()) {
    copy_bytes(&global, {}, codes.global.data, device, sizeof global, stream);
    synchronize(device, stream);
  }
  return checksum_with_global(list.run()[0], global);
}

}  // namespace

DeviceWeights::DeviceWeights(const Places& places, Device device, Stream stream)
    : at_(places),
      device_(device),
      stream_(stream),
      list_(device, stream),
      sent_(places.order.size()),
      placed_(places.order.size()) {
  std::int64_t codes = 0, scales = 0, numbers = 0, out = 0;
  for (const WeightId& id : at_.order) {
    if (!of_expert(id.role) || format(id) == ExpertFormat::kBf16) continue;
    const Quantizer& rule = at_.contract.weight;
    const auto [rows, cols] = weight_shape(at_.model, id.role);
    codes = std::max(codes, rows * rule.code_bytes(cols));
    scales = std::max(scales, rule.scale_rows(rows) * rule.scale_cols(cols));
    numbers = std::max(numbers, (rows + kPad - 1) / kPad * kPad * cols * 2);
    out = std::max(out, rows);
  }
  for (Half& half : halves_) half = {PinnedBuffer(kHalfBytes, device), Event(device)};
  codes_ = Buffer(device, codes, stream);
  scales_ = Buffer(device, scales, stream);
  global_ = Buffer(device, sizeof(float), stream);
  power_ = Buffer(device, sizeof(float), stream);
  numbers_ = Buffer(device, numbers, stream);
  other_numbers_ = Buffer(device, numbers, stream);
  fill_bytes(other_numbers_.as<void>(), device, 0, numbers, stream);
  y_ = Buffer(device, out * 4, stream);
  errors_ = Buffer(device, std::ssize(at_.order) * 16, stream);
  bad_ = Buffer(device, std::ssize(at_.order) * 4, stream);
  counts_ = Buffer(device, std::ssize(at_.layers) * kernels::kNumFlipCounts * 8, stream);
  list_all();
}

void DeviceWeights::list_all() {
  for (std::size_t i = 0; i < at_.order.size(); ++i) {
    const WeightId& id = at_.order[i];
    const auto [rows, cols] = weight_shape(at_.model, id.role);
    const LayerWeights& layer = at_.layers[static_cast<std::size_t>(id.layer.value)];
    const bool up = id.role == WeightId::Role::kGateUp;
    switch (format(id)) {
      case ExpertFormat::kW4a4:
      case ExpertFormat::kW4a16:
        list_.add(up ? layer.gate_up_codes : layer.down_codes, id.expert.value);
        break;
      case ExpertFormat::kMx: {
        const PackedView<std::uint8_t> place = mx_place(id);
        list_.add({place.codes, place.scales});
        break;
      }
      default: list_.add({bytes_of(place(i), rows, cols, device_)});
    }
  }
  if (at_.model.tied_embeddings) {
    list_.add({bytes_of(at_.head.data, at_.head.out, at_.head.in, device_)});
  }
}

ExpertFormat DeviceWeights::format(const WeightId& id) const {
  if (!of_expert(id.role)) return ExpertFormat::kBf16;
  return at_.layers[static_cast<std::size_t>(id.layer.value)].format;
}

Bf16* DeviceWeights::place(std::size_t index) const {
  const WeightHome& home = at_.homes[index];
  return home.plain.empty() ? home.packed.data + home.first * home.packed.in : home.plain.data();
}

PackedView<std::uint8_t> DeviceWeights::mx_place(const WeightId& id) const {
  const LayerWeights& layer = at_.layers[static_cast<std::size_t>(id.layer.value)];
  const bool up = id.role == WeightId::Role::kGateUp;
  PackedView<std::uint8_t> all = up ? layer.gate_up_mx : layer.down_mx;
  const std::int64_t rows = weight_shape(at_.model, id.role)[0];
  for (auto* part : {&all.codes, &all.scales}) {
    part->data += id.expert.value * rows * part->stride[0];
    part->shape[0] = rows;
  }
  return all;
}

std::int64_t* DeviceWeights::flips_of(Layer layer) const {
  return counts_.as<std::int64_t>() + layer.value * kernels::kNumFlipCounts;
}

void DeviceWeights::begin(bool compare) {
  compares_ = compare;
  flips_.assign(compare ? at_.layers.size() : 0, {});
  probe_error_ = -1;
  probes_.clear();
  placed_probes_.clear();
  fill_bytes(counts_.as<void>(), device_, 0, counts_.bytes(), stream_);
  fill_bytes(bad_.as<void>(), device_, 0x7F, bad_.bytes(), stream_);
}

/// Rows of the host become rows without gaps on the device.
template <typename T>
void DeviceWeights::upload(TensorView<const T, 2> from, void* to) {
  const auto row_bytes = from.shape[1] * static_cast<std::int64_t>(sizeof(T));
  auto* out = static_cast<std::byte*>(to);
  for (std::int64_t row = 0; row < from.shape[0];) {
    Half& half = halves_[next_half_];
    next_half_ = 1 - next_half_;
    half.read.wait();
    if (half.memory.bytes() < row_bytes) half.memory = PinnedBuffer(row_bytes, device_);
    std::int64_t bytes = 0;
    for (; row < from.shape[0] && bytes + row_bytes <= half.memory.bytes(); ++row) {
      std::memcpy(half.memory.as<>() + bytes, from.data + row * from.stride[0],
                  static_cast<std::size_t>(row_bytes));
      bytes += row_bytes;
    }
    copy_bytes(out, device_, half.memory.as<void>(), {}, bytes, stream_);
    half.read.record(stream_);
    out += bytes;
  }
}

/// The same from either side.
template <typename T>
void DeviceWeights::copy(TensorView<const T, 2> from, T* to) {
  if (on_host(from.device)) return upload(from, to);
  const auto row_bytes = from.shape[1] * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t at_once = from.stride[0] == from.shape[1] ? from.shape[0] : 1;
  for (std::int64_t row = 0; row < from.shape[0]; row += at_once) {
    copy_bytes(to + row * from.shape[1], device_, from.data + row * from.stride[0], device_,
               at_once * row_bytes, stream_);
  }
}

void DeviceWeights::put(std::span<const Arrival> arrivals) {
  if (replace(arrivals)) return;
  for (const Arrival& arrival : arrivals) {
    if (const auto* codes = std::get_if<Codes>(&arrival.weight->value)) {
      put_codes(arrival.index, *codes, arrival.probe);
    } else {
      put_numbers(arrival.index, std::get<Numbers>(arrival.weight->value));
    }
  }
}

/// Experts from the device in one go; false, and nothing done, where they are others.
bool DeviceWeights::replace(std::span<const Arrival> arrivals) {
  std::vector<kernels::Replaced> replaced;
  for (const Arrival& arrival : arrivals) {
    const WeightId& id = at_.order[arrival.index];
    const auto* codes = std::get_if<Codes>(&arrival.weight->value);
    if (codes == nullptr || on_host(codes->codes.device) || !in_tiles(format(id))) {
      return false;
    }
    const auto [rows, cols] = weight_shape(at_.model, id.role);
    if (codes->codes.stride[0] != cols / 2 || codes->scales.stride[0] != cols / 16 ||
        reinterpret_cast<std::uintptr_t>(codes->codes.data) % 8 != 0) {
      return false;
    }
    const LayerWeights& layer = at_.layers[static_cast<std::size_t>(id.layer.value)];
    const bool up = id.role == WeightId::Role::kGateUp;
    const kernels::W4a4Weights& to = up ? layer.gate_up_codes : layer.down_codes;
    if (to.scaled) return false;
    replaced.push_back({*codes, to, id.expert.value, compares_ ? flips_of(id.layer) : nullptr});
  }
  for (std::size_t i = 0; i < replaced.size(); i += kernels::kMostReplaced) {
    const std::size_t some = std::min<std::size_t>(kernels::kMostReplaced, replaced.size() - i);
    kernels::w4a4_replace(std::span(replaced).subspan(i, some), stream_);
  }
  for (std::size_t i = 0; i < replaced.size(); ++i) {
    if (compares_) compare(at_.order[arrivals[i].index].layer, replaced[i].now);
    if (arrivals[i].probe) probe_codes(arrivals[i].index, replaced[i].now);
  }
  return true;
}

void DeviceWeights::put_numbers(std::size_t index, Numbers value) {
  std::int32_t* const bad = bad_.as<std::int32_t>() + index;
  if (!kernels::copy_weight(value, place(index), bad, stream_)) {
    if (!on_host(value.device)) kernels::first_nonfinite(value, bad, stream_);
    copy(value, place(index));
  }
  if (at_.order[index].role != WeightId::Role::kEmbedding || !at_.model.tied_embeddings) return;
  copy_bytes(at_.head.data, device_, place(index), device_, value.shape[0] * value.shape[1] * 2,
             stream_);
}

/// Codes on the device, there until the next call.
DeviceWeights::Codes DeviceWeights::on_device(const Codes& codes) {
  if (!on_host(codes.codes.device)) return codes;
  const auto rows = [&](const TensorView<const std::uint8_t, 2>& from, const Buffer& to) {
    upload(from, to.as<void>());
    return rows_at<const std::uint8_t>(to.as<void>(), from.shape[0], from.shape[1], device_);
  };
  Codes there = {rows(codes.codes, codes_), rows(codes.scales, scales_), {}};
  if (codes.global.empty()) return there;
  upload(TensorView<const float, 2>{codes.global.data, {1, 1}, {1, 1}}, global_.as<void>());
  there.global = {global_.as<float>(), {codes.codes.shape[0]}, {0}, device_};
  return there;
}

/// What the codes are worth, on the device, until the next call.
DeviceWeights::Numbers DeviceWeights::numbers_of(std::size_t index, const Codes& value) {
  const auto [rows, cols] = weight_shape(at_.model, at_.order[index].role);
  const Quantizer& rule = at_.contract.weight;
  const auto numbers = rows_at<Bf16>(numbers_.as<void>(), rows, cols, device_);
  if (!on_host(value.codes.device)) {
    kernels::dequantize({.codes = value, .rule = rule, .bf16 = numbers}, stream_);
    return numbers;
  }
  on_host_.resize(static_cast<std::size_t>(rows * cols));
  const TensorView<Bf16, 2> here = {on_host_.data(), {rows, cols}, {cols, 1}};
  kernels::dequantize({.codes = value, .rule = rule, .bf16 = here});
  upload(Numbers(here), numbers.data);
  return numbers;
}

void DeviceWeights::put_codes(std::size_t index, const Codes& value, bool probe) {
  const WeightId& id = at_.order[index];
  const LayerWeights& layer = at_.layers[static_cast<std::size_t>(id.layer.value)];
  if (layer.format == ExpertFormat::kCodeBf16) {
    const Numbers numbers = numbers_of(index, value);
    const auto lies = rows_at<Bf16>(place(index), numbers.shape[0], numbers.shape[1], device_);
    if (compares_) {
      kernels::count_flips(numbers, Numbers(lies), flips_of(id.layer), stream_);
      flips_[static_cast<std::size_t>(id.layer.value)].values +=
          numbers.shape[0] * numbers.shape[1];
    }
    kernels::Crc32cList placed(device_, stream_);
    placed.add({bytes_of(numbers.data, numbers.shape[0], numbers.shape[1], device_)});
    placed_[index] = placed.run()[0];
    sent_[index] = crc_of(value, stream_);
    copy(numbers, lies.data);
    if (probe) this->probe(index, numbers);
    return;
  }
  const Codes codes = on_device(value);
  if (in_tiles(layer.format)) {
    const kernels::W4a4Weights& to =
        id.role == WeightId::Role::kGateUp ? layer.gate_up_codes : layer.down_codes;
    if (compares_) {
      compare(id.layer, codes);
      kernels::count_flips(codes, to, id.expert.value, flips_of(id.layer), stream_);
    }
    kernels::w4a4_fill(to, id.expert.value, 0, codes, stream_, at_.contract.weight);
    if (to.scaled) note_scaled(index, codes);
  } else {
    const PackedView<std::uint8_t> to = mx_place(id);
    if (compares_) {
      compare(id.layer, codes);
      kernels::count_flips(codes, to, flips_of(id.layer), stream_);
    }
    copy(codes.codes, to.codes.data);
    copy(codes.scales, to.scales.data);
  }
  if (probe) probe_codes(index, codes);
}

/// The number beside codes says their factor, which alone the weights keep.
void DeviceWeights::note_scaled(std::size_t index, const Codes& codes) {
  kernels::Crc32cList bytes(device_, stream_);
  bytes.add({codes.codes, codes.scales});
  const std::uint32_t crc = bytes.run()[0];
  float stored = 0.0f;
  copy_bytes(&stored, {}, codes.global.data, device_, sizeof stored, stream_);
  synchronize(device_, stream_);
  sent_[index] = checksum_with_global(crc, stored);
  placed_[index] = checksum_with_global(crc, global_factor(at_.contract.weight, stored));
}

void DeviceWeights::probe_codes(std::size_t index, const Codes& codes) {
  const auto [rows, cols] = weight_shape(at_.model, at_.order[index].role);
  const auto numbers = rows_at<Bf16>(numbers_.as<void>(), rows, cols, device_);
  kernels::dequantize({.codes = codes, .rule = at_.contract.weight, .bf16 = numbers}, stream_);
  probe(index, numbers);
}

/// How many there are to be compared.
void DeviceWeights::compare(Layer layer, const Codes& value) {
  WeightFlips& flips = flips_[static_cast<std::size_t>(layer.value)];
  flips.codes += 2 * value.codes.shape[0] * value.codes.shape[1];
  flips.blocks += value.scales.shape[0] * value.scales.shape[1];
}

/// y [1, out] = the probe's x times the weight where the kernels will read it.
void DeviceWeights::multiply(std::size_t index, std::int64_t in, TensorView<float, 2> y) {
  const WeightId& id = at_.order[index];
  const LayerWeights& layer = at_.layers[static_cast<std::size_t>(id.layer.value)];
  const Probed& probed = probed_.at(in);
  const auto x = rows_at<const Bf16>(probed.x.as<void>(), 1, in, device_);
  const std::int64_t out = y.shape[1];
  if (in_tiles(layer.format)) {
    kernels::W4a4Weights w = codes_at(id);
    w.data = w.expert(id.expert.value);
    w.experts = 1;
    if (layer.format == ExpertFormat::kW4a16) {
      return kernels::w4a16({.x = x, .w = w, .out = y}, stream_);
    }
    kernels::w4a4({.a = codes_of(probed, in),
                   .w = w,
                   .out = y,
                   .rule = at_.contract.activation,
                   .room = {power_.as<float>(), 1}},
                  stream_);
    return;
  }
  kernels::PackedMatrix w = {other_numbers_.as<Bf16>(), out, in, device_};
  if (layer.format == ExpertFormat::kMx) {
    kernels::dequantize({.codes = PackedView<const std::uint8_t>(mx_place(id)),
                         .rule = at_.contract.weight,
                         .bf16 = rows_at<Bf16>(w.data, out, in, device_)},
                        stream_);
  } else {
    w = at_.homes[index].packed;
  }
  kernels::linear_bf16({.x = x, .weight = w, .y = y}, stream_);
}

/// The probe's x of that width, coded where the weight's product takes codes.
const DeviceWeights::Probed& DeviceWeights::probed(const WeightId& id, std::int64_t in) {
  Probed& probed = probed_[in];
  if (probed.x.bytes() > 0) return probed;
  const std::vector<Bf16> x = probe_row(in);
  const Quantizer& rule = at_.contract.activation;
  probed.x = Buffer(device_, 2 * in, stream_);
  copy_bytes(probed.x.as<void>(), device_, x.data(), {}, 2 * in, stream_);
  synchronize(device_, stream_);  // x ends here
  probed.codes = Buffer(device_, rule.code_bytes(in), stream_);
  probed.scales = Buffer(device_, rule.scale_cols(in), stream_);
  probed.global = Buffer(device_, sizeof(float), stream_);
  if (format(id) == ExpertFormat::kW4a4) {
    kernels::quantize(
        {.x = rows_at<const Bf16>(probed.x.as<void>(), 1, in, device_),
         .rule = rule,
         .out = {rows_at<std::uint8_t>(probed.codes.as<void>(), 1, rule.code_bytes(in), device_),
                 rows_at<std::uint8_t>(probed.scales.as<void>(), 1, rule.scale_cols(in), device_),
                 {probed.global.as<float>(), {1}, {1}, device_}}},
        stream_);
  }
  return probed;
}

DeviceWeights::Codes DeviceWeights::codes_of(const Probed& probed, std::int64_t in) const {
  const Quantizer& rule = at_.contract.activation;
  return {rows_at<const std::uint8_t>(probed.codes.as<void>(), 1, rule.code_bytes(in), device_),
          rows_at<const std::uint8_t>(probed.scales.as<void>(), 1, rule.scale_cols(in), device_),
          {probed.global.as<float>(), {1}, {1}, device_}};
}

const kernels::W4a4Weights& DeviceWeights::codes_at(const WeightId& id) const {
  const LayerWeights& layer = at_.layers[static_cast<std::size_t>(id.layer.value)];
  return id.role == WeightId::Role::kGateUp ? layer.gate_up_codes : layer.down_codes;
}

void DeviceWeights::probe(std::size_t index, Numbers worth) {
  const auto [out, in] = worth.shape;
  const Probed& probed = this->probed(at_.order[index], in);
  const auto y = rows_at<float>(y_.as<void>(), 1, out, device_);
  multiply(index, in, y);
  probe_sums({.x = probed.x.as<Bf16>(),
              .worth = worth,
              .y = y.data,
              .sums = errors_.as<double>() + 2 * probes_.size()},
             stream_);
  probes_.push_back(index);
}

CodesPlace DeviceWeights::place(std::size_t index, bool probe) {
  const WeightId& id = at_.order[index];
  const kernels::W4a4Weights& to = codes_at(id);
  CodesPlace place = {.expert = to.expert(id.expert.value),
                      .out = to.out,
                      .cols = to.cols,
                      .flips = compares_ ? flips_of(id.layer) : nullptr};
  if (compares_) {
    WeightFlips& flips = flips_[static_cast<std::size_t>(id.layer.value)];
    flips.codes += std::int64_t{to.out} * to.cols;
    flips.blocks += std::int64_t{to.out} * to.cols / 16;
  }
  if (!probe) return place;
  place.sample_step = probe_step(to.out);
  const std::int64_t bytes = kernels::sample_bytes(to.out, to.cols, place.sample_step);
  placed_probes_.push_back({index, Buffer(device_, bytes, stream_)});
  place.sample = placed_probes_.back().sample.as<>();
  return place;
}

TensorView<Bf16, 2> DeviceWeights::numbers_at(std::size_t index) const {
  const auto shape = weight_shape(at_.model, at_.order[index].role);
  return {place(index), shape, {shape[1], 1}, device_};
}

/// Probes of all weights that were placed, on their way when this returns.
DeviceWeights::ProbeLists DeviceWeights::probe_placed() {
  if (placed_probes_.empty()) return {};
  const auto id_of = [&](const Placed& one) -> const WeightId& { return at_.order[one.index]; };
  std::ranges::sort(placed_probes_, {}, [&](const Placed& one) {
    return std::tuple(id_of(one).layer, id_of(one).role, id_of(one).expert);
  });
  ProbeLists lists;
  std::int64_t outputs = 0;
  for (const Placed& one : placed_probes_) outputs += codes_at(id_of(one)).out;
  lists.y = Buffer(device_, 4 * outputs, stream_);
  const auto experts = static_cast<std::size_t>(at_.model.num_experts);
  std::vector<ProbedGroup> groups;
  auto* y = lists.y.as<float>();
  for (const Placed& one : placed_probes_) {
    const WeightId& id = id_of(one);
    const kernels::W4a4Weights& w = codes_at(id);
    const Probed& by = probed(id, w.cols);
    if (groups.empty() || groups.back().w.data != w.data) {
      groups.push_back({w, format(id), &by, 0, y});
      lists.numbers.resize(lists.numbers.size() + experts + 1);
    }
    ++groups.back().items;
    const std::span offsets = std::span(lists.numbers).last(experts + 1);
    for (auto e = static_cast<std::size_t>(id.expert.value) + 1; e <= experts; ++e) ++offsets[e];
    lists.probes.push_back({.sample = one.sample.as<>(),
                            .x = by.x.as<Bf16>(),
                            .y = y,
                            .sums = errors_.as<double>() + 2 * probes_.size(),
                            .out = w.out,
                            .in = w.cols,
                            .step = static_cast<std::int32_t>(probe_step(w.out))});
    probes_.push_back(one.index);
    y += w.out;
  }
  lists.numbers.resize(lists.numbers.size() + experts);
  const auto send = [&](const auto& values, Buffer& to) {
    const auto bytes = std::ssize(values) * static_cast<std::int64_t>(sizeof(values[0]));
    to = Buffer(device_, bytes, stream_);
    copy_bytes(to.as<void>(), device_, values.data(), {}, bytes, stream_);
  };
  send(lists.numbers, lists.numbers_there);
  send(lists.probes, lists.probes_there);
  multiply_placed(groups, lists.numbers_there.as<std::int32_t>());
  probe_sums(lists.probes_there.as<PlacedProbe>(), std::ssize(lists.probes), device_, stream_);
  return lists;
}

/// `numbers` [groups, experts + 1] are offsets, and zeros follow.
void DeviceWeights::multiply_placed(std::span<const ProbedGroup> groups,
                                    const std::int32_t* numbers) {
  const std::int64_t offsets = at_.model.num_experts + 1;
  const std::int32_t* const zeros = numbers + std::ssize(groups) * offsets;
  for (const ProbedGroup& group : groups) {
    if (group.format == ExpertFormat::kW4a16) {
      kernels::w4a16({.x = rows_at<const Bf16>(group.by->x.as<void>(), 1, group.w.cols, device_),
                      .w = group.w,
                      .offsets = {numbers, {offsets}, {1}, device_},
                      .from = {zeros, {group.items}, {1}, device_},
                      .out = {group.y, {group.items, group.w.out}, {group.w.out, 1}, device_}},
                     stream_);
      numbers += offsets;
      continue;
    }
    kernels::w4a4({.a = codes_of(*group.by, group.w.cols),
                   .w = group.w,
                   .offsets = {numbers, {offsets}, {1}, device_},
                   .from = {zeros, {group.items}, {1}, device_},
                   .out = {group.y, {group.items, group.w.out}, {group.w.out, 1}, device_},
                   .rule = at_.contract.activation,
                   .room = {power_.as<float>(), 1}},
                  stream_);
    numbers += offsets;
  }
}

template <typename T>
std::vector<T> DeviceWeights::read(const Buffer& from) const {
  std::vector<T> values(static_cast<std::size_t>(from.bytes()) / sizeof(T));
  copy_bytes(values.data(), {}, from.as<void>(), device_, from.bytes(), stream_);
  synchronize(device_, stream_);
  return values;
}

std::vector<std::uint32_t> DeviceWeights::commit() {
  const ProbeLists lists = probe_placed();
  std::vector<std::uint32_t> crcs = list_.run();
  const auto bad = read<std::int32_t>(bad_);
  const auto errors = read<double>(errors_);
  const auto counts = read<std::int64_t>(counts_);
  placed_probes_.clear();  // their samples have been read: a rollout needs the room
  for (std::size_t i = 0; i < bad.size(); ++i) {
    const std::int64_t rows = weight_shape(at_.model, at_.order[i].role)[0];
    if (bad[i] >= rows) continue;
    throw Error(cat({"weight ", to_string(at_.order[i]), " is not finite in row ", bad[i],
                     "; every weight must be finite"}));
  }
  for (std::size_t i = 0; i < probes_.size(); ++i) {
    const double norm = errors[2 * i + 1];
    const double error = norm > 0 ? std::sqrt(errors[2 * i] / norm) : 0;
    probe_error_ = std::max(probe_error_, error);
    require_probe(at_.order[probes_[i]], error);
  }
  for (std::size_t l = 0; l < flips_.size(); ++l) {
    const std::int64_t* of = counts.data() + l * kernels::kNumFlipCounts;
    flips_[l].flips = of[kernels::kCodeFlips];
    flips_[l].adjacent = of[kernels::kAdjacentFlips];
    flips_[l].scale_flips = of[kernels::kScaleFlips];
    flips_[l].value_flips = of[kernels::kValueFlips];
  }
  const std::uint32_t head = crcs.back();
  crcs.resize(at_.order.size());
  for (std::size_t i = 0; i < crcs.size(); ++i) {
    const WeightId& id = at_.order[i];
    if (format(id) == ExpertFormat::kMx) crcs[i] = checksum_with_global(crcs[i], 1.0f);
    const bool scaled = in_tiles(format(id)) && !at_.contract.weight.global_is_power_of_two;
    if (format(id) == ExpertFormat::kCodeBf16 || scaled) {
      crcs[i] = crcs[i] == placed_[i] ? sent_[i] : ~sent_[i];
    }
    const bool tied = id.role == WeightId::Role::kEmbedding && at_.model.tied_embeddings;
    if (tied && head != crcs[i]) crcs[i] = ~crcs[i];
  }
  return crcs;
}

}  // namespace lockstep::rollout
