/// The same sites on a CUDA device: nothing here waits but settle().

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/exact/audit.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/residual.h"
#include "ops/cuda.h"
#include "ops/device.h"
#include "train/read_ahead.h"
#include "train/sites.h"

namespace lockstep::train {

using at::Tensor;

struct Sites::Later {
  struct Audit {
    Place place;
    bool rounded = false;
  };

  at::Tensor counts;                   // int64 [kNumSites, kNumGuideCounts]
  std::array<std::int64_t, 4> cols{};  // of the site's rows
  at::Tensor mismatched;               // int64 [1] rows that their router would route elsewhere
  std::int64_t followed = 0;
  std::int64_t layers = 0;  // whose routes were followed
  at::Tensor audited;       // int64, rows of the pass
  std::vector<Audit> audits;
  at::Tensor audit_counts;  // int64, kNumAuditCounts each
};

/// A place's records on the device.
struct Sites::There {
  RowLayout layout;
  at::Tensor rows;            // uint8 [rows, layout.bytes()], or int32 [rows, K] experts
  at::Tensor present;         // uint8 [rows]
  std::int64_t followed = 0;  // how many are present
  RowLayout code_layout;
  at::Tensor codes;          // uint8 [audit tokens, code_layout.bytes()]
  at::Tensor codes_present;  // uint8 [audit tokens]
  std::optional<c10::Event> arrived{};

  /// Makes the current stream wait for them.
  void await() const;
};

/// Brings them in the order of a forward pass, by a stream of its own.
struct Sites::Ahead : ReadAhead<Place, There> {
  using ReadAhead::ReadAhead;
};

namespace {

Tensor pinned(at::IntArrayRef shape, at::ScalarType type) {
  return at::empty(shape, at::TensorOptions(type).pinned_memory(true));
}

Tensor pinned_copy(const void* from, at::IntArrayRef shape, at::ScalarType type) {
  const Tensor copy = pinned(shape, type);
  std::memcpy(copy.data_ptr(), from, copy.nbytes());
  return copy;
}

std::uint8_t* bytes_of(const Tensor& x) { return static_cast<std::uint8_t*>(x.data_ptr()); }

void send(Tensor& x, const at::Device& device) { x = x.to(device, /*non_blocking=*/true); }

/// The stream that records come by, one a device for all passes of the process: torch keeps what
/// was freed for the stream that it was asked for on, so every further stream would keep a pass's
/// records once more.
c10::Stream reading_stream(const at::Device& device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  const std::lock_guard lock(mutex);
  const auto found = streams.find(device.index());
  if (found != streams.end()) return found->second;
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  return streams.emplace(device.index(), guard.getStreamFromGlobalPool(device)).first->second;
}

}  // namespace

/// Reads a place's records, those of audit tokens included, and copies them, in the order of the
/// current stream.
Sites::There Sites::bring(Place place, const at::Device& device) const {
  There there;
  if (place.site == Site::kRouter) {
    const std::int64_t k = agreement_.model.experts_per_token;
    const Choice choice = own_.follow != nullptr ? own(place.layer, k) : recorded(place.layer, k);
    there.rows = pinned({pack_.rows(), k}, at::kInt);
    std::ranges::transform(choice.experts, there.rows.data_ptr<std::int32_t>(),
                           [](std::int64_t expert) { return static_cast<std::int32_t>(expert); });
    there.present = pinned_copy(choice.present.data(), {pack_.rows()}, at::kByte);
    there.followed = std::ranges::count_if(choice.present, [](auto x) { return x != 0; });
  } else if (imitates(place) && follows(place)) {
    there.layout = agreement_.layout(place, agreement_.encoding(place));
    there.rows = pinned({pack_.rows(), there.layout.bytes()}, at::kByte);
    there.present = pinned({pack_.rows()}, at::kByte);
    if (!names_all_rows()) {
      std::fill_n(bytes_of(there.rows), there.rows.nbytes(), std::uint8_t{0});
      std::fill_n(bytes_of(there.present), there.present.nbytes(), std::uint8_t{0});
    }
    read_into(place, there.layout, bytes_of(there.rows), bytes_of(there.present));
  }
  if (audits(place)) {
    std::vector<TokenKey> keys;
    for (const std::size_t i : audited_) keys.push_back(pack_.keys[i]);
    there.code_layout = agreement_.layout(place, Encoding::kCodes);
    there.codes = pinned({std::ssize(keys), there.code_layout.bytes()}, at::kByte);
    there.codes_present = pinned({std::ssize(keys)}, at::kByte);
    trace_->read(keys, contract_,
                 {place, there.code_layout,
                  std::as_writable_bytes(std::span(bytes_of(there.codes), there.codes.nbytes()))},
                 std::span(bytes_of(there.codes_present), keys.size()));
  }
  for (Tensor* const x : {&there.rows, &there.present, &there.codes, &there.codes_present}) {
    if (x->defined()) send(*x, device);
  }
  return there;
}

/// Of what bring() brings, here and there.
std::int64_t Sites::bytes_ahead(Place place) const {
  std::int64_t bytes = 0;
  if (place.site == Site::kRouter) {
    bytes += agreement_.model.experts_per_token * std::int64_t{sizeof(std::int32_t)} + 1;
  } else if (imitates(place) && follows(place)) {
    bytes += agreement_.layout(place, agreement_.encoding(place)).bytes() + 1;
  }
  bytes *= pack_.rows();
  if (audits(place)) {
    bytes += std::ssize(audited_) * (agreement_.layout(place, Encoding::kCodes).bytes() + 1);
  }
  return bytes;
}

void Sites::read_ahead_there(const at::Device& device, std::int64_t most_bytes) {
  std::vector<Place> places;
  for (std::int32_t i = 0; i < agreement_.model.num_layers; ++i) {
    const Layer layer{i};
    for (const Site site : {Site::kK, Site::kV, Site::kRouter, Site::kW13In, Site::kW2In}) {
      const Place place = {layer, site};
      const bool wanted = site == Site::kRouter
                              ? own_.follow != nullptr || follows_routes(layer)
                              : (imitates(place) && follows(place)) || audits(place);
      if (wanted) places.push_back(place);
    }
  }
  if (places.empty()) return;
  const auto bring_one = [this, device](const Place& place) {
    const c10::Stream stream = reading_stream(device);
    const c10::StreamGuard scope(stream);
    There there = bring(place, device);
    there.arrived.emplace(at::kCUDA);
    there.arrived->record(stream);
    return there;
  };
  ahead_ = std::make_shared<Ahead>(
      std::move(places), bring_one, [this](const Place& place) { return bytes_ahead(place); },
      most_bytes);
}

void Sites::There::await() const {
  if (!arrived) return;
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Stream stream = guard.getStream(arrived->device());
  arrived->block(stream);
  for (const Tensor& x : {rows, present, codes, codes_present}) {
    if (x.defined()) x.record_stream(stream);
  }
}

Sites::There Sites::there(Place place, const at::Device& device) const {
  if (ahead_ != nullptr && ahead_->has(place)) {
    There there = ahead_->take(place);
    there.await();
    return there;
  }
  return bring(place, device);
}

void Sites::follow_there(Layer layer, const Tensor& chosen) const {
  const There choice = there({layer, Site::kRouter}, chosen.device());
  Tensor mismatched;
  if (tally_ != nullptr) {
    if (!later().mismatched.defined()) {
      later().mismatched = at::zeros({1}, chosen.options().dtype(at::kLong));
    }
    mismatched = later().mismatched;
    later().followed += choice.followed;
    ++later().layers;
  }
  ops::cuda::follow(choice.rows, choice.present, chosen, mismatched);
}

Sites::Later& Sites::later() const {
  if (later_ == nullptr) later_ = std::make_shared<Later>();
  return *later_;
}

void Sites::audit_unrounded(Place place, const Tensor& x) const {
  audit_there(place, x.size(1), there(place, x.device()), audited_there(x.detach()), {});
}

/// Counts beside the other work; settle() adds it up. `before` and `after` are the audit tokens'
/// rows; without `after` they are not rounded.
void Sites::audit_there(Place place, std::int64_t cols, const There& records, const Tensor& before,
                        const Tensor& after) const {
  constexpr std::int64_t kSites = 4, kCounts = kernels::kNumAuditCounts;
  Later& later = this->later();
  if (!later.audit_counts.defined()) {
    later.audit_counts = at::zeros({agreement_.model.num_layers * kSites, kCounts},
                                   before.options().dtype(at::kLong));
  }
  const Device device = ops::house_device(before);
  const std::int64_t rows = before.numel() / cols, tokens = records.codes.size(0);
  const auto view = [&](const Tensor& x) {
    return TensorView<const Bf16, 2>{
        static_cast<const Bf16*>(x.const_data_ptr()), {rows, cols}, {cols, 1}, device};
  };
  const std::int64_t width = records.code_layout.bytes();
  kernels::audit(
      {.x = view(before),
       .operand = view(after.defined() ? after : before),
       .rule = agreement_.rule(place.site),
       .layout = records.code_layout,
       .records =
           {records.codes.const_data_ptr<std::uint8_t>(), {tokens, width}, {width, 1}, device},
       .present = {records.codes_present.const_data_ptr<std::uint8_t>(), {tokens}, {1}, device},
       .exponent = exponent(place),
       .counts = {later.audit_counts.data_ptr<std::int64_t>() + std::ssize(later.audits) * kCounts,
                  {kCounts},
                  {1},
                  device}},
      ops::stream_on(device));
  later.audits.push_back({place, after.defined()});
}

/// The audit tokens' rows of x, in BF16.
Tensor Sites::audited_there(const Tensor& x) const {
  Tensor& index = later().audited;
  if (!index.defined()) {
    std::vector<std::int64_t> rows;
    for (const std::size_t i : audited_) rows.push_back(pack_.key_row[i]);
    index = ops::upload(ops::over(rows, at::kLong), x.device());
  }
  return x.view({pack_.rows(), -1}).index_select(0, index).to(at::kBFloat16);
}

/// compensate() of `from` into `to`.
void Sites::compensate_there(Place place, TensorView<const Bf16, 2> from,
                             TensorView<Bf16, 2> to) const {
  const auto [rows, cols] = from.shape;
  const Device device = from.device;
  const Quantizer& rule = agreement_.rule(place.site);
  const auto options = at::TensorOptions(ops::torch_device(device));
  std::vector<Tensor> owned;  // go back to torch when all is given
  const auto packed = [&] {
    const auto bytes = [&](std::int64_t width) {
      owned.push_back(at::empty({rows, width}, options.dtype(at::kByte)));
      return TensorView<std::uint8_t, 2>{
          owned.back().data_ptr<std::uint8_t>(), {rows, width}, {width, 1}, device};
    };
    PackedView<std::uint8_t> view{.codes = bytes(rule.code_bytes(cols)),
                                  .scales = bytes(rule.scale_cols(cols)),
                                  .global = {}};
    if (rule.macro_block > 0) view.mantissas = bytes(rule.macro_cols(cols));
    owned.push_back(at::empty({rows}, options.dtype(at::kFloat)));
    view.global = {owned.back().data_ptr<float>(), {rows}, {1}, device};
    return view;
  };
  const PackedView<std::uint8_t> main = packed(), rest = packed();
  const Stream stream = ops::stream_on(device);
  kernels::quantize({.x = from, .rule = rule, .out = main}, stream);
  if (rule.is_mx()) {
    owned.push_back(at::empty({rows, cols}, options.dtype(at::kFloat)));
    kernels::residual_of(from, rule, main, rest,
                         {owned.back().data_ptr<float>(), {rows, cols}, {cols, 1}, device}, stream);
  } else {
    kernels::residual({.x = from, .q = main, .per_mille = 1000, .out = rest}, stream);
  }
  kernels::add_residual(main, rest, rule, residual_factor(rule), to, stream);
}

void Sites::round_there(Place place, TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) const {
  const at::Device device = ops::torch_device(to.device);
  const auto numbers = at::TensorOptions(device).dtype(at::kBFloat16);
  const auto rows_at = [&](const Bf16* data) {
    return audited_there(
        at::from_blob(const_cast<Bf16*>(data), {to.shape[0] * to.shape[1]}, numbers));
  };
  There records;
  if (follows(place) || audits(place)) records = there(place, device);
  Tensor before;
  if (audits(place)) before = rows_at(from.data);
  if (compensates(place)) {
    compensate_there(place, from, to);
    if (before.defined()) audit_there(place, to.shape[1], records, before, rows_at(to.data));
    return;
  }

  kernels::GuideArgs args = {.x = from, .rule = agreement_.rule(place.site), .out = to};
  args.exponent = exponent(place);
  if (follows(place)) {
    const std::int64_t width = records.layout.bytes();
    args.guidance = agreement_.guide.mode;
    args.layout = records.layout;
    args.records = {
        records.rows.const_data_ptr<std::uint8_t>(), {pack_.rows(), width}, {width, 1}, to.device};
    args.present = {records.present.const_data_ptr<std::uint8_t>(), {pack_.rows()}, {1}, to.device};
    if (tally_ != nullptr) {
      const auto site = static_cast<std::size_t>(place.site);
      Tensor& counts = later().counts;
      if (!counts.defined()) {
        counts = at::zeros({std::ssize(later().cols), kernels::kNumGuideCounts},
                           numbers.dtype(at::kLong));
      }
      later().cols[site] = to.shape[1];
      args.counts = {counts.data_ptr<std::int64_t>() + site * kernels::kNumGuideCounts,
                     {kernels::kNumGuideCounts},
                     {1},
                     to.device};
    }
  }
  kernels::guide(args, ops::stream_on(to.device));
  if (before.defined()) audit_there(place, to.shape[1], records, before, rows_at(to.data));
}

void Sites::settle_there() const {
  if (later_ == nullptr) return;
  if (later().counts.defined()) {
    const Tensor here = later().counts.cpu();
    const std::int64_t* counts = here.const_data_ptr<std::int64_t>();
    for (std::size_t i = 0; i < later().cols.size(); ++i, counts += kernels::kNumGuideCounts) {
      count(static_cast<Site>(i), {counts, kernels::kNumGuideCounts}, later().cols[i]);
    }
  }
  if (later().mismatched.defined()) {
    tally_->routes_followed += later().followed;
    tally_->routes_absent += pack_.rows() * later().layers - later().followed;
    tally_->routes_mismatched += later().mismatched.item<std::int64_t>();
  }
  if (!later().audits.empty()) {
    const Tensor here = later().audit_counts.cpu();
    const std::int64_t* counts = here.const_data_ptr<std::int64_t>();
    for (const auto& [place, rounded] : later().audits) {
      count_audit(place, {counts, kernels::kNumAuditCounts}, rounded);
      counts += kernels::kNumAuditCounts;
    }
  }
  later_.reset();
}

}  // namespace lockstep::train
