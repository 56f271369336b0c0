#include "rollout/capture.h"

#include <algorithm>
#include <cassert>
#include <optional>
#include <vector>

#include "rollout/capture_device.h"
#include "rollout/capture_rows.h"
#include "rollout/forward.h"
#include "rollout/kv_cache.h"

namespace lockstep::rollout {
namespace {

// Bytes of records of K and V on their way at once: what the caches of a CPU hold.
constexpr std::int64_t kKvBatch = 2 << 20, kKvBatchOnCuda = 16 << 20;

}  // namespace

struct Capture::Impl {
  Impl(const Agreement& agreement, TraceSink* sink, bool bf16, Device device, Stream stream)
      : agreement(agreement), sink(sink), bf16(bf16), at{device, stream} {
    if (sink != nullptr && at.on_cuda()) there.emplace(at, agreement.model.num_layers, wanted());
  }

  const Agreement agreement;
  TraceSink* const sink;
  const bool bf16;
  Workplace at;
  RowWriter writer{agreement, sink};
  std::optional<DeviceCapture> there{};  // on a CUDA device
  std::optional<KvRecords> kv{};         // of the cache that close() met first

  // Of the pass that runs.
  const Pass* pass = nullptr;
  KeptRows kept{}, audit{};
  std::vector<std::uint8_t> records{};

  bool audited(TokenKey key) const {
    return lockstep::audited(agreement.seed, key, agreement.guide.audit_every);
  }

  /// Does an audit token keep full codes there? Not beside a record that is full anyway.
  bool audits(Place place) const {
    if (agreement.guide.audit_every <= 0) return false;
    if (!agreement.rule(place.site).is_guidable()) return false;
    if (!agreement.contract.layers.has(place.layer)) return false;
    if (place.site == Site::kW2In && !agreement.guide.follows(place)) return false;
    const Encoding full = agreement.encoding(place);
    return full != Encoding::kCodes && full != Encoding::kCodes8;
  }

  std::vector<DeviceCapture::Wanted> wanted() const;
  void hand_on() { writer.hand_on(kept.keys, audit.keys); }
  std::vector<KvPlace> kv_places(std::span<const LayerKv> layers) const;
  void append_kv(std::span<const Held> spans, const KvCache& cache);
  void give_up(const Span& span);
};

Capture::Capture(const Agreement& agreement, TraceSink* sink, bool bf16, Device device,
                 Stream stream)
    : impl_(std::make_unique<Impl>(agreement, sink, bf16, device, stream)) {}

Capture::~Capture() = default;

void Capture::begin(const Pass& pass) {
  impl_->pass = &pass;
  impl_->kept.clear();
  impl_->audit.clear();
  if (impl_->sink == nullptr) return;
  impl_->writer.forget();
  for (std::int32_t row = 0; row < pass.rows(); ++row) {
    const auto at = static_cast<std::size_t>(row);
    if (!pass.fresh.empty() && pass.fresh[at] == 0) continue;
    impl_->kept.add(row, pass.keys[at]);
    if (impl_->audited(pass.keys[at])) impl_->audit.add(row, pass.keys[at]);
  }
  impl_->kept.all = std::ssize(impl_->kept.keys) == pass.asked_rows();
  if (impl_->there) impl_->there->begin(pass.rows(), impl_->kept, impl_->audit);
}

/// What a pass leaves on the device, place by place.
std::vector<DeviceCapture::Wanted> Capture::Impl::wanted() const {
  using Form = DeviceCapture::Form;
  const ModelConfig& model = agreement.model;
  const std::int64_t slots = model.experts_per_token;
  std::vector<DeviceCapture::Wanted> all;
  for (std::int32_t l = 0; l < model.num_layers; ++l) {
    for (const Site site : {Site::kRouter, Site::kW13In, Site::kW2In, Site::kK, Site::kV}) {
      const Place place = {Layer{l}, site};
      const Encoding encoding = agreement.encoding(place);
      const bool is_activation = site == Site::kW13In || site == Site::kW2In;
      if (bf16 && site != Site::kRouter && site != Site::kW2In) {
        const std::int64_t width = agreement.layout(place, Encoding::kBf16).width;
        all.push_back({Form::kNumbers, place, width * std::int64_t{sizeof(Bf16)}});
      }
      if (site == Site::kRouter && encoding != Encoding::kNone) {
        all.push_back({Form::kRoutes, place, slots * std::int64_t{sizeof(std::int32_t)}});
      }
      if (is_activation && encoding != Encoding::kNone) {
        const RowLayout layout = agreement.layout(place, encoding);
        all.push_back({Form::kRecords, place, layout.bytes(), layout});
      }
      if (!is_activation || !audits(place)) continue;
      const Quantizer rule = agreement.rule(site);
      const bool is_w2 = site == Site::kW2In;
      const std::int64_t cols = is_w2 ? model.expert_width : model.hidden;
      const std::int64_t each = is_w2 ? slots : 1;
      all.push_back({Form::kAudits,
                     place,
                     each * rule.code_bytes(cols),
                     {},
                     each,
                     rule.scale_cols(cols),
                     !is_w2 && rule.macro_cols(cols) == 0});
    }
  }
  return all;
}

RowLayout Capture::layout(Layer layer, Site site) const {
  if (impl_->sink == nullptr) return {};
  const Place place = {layer, site};
  const Encoding encoding = impl_->agreement.encoding(place);
  return encoding == Encoding::kNone ? RowLayout{} : impl_->agreement.layout(place, encoding);
}

TensorView<std::uint8_t, 2> Capture::record_room(const Pass& pass, Layer layer, Site site) {
  const RowLayout wanted = layout(layer, site);
  if (wanted.encoding == Encoding::kNone) return {};
  if (impl_->there) return impl_->there->records({layer, site});
  impl_->records.resize(static_cast<std::size_t>(pass.rows() * wanted.bytes()));
  return {impl_->records.data(), {pass.rows(), wanted.bytes()}, {wanted.bytes(), 1}};
}

PackedView<std::uint8_t> Capture::code_room(Layer layer, Site site) {
  if (impl_->sink == nullptr || !impl_->there) return {};
  return impl_->there->codes({layer, site});
}

TensorView<std::int32_t, 2> Capture::route_room([[maybe_unused]] const Pass& pass, Layer layer) {
  return impl_->there ? impl_->there->routes({layer, Site::kRouter})
                      : TensorView<std::int32_t, 2>{};
}

void Capture::activations(const Pass& pass, Layer layer, Site site,
                          TensorView<const std::uint8_t, 2> records,
                          PackedView<const std::uint8_t> codes) {
  if (impl_->sink == nullptr) return;
  assert(impl_->pass == &pass && "begin() comes before the pass");
  const Place place = {layer, site};
  if (impl_->there) return impl_->there->take_audits(place, codes);
  const RowLayout kept = layout(layer, site);
  if (kept.encoding != Encoding::kNone && !impl_->kept.empty()) {
    impl_->writer.records(impl_->kept, place, kept, records);
  }
  if (!impl_->audit.empty() && impl_->audits(place)) {
    impl_->writer.audits(impl_->audit, place, codes, codes.codes.shape[0] / pass.rows());
  }
  impl_->hand_on();
}

void Capture::numbers([[maybe_unused]] const Pass& pass, Layer layer, Site site,
                      TensorView<const Bf16, 2> x) {
  if (impl_->sink == nullptr || !impl_->bf16 || impl_->kept.empty()) return;
  assert(impl_->pass == &pass && "begin() comes before the pass");
  if (impl_->there) return impl_->there->take_numbers({layer, site}, x);
  impl_->writer.numbers(impl_->kept, {layer, site}, x);
  impl_->hand_on();
}

void Capture::routes([[maybe_unused]] const Pass& pass, Layer layer,
                     TensorView<const std::int32_t, 2> experts) {
  if (layout(layer, Site::kRouter).encoding == Encoding::kNone || impl_->kept.empty()) return;
  assert(impl_->pass == &pass && "begin() comes before the pass");
  if (impl_->there) return;
  impl_->writer.routes(impl_->kept, {layer, Site::kRouter}, experts);
  impl_->hand_on();
}

void Capture::send() {
  if (impl_->there) impl_->there->send();
}

void Capture::flush() {
  if (impl_->there) impl_->there->flush(impl_->writer);
}

bool Capture::holds() const { return impl_->there && impl_->there->holds(); }

void Capture::drop() {
  if (impl_->there) impl_->there->drop();
}

std::array<std::int64_t, 3> Capture::shape() const {
  if (!impl_->there) return {};
  const std::int64_t numbers = impl_->bf16 ? std::ssize(impl_->kept.keys) : 0;
  return {impl_->kept.empty() ? 0 : 1 + numbers, impl_->there->gathered(), impl_->at.moves};
}

/// Where K and V are recorded.
std::vector<KvPlace> Capture::Impl::kv_places(std::span<const LayerKv> layers) const {
  std::vector<KvPlace> places;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (const Site site : {Site::kK, Site::kV}) {
      const Place place = {Layer{static_cast<std::int32_t>(l)}, site};
      const kernels::PagedKv& kv = site == Site::kK ? layers[l].k : layers[l].v;
      if (!kv.rule.quantizes()) continue;
      const auto add = [&](Encoding encoding, bool of_audits) {
        places.push_back({.place = place,
                          .layout = agreement.layout(place, encoding),
                          .offset = kv.offset,
                          .row_bytes = kv.row_bytes,
                          .wide = kv.rule.is_wide(),
                          .audits = of_audits});
      };
      if (const Encoding kept = agreement.encoding(place); kept != Encoding::kNone)
        add(kept, false);
      if (audits(place)) add(Encoding::kCodes, true);
    }
  }
  return places;
}

void Capture::close(std::span<const Held> spans, const KvCache& cache) {
  if (impl_->sink == nullptr || spans.empty()) return;
  std::vector<SpanId> ids;
  for (const Held& held : spans) ids.push_back(held.span.id);
  try {
    flush();
    impl_->append_kv(spans, cache);
    impl_->sink->seal_all(ids);
  } catch (...) {
    for (const Held& held : spans) impl_->give_up(held.span);
    throw;
  }
}

/// A span without its records, and closed: what asks for them is told that they are absent.
void Capture::Impl::give_up(const Span& span) {
  try {
    sink->truncate(span.id, span.first);
    sink->seal(span.id);
  } catch (...) {  // a sink that takes nothing more: what stopped the pass is what to tell
  }
}

void Capture::Impl::append_kv(std::span<const Held> spans, const KvCache& cache) {
  if (!kv) {
    kv.emplace(
        kv_places(cache.layers()), cache.page_tokens(),
        [this](TokenKey key) { return audited(key); }, at.device, at.stream,
        at.on_cuda() ? kKvBatchOnCuda : kKvBatch);
  }
  kv->hand_on(spans, *sink);
}

}  // namespace lockstep::rollout
