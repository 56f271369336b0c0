#include "train/parameters.h"

#include <algorithm>
#include <cassert>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/parallel.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/fake_quantize.h"
#include "kernels/exact/quantize.h"
#include "model/names.h"
#include "numerics/bf16.h"
#include "ops/device.h"
#include "train/arrays.h"

namespace lockstep::train {
namespace {

constexpr std::int64_t kAlign = 16;  // floats: 64 bytes

/// The order in memory: by layer, q, k and v together, then all gate_ups, then all downs.
auto memory_order(const WeightId& id) {
  const bool of_a_layer = of_layer(id.role);
  const int group = of_a_layer ? 1 : id.role == WeightId::Role::kEmbedding ? 0 : 2;
  return std::tuple(group, of_a_layer ? id.layer.value : 0, static_cast<int>(id.role),
                    of_expert(id.role) ? id.expert.value : 0);
}

/// Continues what came before without a gap.
bool continues(const WeightId& id) {
  return id.role == WeightId::Role::kK || id.role == WeightId::Role::kV ||
         (of_expert(id.role) && id.expert.value > 0);
}

}  // namespace

Floats::Floats(std::int64_t size, Device device, Stream stream) : size_(size), device_(device) {
  if (on_cpu()) {
    data_.reset(static_cast<float*>(
        std::aligned_alloc(64, (static_cast<std::size_t>(size) * sizeof(float) + 64) / 64 * 64)));
    if (!data_) throw std::bad_alloc();
  } else {
    there_ = Buffer(device, size * static_cast<std::int64_t>(sizeof(float)), stream);
  }
  zero(stream);
}

void Floats::zero(Stream stream) const {
  if (on_cpu()) {
    std::fill_n(data_.get(), size_, 0.0f);
  } else {
    fill_bytes(there_.as<void>(), device_, 0, there_.bytes(), stream);
  }
}

namespace {

std::int64_t bf16_bytes(const Parameters::Numbers& numbers, Device device, std::int64_t size) {
  const bool there = device.kind != Device::Kind::kCpu && numbers.bf16;
  return there ? size * static_cast<std::int64_t>(sizeof(Bf16)) : 0;
}

}  // namespace

Parameters::Parameters(const ModelConfig& config, Numbers numbers, Device device, Stream stream)
    : numbers_(std::move(numbers)),
      num_experts_(config.num_experts),
      device_(device),
      total_(place(slots_, 0, config)),
      masters(total_, device, stream),
      compute(bf16_bytes(numbers_, device, total_) > 0 ? 0 : total_, device, stream),
      compute_bf16(device, bf16_bytes(numbers_, device, total_), stream),
      moment1(total_, device, stream),
      moment2(total_, device, stream) {
  for (std::size_t i = 0; i < slots_.size(); ++i) index_[slots_[i].id] = i;
  if (numbers_.codes) make_room_for_codes(config, stream);
}

std::int64_t Parameters::place(std::vector<Slot>& slots, std::int64_t offset,
                               const ModelConfig& config) {
  for (const WeightId& id : weight_ids(config)) {
    const auto [rows, cols] = weight_shape(config, id.role);
    slots.push_back({id, 0, rows, cols});
  }
  std::vector<Slot*> order;
  for (Slot& slot : slots) order.push_back(&slot);
  std::ranges::sort(order, {}, [](const Slot* slot) { return memory_order(slot->id); });
  for (Slot* slot : order) {
    if (!continues(slot->id)) offset = (offset + kAlign - 1) / kAlign * kAlign;
    slot->offset = offset;
    offset += slot->rows * slot->cols;
  }
  return offset;
}

const Slot& Parameters::slot(const WeightId& id) const {
  const auto found = index_.find(id);
  if (found == index_.end()) throw Error("the model has no weight " + to_string(id));
  return slots_[found->second];
}

std::span<float> Parameters::of(const Floats& numbers, const Slot& slot) const {
  return numbers.all().subspan(static_cast<std::size_t>(slot.offset), slot.count());
}

std::span<const float> Parameters::read(const Floats& numbers, const Slot& slot,
                                        std::vector<float>& room, Stream stream) const {
  if (device_.kind == Device::Kind::kCpu) return of(numbers, slot);
  room.resize(slot.count());
  copy_bytes(room.data(), {}, numbers.data() + slot.offset, device_,
             static_cast<std::int64_t>(slot.count() * sizeof(float)), stream);
  synchronize(device_, stream);
  return room;
}

void Parameters::write(const Floats& numbers, const Slot& slot, const float* values, Device from,
                       Stream stream) const {
  copy_bytes(numbers.data() + slot.offset, device_, values, from,
             static_cast<std::int64_t>(slot.count() * sizeof(float)), stream);
}

ops::CodeMatrix Parameters::room_for_codes(std::int32_t experts, std::int32_t out,
                                           std::int32_t cols, Stream stream) {
  const auto take = [&](std::int64_t bytes) {
    const Buffer& room = code_memory_.emplace_back(device_, bytes, stream);
    fill_bytes(room.as<void>(), device_, 0, bytes, stream);
    code_bytes_ += bytes;
    return room.as<>();
  };
  ops::CodeMatrix matrix = {.experts = experts, .out = out};
  const Quantizer& rule = numbers_.contract.weight;
  if (!rule.is_mx()) {
    matrix.nvfp4 = {take(experts * kernels::W4a4Weights::expert_bytes(out, cols)),
                    experts,
                    out,
                    cols,
                    device_,
                    !rule.global_is_power_of_two};
    return matrix;
  }
  const std::int64_t rows = std::int64_t{experts} * out;
  const auto plain = [&](std::int64_t width) {
    auto* bytes = reinterpret_cast<std::uint8_t*>(take(rows * width));
    return TensorView<std::uint8_t, 2>{bytes, {rows, width}, {width, 1}, device_};
  };
  matrix.mxfp4 = {plain(rule.code_bytes(cols)), plain(rule.scale_cols(cols)), {}};
  return matrix;
}

void Parameters::make_room_for_codes(const ModelConfig& config, Stream stream) {
  for (std::int32_t l = 0; l < config.num_layers; ++l) {
    if (!numbers_.contract.layers.has(Layer{l})) {
      codes_.emplace_back();
      continue;
    }
    codes_.push_back(
        {.gate_up =
             room_for_codes(config.num_experts, 2 * config.expert_width, config.hidden, stream),
         .down = room_for_codes(config.num_experts, config.hidden, config.expert_width, stream)});
  }
}

const ExpertCodes* Parameters::codes(Layer layer) const {
  if (codes_.empty()) return nullptr;
  const ExpertCodes& of_layer = codes_[static_cast<std::size_t>(layer.value)];
  return of_layer.gate_up.empty() ? nullptr : &of_layer;
}

/// Where the exact product will read them.
void Parameters::keep_codes(const Slot& slot, const PackedView<const std::uint8_t>& packed,
                            Stream stream) const {
  const ExpertCodes* kept = codes(slot.id.layer);
  if (kept == nullptr) return;
  const ops::CodeMatrix& to = slot.id.role == WeightId::Role::kDown ? kept->down : kept->gate_up;
  const std::int32_t expert = slot.id.expert.value;
  const Quantizer& rule = numbers_.contract.weight;
  if (!rule.is_mx()) return kernels::w4a4_fill(to.nvfp4, expert, 0, packed, stream, rule);
  const auto copy = [&](const TensorView<const std::uint8_t, 2>& from,
                        const TensorView<std::uint8_t, 2>& into) {
    assert(from.stride[0] == into.stride[0] && "rows lie without gaps");
    copy_bytes(into.data + expert * slot.rows * into.stride[0], device_, from.data, device_,
               slot.rows * from.stride[0], stream);
  };
  copy(packed.codes, to.mxfp4.codes);
  copy(packed.scales, to.mxfp4.scales);
}

/// Master -> codes -> what the codes are worth: what sync sends, seen from this side.
void Parameters::fake_quantize(const Slot& slot) const {
  const Quantizer& rule = numbers_.contract.weight;
  const std::span<float> master = of(masters, slot), out = of(compute, slot);
  const std::int64_t cols = slot.cols;
  const std::int64_t bytes = rule.code_bytes(cols);
  const std::int64_t bands = rule.scale_rows(slot.rows), blocks = rule.scale_cols(cols);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(slot.rows * bytes));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(bands * blocks));
  const std::int64_t macros = rule.macro_cols(cols);
  std::vector<std::uint8_t> mantissas(static_cast<std::size_t>(slot.rows * macros));
  float global = 0.0f;
  const PackedView<std::uint8_t> packed = {
      .codes = {codes.data(), {slot.rows, bytes}, {bytes, 1}},
      .scales = {scales.data(), {bands, blocks}, {blocks, 1}},
      .global = {&global, {slot.rows}, {0}},
      .mantissas = {mantissas.data(), {slot.rows, macros}, {macros, 1}}};
  try {
    kernels::quantize_weight({master.data(), {slot.rows, cols}, {cols, 1}}, rule, packed);
  } catch (const Error& error) {
    throw Error(to_string(slot.id) + ": " + error.what());
  }
  kernels::dequantize(
      {.codes = packed, .rule = rule, .f32 = {out.data(), {slot.rows, cols}, {cols, 1}}});
  if (!rule.is_guidable()) {  // the operand that the rollout has, or would have, of these codes
    std::ranges::transform(out, out.begin(), [](float x) { return to_float(to_bf16(x)); });
  }
  keep_codes(slot, packed);
}

bool Parameters::is_fp4(const Slot& slot) const {
  return numbers_.fp4_experts && of_expert(slot.id.role) &&
         numbers_.contract.layers.has(slot.id.layer);
}

/// What quantize_weight() says of a weight, of all of them at once.
void Parameters::check_finite(Stream stream) const {
  const std::int64_t at = first_nonfinite(masters, stream);
  if (at < 0) return;
  for (const Slot& slot : slots_) {
    const std::int64_t inside = at - slot.offset;
    if (inside < 0 || inside >= slot.rows * slot.cols) continue;
    throw Error(to_string(slot.id) + ": [" + std::to_string(inside / slot.cols) + ", " +
                std::to_string(inside % slot.cols) + "] is not finite");
  }
}

/// All experts of a layer and role at once, whose BF16 numbers become what their codes are worth.
/// False where there is no kernel for that.
bool Parameters::fake_quantize_at_once(Stream stream) const {
  if (!numbers_.bf16) return false;
  Bf16* const rounded = compute_bf16.as<Bf16>();
  const Buffer amax(device_, num_experts_ * std::int64_t{sizeof(std::uint32_t)}, stream);
  std::vector<kernels::FakeQuantizeArgs> all;
  for (const Slot& slot : slots_) {
    if (!is_fp4(slot) || slot.id.expert.value != 0) continue;  // the others lie behind it
    all.push_back({.x = {rounded + slot.offset,
                         {num_experts_, slot.rows, slot.cols},
                         {slot.rows * slot.cols, slot.cols, 1},
                         device_},
                   .rule = numbers_.contract.weight,
                   .amax = amax.as<std::uint32_t>()});
  }
  if (!std::ranges::all_of(all, kernels::fakes_at_once)) return false;
  for (const kernels::FakeQuantizeArgs& args : all) kernels::fake_quantize(args, stream);
  return true;
}

/// The same numbers on a CUDA device: all are rounded at once, then the experts', in place.
void Parameters::refresh_on_device(Stream stream) const {
  check_finite(stream);
  Bf16* const rounded = compute_bf16.as<Bf16>();
  if (!numbers_.bf16) {
    copy_bytes(compute.data(), device_, masters.data(), device_, 4 * total_, stream);
  } else {
    round_to_bf16(masters, rounded, stream);
  }
  if (!numbers_.fp4_experts) return;
  if (codes_.empty() && fake_quantize_at_once(stream)) return;
  const Quantizer& rule = numbers_.contract.weight;
  std::int64_t codes = 0, scales = 0, mantissas = 0, numbers = 0;
  for (const Slot& slot : slots_) {
    if (!is_fp4(slot)) continue;
    codes = std::max(codes, slot.rows * rule.code_bytes(slot.cols));
    scales = std::max(scales, rule.scale_rows(slot.rows) * rule.scale_cols(slot.cols));
    mantissas = std::max(mantissas, slot.rows * rule.macro_cols(slot.cols));
    numbers = std::max(numbers, slot.rows * slot.cols);
  }
  const Buffer code(device_, codes, stream), scale(device_, scales, stream);
  const Buffer mantissa(device_, mantissas, stream), global(device_, sizeof(float), stream);
  const Buffer own(device_, numbers_.bf16 ? 0 : numbers * std::int64_t{sizeof(Bf16)}, stream);
  for (const Slot& slot : slots_) {
    if (!is_fp4(slot)) continue;
    const auto view = [&](const Buffer& bytes, std::int64_t rows, std::int64_t cols) {
      return TensorView<std::uint8_t, 2>{
          bytes.as<std::uint8_t>(), {rows, cols}, {cols, 1}, device_};
    };
    const PackedView<std::uint8_t> packed = {
        .codes = view(code, slot.rows, rule.code_bytes(slot.cols)),
        .scales = view(scale, rule.scale_rows(slot.rows), rule.scale_cols(slot.cols)),
        .global = {global.as<float>(), {slot.rows}, {0}, device_},
        .mantissas = view(mantissa, slot.rows, rule.macro_cols(slot.cols))};
    Bf16* const at = numbers_.bf16 ? rounded + slot.offset : own.as<Bf16>();
    const TensorView<Bf16, 2> bf16 = {at, {slot.rows, slot.cols}, {slot.cols, 1}, device_};
    float* const wide = compute.data() + slot.offset;
    const std::int64_t count = slot.rows * slot.cols;
    if (!numbers_.bf16) {
      round_to_bf16(device_, masters.data() + slot.offset, bf16.data, count, stream);
    }
    kernels::quantize({.x = bf16, .rule = rule, .out = packed}, stream);
    kernels::dequantize({.codes = packed, .rule = rule, .bf16 = bf16}, stream);
    keep_codes(slot, packed, stream);
    if (!numbers_.bf16) widen(device_, bf16.data, wide, count, stream);
  }
}

void Parameters::refresh(Stream stream) {
  if (device_.kind != Device::Kind::kCpu) return refresh_on_device(stream);
  parallel_for(static_cast<std::int64_t>(slots_.size()), 1,
               [&](std::int64_t first, std::int64_t end) {
                 for (std::int64_t i = first; i < end; ++i) {
                   const Slot& slot = slots_[static_cast<std::size_t>(i)];
                   const std::span<float> master = of(masters, slot);
                   const std::span<float> out = of(compute, slot);
                   if (is_fp4(slot)) {
                     fake_quantize(slot);
                   } else if (numbers_.bf16) {
                     std::ranges::transform(master, out.begin(),
                                            [](float x) { return to_float(to_bf16(x)); });
                   } else {
                     std::ranges::copy(master, out.begin());
                   }
                 }
               });
}

namespace {

class MastersSource final : public WeightSource {
 public:
  MastersSource(const Parameters& parameters, std::function<Stream()> order)
      : parameters_(parameters), order_(std::move(order)) {}

  void each(const std::function<void(const Weight&)>& visit) const override {
    // Who visits may read on a stream of its own.
    synchronize(parameters_.device(), order_ ? order_() : Stream{});
    for (const Slot& slot : parameters_.slots()) {
      const float* data = parameters_.masters.data() + slot.offset;
      visit({slot.id, TensorView<const float, 2>{
                          data, {slot.rows, slot.cols}, {slot.cols, 1}, parameters_.device()}});
    }
  }

 private:
  const Parameters& parameters_;
  std::function<Stream()> order_;
};

class MastersSink final : public WeightSink {
 public:
  MastersSink(Parameters& parameters, std::function<void()> committed)
      : parameters_(parameters), committed_(std::move(committed)) {}

  void begin(WeightVersion, ContractId) override {
    missing_.emplace();
    for (const Slot& slot : parameters_.slots()) missing_->insert(slot.id);
  }

  void put(const Weight& weight) override {
    if (!missing_) throw Error("put before begin: " + to_string(weight.id));
    const Slot& slot = parameters_.slot(weight.id);
    const auto* f32 = std::get_if<TensorView<const float, 2>>(&weight.value);
    const bool there = parameters_.device().kind != Device::Kind::kCpu;
    if (there && f32 != nullptr && f32->device == parameters_.device()) {
      require_shape(slot, f32->shape[0], f32->shape[1]);  // refresh() looks at the numbers
      parameters_.write(parameters_.masters, slot, f32->data, f32->device, stream());
      missing_->erase(weight.id);
      return;
    }
    std::vector<float> room(there ? slot.count() : 0);
    const std::span<float> to = there ? std::span(room) : parameters_.of(parameters_.masters, slot);
    if (f32 != nullptr) {
      copy(slot, *f32, to, [](float x) { return x; });
    } else if (const auto* bf16 = std::get_if<TensorView<const Bf16, 2>>(&weight.value)) {
      copy(slot, *bf16, to, [](Bf16 x) { return to_float(x); });
    } else {
      throw Error(to_string(slot.id) + ": FP4 codes cannot become masters; give BF16 or FP32");
    }
    if (there) parameters_.write(parameters_.masters, slot, to.data(), {}, stream());
    missing_->erase(weight.id);
  }

  std::vector<std::uint32_t> commit() override {
    if (!missing_) throw Error("commit before begin");
    if (!missing_->empty()) {
      throw Error(std::to_string(missing_->size()) + " weights are missing, the first is " +
                  to_string(*missing_->begin()));
    }
    missing_.reset();
    committed_();
    std::vector<std::uint32_t> crcs;
    std::vector<float> room;
    for (const Slot& slot : parameters_.slots()) {
      crcs.push_back(
          crc32c(std::as_bytes(parameters_.read(parameters_.masters, slot, room, stream()))));
    }
    return crcs;
  }

 private:
  Stream stream() const { return ops::stream_on(parameters_.device()); }

  static void require_shape(const Slot& slot, std::int64_t rows, std::int64_t cols) {
    if (rows == slot.rows && cols == slot.cols) return;
    throw Error(to_string(slot.id) + " is [" + std::to_string(rows) + ", " + std::to_string(cols) +
                "], the config says [" + std::to_string(slot.rows) + ", " +
                std::to_string(slot.cols) + "]");
  }

  template <typename T, typename Convert>
  static void copy(const Slot& slot, const TensorView<const T, 2>& from, std::span<float> to,
                   Convert&& convert) {
    require_shape(slot, from.shape[0], from.shape[1]);
    for (std::int64_t r = 0; r < slot.rows; ++r) {
      for (std::int64_t c = 0; c < slot.cols; ++c) {
        const float x = convert(from.data[r * from.stride[0] + c * from.stride[1]]);
        if (!is_finite(x)) {
          throw Error(to_string(slot.id) + "[" + std::to_string(r) + ", " + std::to_string(c) +
                      "] is not finite; the checkpoint is damaged");
        }
        to[static_cast<std::size_t>(r * slot.cols + c)] = x;
      }
    }
  }

  Parameters& parameters_;
  std::function<void()> committed_;
  std::optional<std::set<WeightId>> missing_;  // set between begin and commit
};

}  // namespace

std::unique_ptr<WeightSource> masters_source(const Parameters& parameters,
                                             std::function<Stream()> order) {
  return std::make_unique<MastersSource>(parameters, std::move(order));
}

std::unique_ptr<WeightSink> masters_sink(Parameters& parameters, std::function<void()> committed) {
  return std::make_unique<MastersSink>(parameters, std::move(committed));
}

}  // namespace lockstep::train
