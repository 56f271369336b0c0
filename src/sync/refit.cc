#include "sync/refit.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "base/timer.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/mx_error.h"
#include "kernels/exact/quantize.h"
#include "model/checksum.h"
#include "model/names.h"
#include "model/values.h"
#include "numerics/bf16.h"
#include "sync/refit_device.h"

namespace lockstep::sync {
namespace {

// One expert in so many of a layer is taken apart: that is dearer than quantizing.
constexpr std::int32_t kMxErrorExperts = 16;

template <typename T>
TensorView<T, 2> matrix(std::vector<T>& values, std::int64_t rows, std::int64_t cols) {
  values.resize(static_cast<std::size_t>(rows * cols));
  return {values.data(), {rows, cols}, {cols, 1}};
}

template <typename T>
std::int64_t columns_of(const TensorView<T, 2>& view) {
  return view.shape[1];
}
std::int64_t columns_of(const PackedView<const std::uint8_t>& view) { return view.codes.shape[1]; }

Device device_of(const Weight& weight) {
  return std::visit(
      [](const auto& view) {
        if constexpr (requires { view.codes; }) {
          return view.codes.device;
        } else {
          return view.device;
        }
      },
      weight.value);
}

/// Buffers that one refit reuses from weight to weight.
class Sender {
 public:
  Sender(WeightSink& to, const Contract& contract) : to_(to), contract_(contract) {}

  void send(const Weight& weight) {
    const Device lies = device_of(weight);
    const bool macro = contract_.weight.macro_block > 0 && quantized(contract_, weight.id);
    if (lies.kind == Device::Kind::kCuda && lies == to_.device() && !macro) {
      return send_there(weight);
    }
    if (const auto* codes = std::get_if<PackedView<const std::uint8_t>>(&weight.value)) {
      send_codes(weight.id, *codes);
    } else if (quantized(contract_, weight.id)) {
      send_quantized(weight.id, as_f32(weight));
    } else {
      send_plain(weight.id, weight);
    }
  }

  /// Before the sink commits: what was given to a device is done and found finite.
  void end() {
    if (there_) there_->end(ids_, checksums_);
  }

  const std::vector<WeightId>& ids() const { return ids_; }
  const std::vector<std::uint32_t>& checksums() const { return checksums_; }
  double bytes() const { return bytes_; }
  const kernels::MxError& mx_error() const { return mx_error_; }
  double relative_error() {
    if (norm_ > 0) return std::sqrt(error_ / norm_);
    return there_ ? there_->relative_error() : 0;
  }

 private:
  /// Numbers that lie where the sink's memory is never leave it.
  void send_there(const Weight& weight) {
    if (!there_) there_ = std::make_unique<DeviceSender>(to_, contract_);
    const bool codes = std::holds_alternative<PackedView<const std::uint8_t>>(weight.value);
    if (codes && !quantized(contract_, weight.id)) throw_unasked_codes(weight.id);
    if (!codes && quantized(contract_, weight.id)) {
      require_blocks(weight.id,
                     std::visit([](const auto& view) { return columns_of(view); }, weight.value));
    }
    const std::int64_t bytes =
        there_->send(weight, !codes && quantized(contract_, weight.id), ids_.size());
    sent(weight.id, 0, static_cast<std::size_t>(bytes));
    if (!codes && quantized(contract_, weight.id) && takes_mx(weight.id)) {
      f32_ = f32_of(weight);
      const std::int64_t rows = rows_of(weight);
      add_mx(matrix(f32_, rows, static_cast<std::int64_t>(f32_.size()) / rows));
    }
  }

  bool takes_mx(const WeightId& id) const {
    const Quantizer& rule = contract_.weight;
    return rule.is_mx() && !rule.is_wide() && id.expert.value % kMxErrorExperts == 0;
  }

  void require_blocks(const WeightId& id, std::int64_t cols) const {
    if (contract_.weight.is_wide() || cols % contract_.weight.block == 0) return;
    throw Error(cat({"weight ", to_string(id), " has ", cols, " columns, not a multiple of the ",
                     "block of ", contract_.weight.block,
                     ": this model cannot be quantized under this contract"}));
  }

  [[noreturn]] static void throw_unasked_codes(const WeightId& id) {
    throw Error(cat({"weight ", to_string(id), " comes as codes, but the contract leaves it in ",
                     "BF16: load it under the contract that it was made by"}));
  }

  void sent(const WeightId& id, std::uint32_t crc, std::size_t bytes) {
    ids_.push_back(id);
    checksums_.push_back(crc);
    bytes_ += static_cast<double>(bytes);
  }

  TensorView<const float, 2> as_f32(const Weight& weight) {
    const auto* f32 = std::get_if<TensorView<const float, 2>>(&weight.value);
    if (f32 != nullptr && f32->device.kind == Device::Kind::kCpu) return *f32;
    f32_ = f32_of(weight);
    const std::int64_t rows = rows_of(weight);
    return matrix(f32_, rows, static_cast<std::int64_t>(f32_.size()) / rows);
  }

  void send_plain(const WeightId& id, const Weight& weight) {
    const TensorView<const float, 2> f32 = as_f32(weight);
    const auto out = matrix(bf16_, f32.shape[0], f32.shape[1]);
    for (std::int64_t row = 0; row < out.shape[0]; ++row) {
      for (std::int64_t col = 0; col < out.shape[1]; ++col) {
        const float value = f32.data[row * f32.stride[0] + col];
        const Bf16 rounded = to_bf16(value);
        if (!is_finite(rounded)) {
          throw Error(cat({"weight ", to_string(id), " holds ", value, " at row ", row, ", column ",
                           col, ", which BF16 cannot hold: nothing was committed"}));
        }
        out.data[row * out.stride[0] + col] = rounded;
      }
    }
    to_.put({id, TensorView<const Bf16, 2>(out)});
    sent(id, checksum(out), bf16_.size() * sizeof(Bf16));
  }

  void send_quantized(const WeightId& id, TensorView<const float, 2> f32) {
    const Quantizer& rule = contract_.weight;
    const std::int64_t rows = f32.shape[0], cols = f32.shape[1];
    require_blocks(id, cols);
    const PackedView<std::uint8_t> packed = {
        matrix(codes_, rows, rule.code_bytes(cols)),
        matrix(scales_, rule.scale_rows(rows), rule.scale_cols(cols)),
        {&global_, {1}, {0}},
        matrix(mantissas_, rows, rule.macro_cols(cols))};
    try {
      kernels::quantize_weight(f32, rule, packed);
    } catch (const Error& error) {
      throw Error(cat({"weight ", to_string(id), ": ", error.what()}));
    }
    add_error(f32, packed);
    if (takes_mx(id)) add_mx(f32);
    put_codes(id, packed);
  }

  /// Codes that come from a checkpoint pass as they are.
  void send_codes(const WeightId& id, const PackedView<const std::uint8_t>& from) {
    if (!quantized(contract_, id)) throw_unasked_codes(id);
    if (from.codes.device.kind != Device::Kind::kCpu) {
      throw Error(cat({"weight ", to_string(id), " comes as codes on a device that its receiver ",
                       "is not on: give masters, or codes on the host"}));
    }
    put_codes(id, from);
  }

  void put_codes(const WeightId& id, const PackedView<const std::uint8_t>& codes) {
    to_.put({id, codes});
    const auto bytes = [](const auto& view) {
      return static_cast<std::size_t>(view.shape[0] * view.shape[1]);
    };
    sent(id, checksum(codes),
         bytes(codes.codes) + bytes(codes.scales) + bytes(codes.mantissas) + sizeof(float));
  }

  void add_error(TensorView<const float, 2> f32, const PackedView<const std::uint8_t>& packed) {
    const auto back = matrix(f32_back_, f32.shape[0], f32.shape[1]);
    kernels::dequantize({.codes = packed, .rule = contract_.weight, .f32 = back});
    for (std::int64_t row = 0; row < back.shape[0]; ++row) {
      for (std::int64_t col = 0; col < back.shape[1]; ++col) {
        const double value = f32.data[row * f32.stride[0] + col];
        const double difference = back.data[row * back.stride[0] + col] - value;
        error_ += difference * difference;
        norm_ += value * value;
      }
    }
  }

  /// What MXFP4 loses of it, by cause.
  void add_mx(TensorView<const float, 2> f32) {
    const auto numbers = matrix(bf16_, f32.shape[0], f32.shape[1]);
    for (std::int64_t row = 0; row < numbers.shape[0]; ++row) {
      for (std::int64_t col = 0; col < numbers.shape[1]; ++col) {
        numbers.data[row * numbers.stride[0] + col] = to_bf16(f32.data[row * f32.stride[0] + col]);
      }
    }
    mx_error_.add(kernels::mx_error(numbers, contract_.weight));
  }

  WeightSink& to_;
  const Contract& contract_;
  std::vector<WeightId> ids_;
  std::vector<std::uint32_t> checksums_;
  std::vector<float> f32_, f32_back_;
  std::vector<Bf16> bf16_;
  std::vector<std::uint8_t> codes_, scales_, mantissas_;
  float global_ = 0;
  double bytes_ = 0, error_ = 0, norm_ = 0;
  kernels::MxError mx_error_;
  std::unique_ptr<DeviceSender> there_;
};

void compare(const Sender& sender, const std::vector<std::uint32_t>& received) {
  if (received.size() != sender.checksums().size()) {
    throw Error(cat({"the receiver of a refit holds ", received.size(), " weights of the ",
                     sender.checksums().size(), " that were sent"}));
  }
  for (std::size_t i = 0; i < received.size(); ++i) {
    if (received[i] != sender.checksums()[i]) {
      throw Error(cat({"weight ", to_string(sender.ids()[i]), " arrived with CRC32C ", received[i],
                       ", not ", sender.checksums()[i], ": the refit is not usable"}));
    }
  }
}

}  // namespace

bool quantized(const Contract& contract, const WeightId& id) {
  return of_expert(id.role) && contract.weight.element != Element::kBf16 &&
         contract.layers.has(id.layer);
}

Metrics refit(const WeightSource& from, WeightSink& to, const Contract& contract,
              WeightVersion version) {
  Timer timer;
  Sender sender(to, contract);
  to.begin(version, contract.id());
  from.each([&](const Weight& weight) { sender.send(weight); });
  sender.end();
  compare(sender, to.commit());
  Metrics metrics = {{"fp4/refit/version", static_cast<double>(version.value)},
                     {"fp4/refit/bytes", sender.bytes()},
                     {"fp4/refit/rel_err", sender.relative_error()}};
  if (sender.mx_error().elements > 0) {
    metrics.merge(kernels::metrics(sender.mx_error(), "fp4/mx/weight"));
  }
  metrics.merge(to.metrics());
  metrics["fp4/refit/seconds"] = timer.lap();
  return metrics;
}

}  // namespace lockstep::sync
