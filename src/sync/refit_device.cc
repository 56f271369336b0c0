#include "sync/refit_device.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"
#include "model/names.h"
#include "model/values.h"
#include "numerics/bf16.h"

namespace lockstep::sync {
namespace {

constexpr std::int64_t kSlots = 4096;
constexpr std::size_t kMostWaiting = 512;
constexpr std::size_t kFirstWaiting = 96;  // for the device has nothing to do
constexpr std::int64_t kPlainBytes = 32 << 20;
constexpr std::uint64_t kNone = ~std::uint64_t{0};

std::int64_t bytes_of(const TensorView<const std::uint8_t, 2>& view) {
  return view.shape[0] * view.shape[1];
}

void require_shape(const WeightId& id, const std::array<std::int64_t, 2>& shape,
                   const std::array<std::int64_t, 2>& expected) {
  if (shape == expected) return;
  throw Error(cat({"weight ", to_string(id), " is [", shape[0], ", ", shape[1], "]; expected [",
                   expected[0], ", ", expected[1], "]"}));
}

}  // namespace

DeviceSender::DeviceSender(WeightSink& to, const Contract& contract)
    : to_(to),
      contract_(contract),
      device_(to.device()),
      stream_(to.stream()),
      global_(device_, sizeof(float), stream_),
      error_(device_, stream_),
      sums_(device_, stream_),
      placer_(device_, stream_),
      number_placer_(device_, stream_) {}

/// Room on the device; what was there may be in use until the stream has come so far, and goes
/// back to the pool in its order.
template <typename T>
TensorView<T, 2> DeviceSender::room(Buffer& buffer, std::int64_t rows, std::int64_t cols) {
  const auto bytes = rows * cols * static_cast<std::int64_t>(sizeof(T));
  if (buffer.bytes() < bytes) {
    lists_.clear();  // of bytes that lie elsewhere from now on
    buffer = Buffer(device_, bytes, stream_);
  }
  return {buffer.as<T>(), {rows, cols}, {cols, 1}, device_};
}

std::int64_t DeviceSender::send(const Weight& weight, bool quantize, std::size_t number) {
  if (quantize && place(weight, number)) {
    const auto [rows, cols] = waiting_.back().master.shape;
    if (waiting_.size() == (placed_some_ ? kMostWaiting : kFirstWaiting)) place_waiting();
    return rows * (cols / 2 + cols / 16) + 4;
  }
  if (!quantize && place_numbers(weight, number)) {
    const auto [rows, cols] = waiting_numbers_.back().master.shape;
    waiting_bytes_ += 2 * rows * cols;
    if (waiting_bytes_ >= kPlainBytes || std::ssize(waiting_numbers_) == kSlots) {
      place_waiting_numbers();
    }
    return 2 * rows * cols;
  }
  // What is put comes in order.
  if (quantize && gather(weight, number)) {
    send_plain();
    const auto [rows, cols] = gathered_.back().master.shape;
    if (gathered_.size() == rooms_.size()) send_gathered();
    return rows * (cols / 2 + cols / 16) + 4;
  }
  send_gathered();
  if (!quantize && !std::holds_alternative<PackedView<const std::uint8_t>>(weight.value)) {
    return send_numbers(weight, number);
  }
  send_plain();
  if (const auto* codes = std::get_if<PackedView<const std::uint8_t>>(&weight.value)) {
    return put_codes(weight.id, *codes, number);
  }
  return send_quantized(weight, number);
}

/// False where the receiver has no place for it, or no kernel reaches it.
bool DeviceSender::place(const Weight& weight, std::size_t number) {
  const auto* f32 = std::get_if<TensorView<const float, 2>>(&weight.value);
  if (f32 == nullptr || !placer_.takes(contract_.weight, *f32)) return false;
  const std::optional<CodesPlace> place = to_.place(weight.id);
  if (!place) return false;
  require_shape(weight.id, f32->shape, {place->out, place->cols});
  waiting_.push_back({*f32, *place, number});
  return true;
}

bool DeviceSender::place_numbers(const Weight& weight, std::size_t number) {
  const auto* f32 = std::get_if<TensorView<const float, 2>>(&weight.value);
  // Any place will do for the question whether it is taken.
  if (f32 == nullptr || !number_placer_.takes(*f32, nullptr)) return false;
  const std::optional<TensorView<Bf16, 2>> to = to_.place_numbers(weight.id);
  if (!to) return false;
  require_shape(weight.id, f32->shape, to->shape);
  waiting_numbers_.push_back({*f32, *to, number});
  return true;
}

void DeviceSender::place_waiting_numbers() {
  if (waiting_numbers_.empty()) return;
  used_slots_ = next_slot(std::ssize(waiting_numbers_));
  std::vector<kernels::PlacedNumbers> weights;
  for (const auto& [master, to, number] : waiting_numbers_) {
    const std::int64_t slot = used_slots_++;
    weights.push_back({.master = master, .to = to.data, .bad = bad_at(slot), .sum = sum_at(slot)});
    const auto [rows, cols] = master.shape;
    pending_.push_back({number, slot, 2 * rows * cols, cols});
  }
  waiting_numbers_.clear();
  waiting_bytes_ = 0;
  number_placer_.place(weights);
}

void DeviceSender::place_waiting() {
  if (waiting_.empty()) return;
  used_slots_ = next_slot(std::ssize(waiting_));
  std::vector<kernels::PlacedWeight> weights;
  for (const auto& [master, place, number] : waiting_) {
    const std::int64_t slot = used_slots_++;
    weights.push_back({.master = master,
                       .place = {place.expert, 1, place.out, place.cols, device_},
                       .expert = 0,
                       .flips = place.flips,
                       .bad = bad_at(slot),
                       .sum = sum_at(slot),
                       .sample = place.sample,
                       .sample_step = place.sample_step});
    const auto [rows, cols] = master.shape;
    pending_.push_back({number, slot, rows * (cols / 2 + cols / 16) + 4, cols});
  }
  waiting_.clear();
  placed_some_ = true;
  placer_.place(weights, contract_.weight, sums_);
}

/// False where the weight has to go by itself.
bool DeviceSender::gather(const Weight& weight, std::size_t number) {
  const auto* f32 = std::get_if<TensorView<const float, 2>>(&weight.value);
  if (f32 == nullptr || !kernels::quantizes_at_once(contract_.weight, *f32)) return false;
  gathered_.push_back({weight.id, *f32, number});
  return true;
}

void DeviceSender::send_gathered() {
  if (gathered_.empty()) return;
  const Quantizer& rule = contract_.weight;
  const std::int64_t slot = next_slot(std::ssize(gathered_));
  std::vector<kernels::WeightOnItsWay> weights;
  std::vector<Weight> sent;
  std::vector<Summed> summed;
  for (std::size_t i = 0; i < gathered_.size(); ++i) {
    const auto& [id, master, number] = gathered_[i];
    const auto [rows, cols] = master.shape;
    Room& to = rooms_[i];
    const auto at = slot + static_cast<std::int64_t>(i);
    weights.push_back({master,
                       {room<std::uint8_t>(to.codes, rows, rule.code_bytes(cols)),
                        room<std::uint8_t>(to.scales, rows, rule.scale_cols(cols)),
                        {room<float>(to.global, 1, 1).data, {rows}, {0}, device_}},
                       amax_at(at),
                       bad_at(at)});
    const PackedView<const std::uint8_t> codes = weights.back().out;
    sent.push_back({id, codes});
    summed.push_back(
        {{codes.codes, codes.scales,
          Bytes{reinterpret_cast<const std::uint8_t*>(codes.global.data), {1, 4}, {4, 1}, device_}},
         number,
         cols});
  }
  gathered_.clear();
  // Few go into the receiver's tiles at a time, while they are in the cache; sums have a launch for
  // all, which takes long to begin.
  for (std::size_t i = 0; i < weights.size(); i += kernels::kMostWeights) {
    const std::size_t some = std::min<std::size_t>(kernels::kMostWeights, weights.size() - i);
    kernels::quantize_weights(std::span(weights).subspan(i, some), rule, sums_);
    const std::size_t end = i + some,
                      first = (end - 1) / kernels::kMostReplaced * kernels::kMostReplaced;
    if (end % kernels::kMostReplaced != 0 && end != weights.size()) continue;
    to_.put_all(std::span(sent).subspan(first, end - first));
  }
  sum(summed);
}

std::uint32_t* DeviceSender::amax_at(std::int64_t slot) {
  return slots_[static_cast<std::size_t>(slot / kSlots)].amax.as<std::uint32_t>() + slot % kSlots;
}

/// The first of so many slots in one piece: those that the next sum() takes.
std::int64_t DeviceSender::next_slot(std::int64_t count) {
  if (used_slots_ % kSlots + count > kSlots) used_slots_ = (used_slots_ / kSlots + 1) * kSlots;
  if (used_slots_ + count > std::ssize(slots_) * kSlots) {
    slots_.push_back({Buffer(device_, 4 * kSlots, stream_), Buffer(device_, 8 * kSlots, stream_),
                      Buffer(device_, 4 * kSlots, stream_)});
    const Slots& now = slots_.back();
    fill_bytes(now.sums.as<void>(), device_, 0, now.sums.bytes(), stream_);
    fill_bytes(now.bad.as<void>(), device_, 0xFF, now.bad.bytes(), stream_);
    fill_bytes(now.amax.as<void>(), device_, 0, now.amax.bytes(), stream_);
  }
  return used_slots_;
}

std::uint32_t* DeviceSender::sum_at(std::int64_t slot) {
  return slots_[static_cast<std::size_t>(slot / kSlots)].sums.as<std::uint32_t>() + slot % kSlots;
}

std::uint64_t* DeviceSender::bad_at(std::int64_t slot) {
  return slots_[static_cast<std::size_t>(slot / kSlots)].bad.as<std::uint64_t>() + slot % kSlots;
}

/// Slots for the CRCs of these, on their way when this returns.
void DeviceSender::sum(std::span<const Summed> items) {
  std::vector<std::uintptr_t> where;
  for (const Summed& item : items) {
    for (const Bytes& part : item.parts) {
      where.insert(where.end(), {reinterpret_cast<std::uintptr_t>(part.data),
                                 static_cast<std::uintptr_t>(part.shape[0]),
                                 static_cast<std::uintptr_t>(part.shape[1]),
                                 static_cast<std::uintptr_t>(part.stride[0])});
    }
    where.push_back(0);
  }
  std::unique_ptr<kernels::Crc32cList>& list = lists_[where];
  if (!list) {
    list = std::make_unique<kernels::Crc32cList>(device_, stream_);
    for (const Summed& item : items) list->add(item.parts);
  }
  const std::int64_t slot = next_slot(std::ssize(items));
  list->launch(sum_at(slot), stream_);
  for (const Summed& item : items) {
    std::int64_t bytes = 0;
    for (const Bytes& part : item.parts) bytes += bytes_of(part);
    pending_.push_back({item.number, used_slots_++, bytes, item.cols});
  }
}

/// Goes with its whole layer: a checksum's launch takes long to begin.
std::int64_t DeviceSender::send_numbers(const Weight& weight, std::size_t number) {
  if (plain_bytes_ >= kPlainBytes && weight.id.layer != plain_.back().weight.id.layer) send_plain();
  const auto [rows, cols] = std::visit(
      [](const auto& view) {
        if constexpr (requires { view.codes; }) {
          return view.codes.shape;
        } else {
          return view.shape;
        }
      },
      weight.value);
  plain_.push_back({weight, number});
  plain_bytes_ += 2 * rows * cols;
  if (std::ssize(plain_) == kSlots) send_plain();
  return 2 * rows * cols;
}

void DeviceSender::send_plain() {
  if (plain_.empty()) return;
  plain_rooms_.resize(std::max(plain_rooms_.size(), plain_.size()));
  const std::int64_t slot = next_slot(std::ssize(plain_));
  std::vector<Weight> sent;
  std::vector<Summed> summed;
  for (std::size_t i = 0; i < plain_.size(); ++i) {
    const auto& [weight, number] = plain_[i];
    const auto* bf16 = std::get_if<TensorView<const Bf16, 2>>(&weight.value);
    TensorView<const Bf16, 2> numbers;
    if (bf16 != nullptr) {
      numbers = *bf16;
    } else {
      const auto& f32 = std::get<TensorView<const float, 2>>(weight.value);
      const auto rounded = room<Bf16>(plain_rooms_[i], f32.shape[0], f32.shape[1]);
      kernels::round_weight(f32, rounded, bad_at(slot + static_cast<std::int64_t>(i)), stream_);
      numbers = rounded;
    }
    const auto [rows, cols] = numbers.shape;
    sent.push_back({weight.id, numbers});
    summed.push_back({{{reinterpret_cast<const std::uint8_t*>(numbers.data),
                        {rows, 2 * cols},
                        {2 * numbers.stride[0], 1},
                        device_}},
                      number,
                      cols});
  }
  plain_.clear();
  plain_bytes_ = 0;
  to_.put_all(sent);
  sum(summed);
}

/// In FP32, as they are or back from BF16.
TensorView<const float, 2> DeviceSender::masters(const Weight& weight) {
  if (const auto* f32 = std::get_if<TensorView<const float, 2>>(&weight.value)) return *f32;
  const std::vector<float> here = f32_of(weight);
  const std::int64_t rows = rows_of(weight);
  const auto there = room<float>(f32_, rows, std::ssize(here) / rows);
  copy_bytes(there.data, device_, here.data(), {}, std::ssize(here) * 4, stream_);
  synchronize(device_, stream_);  // `here` ends
  return there;
}

std::int64_t DeviceSender::send_quantized(const Weight& weight, std::size_t number) {
  const TensorView<const float, 2> f32 = masters(weight);
  const Quantizer& rule = contract_.weight;
  const auto [rows, cols] = f32.shape;
  const PackedView<std::uint8_t> packed = {
      room<std::uint8_t>(codes_, rows, rule.code_bytes(cols)),
      room<std::uint8_t>(scales_, rule.scale_rows(rows), rule.scale_cols(cols)),
      {global_.as<float>(), {1}, {0}, device_}};
  try {
    kernels::quantize_weight(f32, rule, packed, stream_);
  } catch (const Error& error) {
    throw Error(cat({"weight ", to_string(weight.id), ": ", error.what()}));
  }
  const auto back = room<float>(back_, rows, cols);
  kernels::dequantize({.codes = packed, .rule = rule, .f32 = back}, stream_);
  error_.add(f32, back);
  PackedView<const std::uint8_t> codes = packed;
  codes.global.shape[0] = rows;
  return put_codes(weight.id, codes, number);
}

std::int64_t DeviceSender::put_codes(const WeightId& id,
                                     const PackedView<const std::uint8_t>& codes,
                                     std::size_t number) {
  to_.put({id, codes});
  Bytes global = {
      reinterpret_cast<const std::uint8_t*>(codes.global.data), {1, 4}, {4, 1}, device_};
  if (codes.global.empty()) {  // it counts as 1
    constexpr float kOne = 1.0f;
    copy_bytes(global_.as<void>(), device_, &kOne, {}, sizeof kOne, stream_);
    global.data = global_.as<std::uint8_t>();
  }
  const Summed item = {{codes.codes, codes.scales, codes.mantissas, global}, number, 0};
  sum({&item, 1});
  return bytes_of(codes.codes) + bytes_of(codes.scales) + bytes_of(codes.mantissas) + 4;
}

void DeviceSender::end(std::span<const WeightId> ids, std::span<std::uint32_t> checksums) {
  send_plain();
  send_gathered();
  place_waiting();
  place_waiting_numbers();
  std::vector<std::uint32_t> sums(slots_.size() * kSlots);
  std::vector<std::uint64_t> bad(sums.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    copy_bytes(sums.data() + i * kSlots, {}, slots_[i].sums.as<void>(), device_, 4 * kSlots,
               stream_);
    copy_bytes(bad.data() + i * kSlots, {}, slots_[i].bad.as<void>(), device_, 8 * kSlots, stream_);
  }
  synchronize(device_, stream_);
  for (const Pending& one : pending_) {
    const std::uint64_t at = bad[static_cast<std::size_t>(one.slot)];
    if (at != kNone) {
      throw Error(cat({"weight ", to_string(ids[one.number]), " holds at row ",
                       static_cast<std::int64_t>(at) / one.cols, ", column ",
                       static_cast<std::int64_t>(at) % one.cols,
                       " what BF16 cannot hold: nothing was committed"}));
    }
    checksums[one.number] =
        kernels::crc_of_sum(sums[static_cast<std::size_t>(one.slot)], one.bytes);
  }
}

double DeviceSender::relative_error() {
  double error = 0, norm = 0, more_error = 0, more_norm = 0;
  error_.read(error, norm);
  sums_.read(more_error, more_norm);
  return norm + more_norm > 0 ? std::sqrt((error + more_error) / (norm + more_norm)) : 0;
}

}  // namespace lockstep::sync
