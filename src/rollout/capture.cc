#include "rollout/capture.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "numerics/exponent.h"
#include "rollout/forward.h"
#include "rollout/kv_rows.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kGrain = 256;  // rows a thread copies at least

/// kCodes of one token from `slots` packed rows that start at `row`: codes, scales, exponents if
/// `own` says that rows have some.
void pack_row(const PackedView<const std::uint8_t>& codes, std::int64_t row, std::int64_t slots,
              bool own, std::byte* out) {
  for (std::int64_t s = row; s < row + slots; ++s) {
    const auto bytes = static_cast<std::size_t>(codes.codes.shape[1]);
    std::memcpy(out, codes.codes.data + s * codes.codes.stride[0], bytes);
    out += bytes;
  }
  for (std::int64_t s = row; s < row + slots; ++s) {
    const auto bytes = static_cast<std::size_t>(codes.scales.shape[1]);
    std::memcpy(out, codes.scales.data + s * codes.scales.stride[0], bytes);
    out += bytes;
  }
  for (std::int64_t s = row; own && s < row + slots; ++s) {
    const float global =
        codes.global.empty() ? 1.0f : codes.global.data[s * codes.global.stride[0]];
    *out++ = static_cast<std::byte>(static_cast<std::int8_t>(exponent_of(global)));
  }
}

}  // namespace

struct Capture::Impl {
  Agreement agreement;
  TraceSink* sink = nullptr;
  bool bf16 = false;

  // Of the pass that runs.
  const Pass* pass = nullptr;
  bool all = false;                  // every row is recorded
  std::vector<std::int64_t> rows{};  // those that are
  std::vector<TokenKey> keys{};
  std::vector<std::int64_t> audit_rows{};
  std::vector<TokenKey> audit_keys{};
  std::vector<std::byte> buffer{};

  bool audited(TokenKey key) const {
    return lockstep::audited(agreement.seed, key, agreement.guide.audit_every);
  }

  /// Does an audit token keep full codes there? Not beside a record that is full anyway.
  bool audits(Place place) const {
    if (!agreement.rule(place.site).is_guidable()) return false;
    if (!agreement.contract.layers.has(place.layer)) return false;
    if (place.site == Site::kW2In && !agreement.guide.follows(place)) return false;
    const Encoding kept = agreement.encoding(place);
    return kept != Encoding::kCodes && kept != Encoding::kCodes8;
  }

  std::span<std::byte> room(std::size_t rows_kept, std::int32_t row_bytes) {
    buffer.resize(rows_kept * static_cast<std::size_t>(row_bytes));
    return buffer;
  }

  void append_kv(std::span<const TokenKey> of, std::span<const std::byte* const> cache_rows,
                 Place place, Encoding encoding);
};

Capture::Capture(const Agreement& agreement, TraceSink* sink, bool bf16)
    : impl_(std::make_unique<Impl>(Impl{.agreement = agreement, .sink = sink, .bf16 = bf16})) {}

Capture::~Capture() = default;

void Capture::begin(const Pass& pass) {
  impl_->pass = &pass;
  impl_->all = pass.fresh.empty();
  impl_->rows.clear();
  impl_->keys.clear();
  impl_->audit_rows.clear();
  impl_->audit_keys.clear();
  if (impl_->sink == nullptr) return;
  for (std::int64_t i = 0; i < pass.rows(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (!impl_->all && pass.fresh[at] == 0) continue;
    impl_->rows.push_back(i);
    impl_->keys.push_back(pass.keys[at]);
    if (!impl_->audited(pass.keys[at])) continue;
    impl_->audit_rows.push_back(i);
    impl_->audit_keys.push_back(pass.keys[at]);
  }
  impl_->all = static_cast<std::int64_t>(impl_->rows.size()) == pass.rows();
}

RowLayout Capture::layout(Layer layer, Site site) const {
  if (impl_->sink == nullptr) return {};
  const Place place = {layer, site};
  const Encoding encoding = impl_->agreement.encoding(place);
  return encoding == Encoding::kNone ? RowLayout{} : impl_->agreement.layout(place, encoding);
}

void Capture::activations(const Pass& pass, Layer layer, Site site,
                          TensorView<const std::uint8_t, 2> records,
                          PackedView<const std::uint8_t> codes) {
  if (impl_->sink == nullptr) return;
  assert(impl_->pass == &pass && "begin() comes before the pass");
  const Place place = {layer, site};
  const RowLayout kept = layout(layer, site);
  if (kept.encoding != Encoding::kNone && !impl_->keys.empty()) {
    const auto width = static_cast<std::size_t>(kept.bytes());
    const auto* data = reinterpret_cast<const std::byte*>(records.data);
    if (impl_->all && records.stride[0] == kept.bytes()) {
      impl_->sink->append(impl_->keys, {place, kept, {data, impl_->keys.size() * width}});
    } else {
      const std::span<std::byte> out = impl_->room(impl_->keys.size(), kept.bytes());
      for (std::size_t i = 0; i < impl_->rows.size(); ++i) {
        std::memcpy(&out[i * width], data + impl_->rows[i] * records.stride[0], width);
      }
      impl_->sink->append(impl_->keys, {place, kept, out});
    }
  }
  if (impl_->audit_keys.empty() || !impl_->audits(place)) return;
  const RowLayout full = impl_->agreement.layout(place, Encoding::kCodes);
  const std::span<std::byte> out = impl_->room(impl_->audit_keys.size(), full.bytes());
  const std::int64_t slots = codes.codes.shape[0] / pass.rows();
  for (std::size_t i = 0; i < impl_->audit_rows.size(); ++i) {
    pack_row(codes, impl_->audit_rows[i] * slots, slots, full.exponents > 0,
             &out[i * static_cast<std::size_t>(full.bytes())]);
  }
  impl_->sink->append(impl_->audit_keys, {place, full, out});
}

void Capture::numbers([[maybe_unused]] const Pass& pass, Layer layer, Site site,
                      TensorView<const Bf16, 2> x) {
  if (impl_->sink == nullptr || !impl_->bf16 || impl_->keys.empty()) return;
  assert(impl_->pass == &pass && "begin() comes before the pass");
  const Place place = {layer, site};
  const RowLayout kept = impl_->agreement.layout(place, Encoding::kBf16);
  const auto width = static_cast<std::size_t>(kept.bytes());
  const std::span<std::byte> out = impl_->room(impl_->keys.size(), kept.bytes());
  for (std::size_t i = 0; i < impl_->rows.size(); ++i) {
    std::memcpy(&out[i * width], x.data + impl_->rows[i] * x.stride[0], width);
  }
  impl_->sink->append(impl_->keys, {place, kept, out});
}

void Capture::routes([[maybe_unused]] const Pass& pass, Layer layer,
                     TensorView<const std::int32_t, 2> experts) {
  const RowLayout kept = layout(layer, Site::kRouter);
  if (kept.encoding == Encoding::kNone || impl_->keys.empty()) return;
  assert(impl_->pass == &pass && "begin() comes before the pass");
  const std::int32_t count = impl_->agreement.model.num_experts;
  const bool wide = kept.encoding == Encoding::kExperts16;
  const std::span<std::byte> out = impl_->room(impl_->keys.size(), kept.bytes());
  std::byte* next = out.data();
  for (std::size_t i = 0; i < impl_->rows.size(); ++i) {
    const std::int32_t* chosen = experts.data + impl_->rows[i] * experts.stride[0];
    for (std::int32_t k = 0; k < kept.width; ++k) {
      const std::int32_t expert = chosen[k];
      if (expert < 0 || expert >= count || std::find(chosen, chosen + k, expert) != chosen + k) {
        throw Error(cat({"layer ", layer.value, ", position ", impl_->keys[i].position,
                         ": the router's choice ", k, " is expert ", expert,
                         ", which repeats or is none of ", count}));
      }
      *next++ = static_cast<std::byte>(expert & 0xff);
      if (wide) *next++ = static_cast<std::byte>(expert >> 8);
    }
  }
  impl_->sink->append(impl_->keys, {{layer, Site::kRouter}, kept, out});
}

void Capture::Impl::append_kv(std::span<const TokenKey> of,
                              std::span<const std::byte* const> cache_rows, Place place,
                              Encoding encoding) {
  const RowLayout layout = agreement.layout(place, encoding);
  const bool wide = agreement.rule(place.site).is_wide();
  const auto width = static_cast<std::size_t>(layout.bytes());
  const std::span<std::byte> out = room(of.size(), layout.bytes());
  parallel_for(
      static_cast<std::int64_t>(of.size()), kGrain, [&](std::int64_t first, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(end); ++i) {
          record_from_row(cache_rows[i], layout, wide, &out[i * width]);
        }
      });
  sink->append(of, {place, layout, out});
}

void Capture::close(std::span<const Held> spans, std::span<const LayerKv> cache) {
  if (impl_->sink == nullptr) return;
  std::vector<TokenKey> keys, audit_keys;
  std::vector<const std::byte*> pages, audit_pages;  // of each key
  for (const Held& held : spans) {
    for (std::int32_t i = 0; i < held.span.count; ++i) {
      const TokenKey key = {held.span.id, held.span.first + i};
      const auto page = static_cast<std::size_t>(key.position / cache[0].k.page_tokens);
      keys.push_back(key);
      pages.push_back(held.pages[page]);
      if (!impl_->audited(key)) continue;
      audit_keys.push_back(key);
      audit_pages.push_back(held.pages[page]);
    }
  }
  std::vector<const std::byte*> rows;
  const auto locate = [&](std::span<const TokenKey> of, std::span<const std::byte* const> in,
                          const kernels::PagedKv& kv) {
    rows.resize(of.size());
    for (std::size_t i = 0; i < of.size(); ++i) {
      rows[i] = in[i] + kv.offset +
                static_cast<std::int64_t>(of[i].position % kv.page_tokens) * kv.row_bytes;
    }
  };
  for (std::size_t l = 0; l < cache.size() && !keys.empty(); ++l) {
    for (const Site site : {Site::kK, Site::kV}) {
      const Place place = {Layer{static_cast<std::int32_t>(l)}, site};
      const kernels::PagedKv& kv = site == Site::kK ? cache[l].k : cache[l].v;
      if (!kv.rule.quantizes()) continue;
      if (const Encoding kept = impl_->agreement.encoding(place); kept != Encoding::kNone) {
        locate(keys, pages, kv);
        impl_->append_kv(keys, rows, place, kept);
      }
      if (audit_keys.empty() || !impl_->audits(place)) continue;
      locate(audit_keys, audit_pages, kv);
      impl_->append_kv(audit_keys, rows, place, Encoding::kCodes);
    }
  }
  for (const Held& held : spans) impl_->sink->seal(held.span.id);
}

}  // namespace lockstep::rollout
