/// The same sites on a CUDA device: nothing here waits but settle().

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "kernels/dense/elementwise.h"
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

  static constexpr std::int64_t kSites = 4;
  static constexpr std::int64_t kMismatched = kSites * kernels::kNumGuideCounts;
  static constexpr std::int64_t kAudits = kMismatched + 1;

  /// int64: of guidance by site; rows that their router would route elsewhere; of each audit.
  at::Tensor counts;
  at::Tensor here;                     // the same, on the host once they have `arrived`
  std::optional<c10::Event> arrived;   // after fetch()
  std::array<std::int64_t, 4> cols{};  // of the site's rows, where it is guided
  std::int64_t followed = 0;
  std::int64_t layers = 0;  // whose routes were followed
  at::Tensor audited;       // int32, rows of the pass
  std::vector<Audit> audits;

  // Audits that have not been given to the device yet, and what they look at.
  std::vector<kernels::AuditArgs> held;
  std::vector<at::Tensor> held_rows;
  std::int64_t held_bytes = 0;
};

/// The records of a layer's sites that follow each other, on the device in one piece of memory.
struct Sites::There {
  /// A place's: where they begin; -1: there are none.
  struct Of {
    RowLayout layout{}, code_layout{};
    std::int64_t rows = -1;           // [rows, layout.bytes()], or int32 [rows, K] experts
    std::int64_t present = -1;        // [rows]
    std::int64_t codes = -1;          // [audit tokens, code_layout.bytes()]
    std::int64_t codes_present = -1;  // [audit tokens]
  };

  std::int32_t group = -1;
  std::array<Of, 5> places{};  // by Site
  std::int64_t size = 0;
  at::Tensor bytes;
  std::int64_t followed = 0;  // rows whose experts are present
  std::optional<c10::Event> arrived{};

  const Of& of(Site site) const { return places[static_cast<std::size_t>(site)]; }
  std::int64_t add(std::int64_t bytes) {
    constexpr std::int64_t kAlignment = 256;
    return std::exchange(size, size + (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  const std::uint8_t* at(std::int64_t offset) const {
    return bytes.const_data_ptr<std::uint8_t>() + offset;
  }
  /// Makes the current stream wait for them.
  void await() const;
};

/// Brings them in the order of a forward pass, by a stream of its own.
struct Sites::Ahead : ReadAhead<std::int32_t, There> {
  using ReadAhead::ReadAhead;
};

namespace {

constexpr Site kInOrder[] = {Site::kK, Site::kV, Site::kRouter, Site::kW13In, Site::kW2In};

// Attention's records come first: a pass begins before its first layer's others are there.
constexpr std::int32_t kGroups = 2;
std::int32_t group_of(Place place) {
  const bool in_attention = place.site == Site::kK || place.site == Site::kV;
  return kGroups * place.layer.value + (in_attention ? 0 : 1);
}
Layer layer_of(std::int32_t group) { return Layer{group / kGroups}; }

constexpr std::int64_t kMostHeld = 64 << 20;  // bytes of rows that wait to be audited

Tensor pinned(at::IntArrayRef shape, at::ScalarType type) {
  return at::empty(shape, at::TensorOptions(type).pinned_memory(true));
}

std::uint8_t* bytes_of(const Tensor& x) { return static_cast<std::uint8_t*>(x.data_ptr()); }

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

/// Where what a group's sites want will lie; size 0: they want nothing.
Sites::There Sites::planned(std::int32_t group) const {
  There there;
  there.group = group;
  const Layer layer = layer_of(group);
  const std::int64_t rows = pack_.rows(), audits = std::ssize(audited_);
  for (const Site site : kInOrder) {
    if (group_of({layer, site}) != group) continue;
    const Place place = {layer, site};
    There::Of& of = there.places[static_cast<std::size_t>(site)];
    if (site == Site::kRouter) {
      if (own_.follow == nullptr && !follows_routes(layer)) continue;
      const std::int64_t k = agreement_.model.experts_per_token;
      of.rows = there.add(rows * k * std::int64_t{sizeof(std::int32_t)});
      of.present = there.add(rows);
      continue;
    }
    if (imitates(place) && follows(place)) {
      of.layout = agreement_.layout(place, agreement_.encoding(place));
      of.rows = there.add(rows * of.layout.bytes());
      of.present = there.add(rows);
    }
    if (this->audits(place)) {
      of.code_layout = agreement_.layout(place, Encoding::kCodes);
      of.codes = there.add(audits * of.code_layout.bytes());
      of.codes_present = there.add(audits);
    }
  }
  return there;
}

/// Reads a group's records, those of audit tokens included, all threads at once, and copies them,
/// in the order of the current stream.
Sites::There Sites::bring(std::int32_t group, const at::Device& device) const {
  There there = planned(group);
  const Layer layer = layer_of(group);
  if (there.size == 0) return there;
  const Tensor here = pinned({there.size}, at::kByte);
  std::uint8_t* const bytes = static_cast<std::uint8_t*>(here.data_ptr());
  const There::Of& routes = there.of(Site::kRouter);
  const std::int64_t k = agreement_.model.experts_per_token;
  const Choice choice = {reinterpret_cast<std::int32_t*>(bytes + routes.rows),
                         bytes + routes.present};
  if (!names_all_rows()) {
    std::fill_n(bytes, there.size, std::uint8_t{0});
  } else if (routes.rows >= 0) {
    std::fill_n(choice.experts, pack_.rows() * k, 0);
    std::fill_n(choice.present, pack_.rows(), std::uint8_t{0});
  }
  const std::int64_t parts = this->parts();
  std::vector<Site> sites;
  for (const Site site : kInOrder) {
    if (there.of(site).rows >= 0) sites.push_back(site);
  }
  parallel_for(parts * std::ssize(sites), 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t task = first; task < end; ++task) {
      const Site site = sites[static_cast<std::size_t>(task / parts)];
      const There::Of& of = there.of(site);
      if (site != Site::kRouter) {
        read_part(task % parts, {layer, site}, of.layout, bytes + of.rows, bytes + of.present);
      } else if (own_.follow == nullptr) {
        recorded(task % parts, layer, choice);
      }
    }
  });
  if (routes.rows >= 0) {
    if (own_.follow != nullptr) own(layer, choice);
    there.followed = std::count_if(choice.present, choice.present + pack_.rows(),
                                   [](auto is) { return is != 0; });
  }
  std::vector<TokenKey> keys;
  for (const std::size_t i : audited_) keys.push_back(pack_.keys[i]);
  for (const Site site : kInOrder) {
    const There::Of& of = there.of(site);
    if (of.codes < 0) continue;
    const std::size_t size = keys.size() * static_cast<std::size_t>(of.code_layout.bytes());
    trace_->read(
        keys, contract_,
        {{layer, site}, of.code_layout, std::as_writable_bytes(std::span(bytes + of.codes, size))},
        std::span(bytes + of.codes_present, keys.size()));
  }
  there.bytes = here.to(device, /*non_blocking=*/true);
  return there;
}

void Sites::read_ahead_there(const at::Device& device, std::int64_t most_bytes) {
  std::vector<std::int32_t> groups;
  for (std::int32_t i = 0; i < kGroups * agreement_.model.num_layers; ++i) {
    if (planned(i).size > 0) groups.push_back(i);
  }
  if (groups.empty()) return;
  const auto bring_one = [this, device](std::int32_t group) {
    const c10::Stream stream = reading_stream(device);
    const c10::StreamGuard scope(stream);
    There there = bring(group, device);
    there.arrived.emplace(at::kCUDA);
    there.arrived->record(stream);
    return there;
  };
  ahead_ = std::make_shared<Ahead>(
      std::move(groups), bring_one, [this](std::int32_t group) { return planned(group).size; },
      most_bytes);
}

void Sites::There::await() const {
  if (!arrived) return;
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Stream stream = guard.getStream(arrived->device());
  arrived->block(stream);
  bytes.record_stream(stream);
}

/// Those of a group stay until another's are asked for.
const Sites::There& Sites::there(Place place, const at::Device& device) const {
  const std::int32_t group = group_of(place);
  if (now_ != nullptr && now_->group == group) return *now_;
  const bool ahead = ahead_ != nullptr && ahead_->has(group);
  now_ = std::make_shared<There>(ahead ? ahead_->take(group) : bring(group, device));
  now_->await();
  return *now_;
}

void Sites::follow_there(Layer layer, const Tensor& chosen) const {
  const There& records = there({layer, Site::kRouter}, chosen.device());
  const There::Of& routes = records.of(Site::kRouter);
  const auto view = [&](std::int64_t at, at::IntArrayRef shape, at::ScalarType type) {
    return at::from_blob(const_cast<std::uint8_t*>(records.at(at)), shape,
                         at::TensorOptions(chosen.device()).dtype(type));
  };
  Tensor mismatched;
  if (tally_ != nullptr) {
    mismatched = counts_there(chosen.device()).narrow(0, Later::kMismatched, 1);
    later_->followed += records.followed;
    ++later_->layers;
  }
  ops::cuda::follow(view(routes.rows, chosen.sizes(), at::kInt),
                    view(routes.present, {chosen.size(0)}, at::kByte), chosen, mismatched);
}

/// What the pass counts there, which the tally gets.
Tensor Sites::counts_there(const at::Device& device) const {
  if (later_ == nullptr) {
    later_ = std::make_shared<Later>();
    const std::int64_t audits = Later::kSites * agreement_.model.num_layers;
    later_->counts = at::zeros({Later::kAudits + audits * kernels::kNumAuditCounts},
                               at::TensorOptions(device).dtype(at::kLong));
  }
  return later_->counts;
}

void Sites::audit_unrounded(Place place, const Tensor& x) const {
  const Tensor rows = x.detach().view({pack_.rows(), -1});
  audit_there(place, x.size(1), there(place, x.device()),
              rows.index_select(0, audit_index(x.device())).to(at::kBFloat16), {});
}

/// `before` and `after` are the audit tokens' rows; without `after` they are not rounded.
void Sites::audit_there(Place place, std::int64_t cols, const There& records, const Tensor& before,
                        const Tensor& after) const {
  std::int64_t* const counts = counts_there(before.device()).data_ptr<std::int64_t>() +
                               Later::kAudits +
                               std::ssize(later_->audits) * kernels::kNumAuditCounts;
  const Device device = ops::house_device(before);
  const std::int64_t rows = before.numel() / cols, tokens = std::ssize(audited_);
  const There::Of& of = records.of(place.site);
  const auto view = [&](const Tensor& x) {
    return TensorView<const Bf16, 2>{
        static_cast<const Bf16*>(x.const_data_ptr()), {rows, cols}, {cols, 1}, device};
  };
  const std::int64_t width = of.code_layout.bytes();
  later_->held.push_back({.x = view(before),
                          .operand = view(after.defined() ? after : before),
                          .rule = agreement_.rule(place.site),
                          .layout = of.code_layout,
                          .records = {records.at(of.codes), {tokens, width}, {width, 1}, device},
                          .present = {records.at(of.codes_present), {tokens}, {1}, device},
                          .exponent = exponent(place),
                          .counts = {counts, {kernels::kNumAuditCounts}, {1}, device}});
  for (const Tensor& x : {before, after, records.bytes}) {
    const auto is_x = [&](const Tensor& held) { return held.is_same(x); };
    if (!x.defined() || std::ranges::any_of(later_->held_rows, is_x)) continue;
    later_->held_rows.push_back(x);
    later_->held_bytes += static_cast<std::int64_t>(x.nbytes());
  }
  later_->audits.push_back({place, after.defined()});
  if (later_->held.size() == kernels::kMostAudits || later_->held_bytes >= kMostHeld) audit_held();
}

/// Counts beside the other work.
void Sites::audit_held() const {
  if (later_->held.empty()) return;
  kernels::audit(later_->held, ops::stream_on(later_->held[0].x.device));
  later_->held.clear();
  later_->held_rows.clear();
  later_->held_bytes = 0;
}

Tensor Sites::audit_index(const at::Device& device) const {
  counts_there(device);
  if (!later_->audited.defined()) {
    std::vector<std::int32_t> rows;
    for (const std::size_t i : audited_) {
      rows.push_back(static_cast<std::int32_t>(pack_.key_row[i]));
    }
    later_->audited = ops::upload(ops::over(rows, at::kInt), device);
  }
  return later_->audited;
}

/// The audit tokens' rows of matrices that have as many as the pass.
void Sites::gather_audited(std::span<const Bf16* const> from, std::span<const Tensor> to) const {
  std::vector<kernels::GatherArgs> all;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const Device device = ops::house_device(to[i]);
    const std::int64_t bytes = to[i].size(1) * std::int64_t{sizeof(Bf16)};
    all.push_back({{reinterpret_cast<const std::uint8_t*>(from[i]),
                    {pack_.rows(), bytes},
                    {bytes, 1},
                    device},
                   {bytes_of(to[i]), {to[i].size(0), bytes}, {bytes, 1}, device}});
  }
  const Tensor index = audit_index(to[0].device());
  kernels::gather_rows(
      all, {index.const_data_ptr<std::int32_t>(), static_cast<std::size_t>(index.numel())},
      ops::stream_on(ops::house_device(index)));
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
  static const There kNothing;
  const There& records = follows(place) || audits(place) ? there(place, device) : kNothing;
  const There::Of& of = records.of(place.site);
  std::array<Tensor, 2> rows;  // of audit tokens, before and after
  const bool in_place = from.data == to.data;
  if (audits(place)) {
    const std::int64_t width = to.shape[0] * to.shape[1] / pack_.rows();
    for (Tensor& x : rows) x = at::empty({std::ssize(audited_), width}, numbers);
    if (in_place) gather_audited(std::array{from.data}, std::span(rows).first(1));
  }
  const auto audit_rows = [&] {
    if (!audits(place)) return;
    const std::array both = {from.data, static_cast<const Bf16*>(to.data)};
    const std::size_t done = in_place ? 1 : 0;
    gather_audited(std::span(both).subspan(done), std::span(rows).subspan(done));
    audit_there(place, to.shape[1], records, rows[0], rows[1]);
  };
  if (compensates(place)) {
    compensate_there(place, from, to);
    return audit_rows();
  }

  kernels::GuideArgs args = {.x = from, .rule = agreement_.rule(place.site), .out = to};
  args.exponent = exponent(place);
  if (follows(place)) {
    const std::int64_t width = of.layout.bytes();
    args.guidance = agreement_.guide.mode;
    args.layout = of.layout;
    args.records = {records.at(of.rows), {pack_.rows(), width}, {width, 1}, to.device};
    args.present = {records.at(of.present), {pack_.rows()}, {1}, to.device};
    if (tally_ != nullptr) {
      const auto site = static_cast<std::size_t>(place.site);
      const Tensor counts = counts_there(device);
      later_->cols[site] = to.shape[1];
      args.counts = {counts.data_ptr<std::int64_t>() + site * kernels::kNumGuideCounts,
                     {kernels::kNumGuideCounts},
                     {1},
                     to.device};
    }
  }
  kernels::guide(args, ops::stream_on(to.device));
  audit_rows();
}

void Sites::fetch_there() const {
  if (later_ == nullptr) return;
  audit_held();
  later_->here = pinned({later_->counts.numel()}, at::kLong);
  later_->here.copy_(later_->counts, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  later_->arrived.emplace(at::kCUDA);
  later_->arrived->record(guard.getStream(later_->counts.device()));
}

void Sites::settle_there() const {
  if (later_ == nullptr) return;
  if (!later_->arrived) fetch_there();
  later_->arrived->synchronize();
  const std::int64_t* const counts = later_->here.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < later_->cols.size(); ++i) {
    count(static_cast<Site>(i), {counts + i * kernels::kNumGuideCounts, kernels::kNumGuideCounts},
          later_->cols[i]);
  }
  if (later_->layers > 0) {
    tally_->routes_followed += later_->followed;
    tally_->routes_absent += pack_.rows() * later_->layers - later_->followed;
    tally_->routes_mismatched += counts[Later::kMismatched];
  }
  for (std::size_t i = 0; i < later_->audits.size(); ++i) {
    const auto& [place, rounded] = later_->audits[i];
    count_audit(place,
                {counts + Later::kAudits + i * kernels::kNumAuditCounts, kernels::kNumAuditCounts},
                rounded);
  }
  later_.reset();
}

}  // namespace lockstep::train
