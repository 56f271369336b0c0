#include "train/sites.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/experts.h"

namespace lockstep::train {

using at::Tensor;

namespace {
constexpr std::size_t kReadTokens = 512;    // whose records a task reads, at least
constexpr std::int64_t kLookTokens = 2048;  // of which a task sees whether they are audited

/// Tasks end where spans do, so that none unpacks what another does too.
std::vector<std::size_t> task_cuts(std::span<const TokenKey> keys) {
  if (keys.empty()) return {};
  std::vector<std::size_t> cuts = {0};
  for (std::size_t i = 1; i < keys.size(); ++i) {
    if (keys[i].span != keys[i - 1].span && i - cuts.back() >= kReadTokens) cuts.push_back(i);
  }
  cuts.push_back(keys.size());
  return cuts;
}

/// Which of `keys` are.
std::vector<std::size_t> audited_of(std::span<const TokenKey> keys, const Agreement& agreement) {
  std::vector<std::uint8_t> is(keys.size());
  parallel_for(std::ssize(keys), kLookTokens, [&](std::int64_t first, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(end); ++i) {
      is[i] = audited(agreement.seed, keys[i], agreement.guide.audit_every) ? 1 : 0;
    }
  });
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < is.size(); ++i) {
    if (is[i] != 0) which.push_back(i);
  }
  return which;
}

}  // namespace

Sites::Sites(const Agreement& agreement, const Qat& qat, const Pack& pack, const TraceSource* trace,
             Tally* tally, Reveal reveal, OwnRoutes own)
    : agreement_(agreement),
      contract_(agreement.contract.id()),
      qat_(qat),
      pack_(pack),
      trace_(trace),
      tally_(tally),
      reveal_(reveal),
      own_(own) {
  if (trace == nullptr) return;
  cuts_ = task_cuts(pack.keys);
  if (tally != nullptr) audited_ = audited_of(pack.keys, agreement);
}

bool Sites::quantized(Place place) const {
  return agreement_.rule(place.site).quantizes() && agreement_.contract.layers.has(place.layer);
}

bool Sites::follows(Place place) const {
  const Encoding encoding = agreement_.encoding(place);
  return trace_ != nullptr && encoding != Encoding::kNone;
}

bool Sites::audits(Place place) const {
  if (place.site == Site::kRouter) return false;  // an expert's number has no other codes
  if (audited_.empty() || !quantized(place)) return false;
  if (!agreement_.rule(place.site).is_guidable()) return false;  // no record has such codes
  return place.site != Site::kW2In || agreement_.guide.follows(place);
}

std::int8_t Sites::exponent(Place place) const {
  if (place.site != Site::kK && place.site != Site::kV) return 0;
  if (agreement_.rule(place.site).global != GlobalScale::kStatic) return 0;
  const auto at = static_cast<std::size_t>(2 * place.layer.value + (place.site == Site::kV));
  const std::vector<std::int8_t>& exponents = agreement_.contract.kv_exponents;
  if (at >= exponents.size()) {
    throw Error("the contract has " + std::to_string(exponents.size()) + " kv_exponents; layer " +
                std::to_string(place.layer.value) + " needs its own: calibrate them first");
  }
  return exponents[at];
}

Sites::Records Sites::read(Place place, Encoding encoding) const {
  const auto rows = static_cast<std::size_t>(pack_.rows());
  Records read = {agreement_.layout(place, encoding), {}, {}};
  read.bytes.resize(rows * static_cast<std::size_t>(read.layout.bytes()));
  read.present.resize(rows);
  read_into(place, read.layout, read.bytes.data(), read.present.data());
  return read;
}

/// The records of all rows of the pass. `bytes` and `present` are zeros before, unless every row
/// has a name.
void Sites::read_into(Place place, const RowLayout& layout, std::uint8_t* bytes,
                      std::uint8_t* present) const {
  parallel_for(parts(), 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t part = first; part < end; ++part) {
      read_part(part, place, layout, bytes, present);
    }
  });
}

/// Of the part's keys.
void Sites::read_part(std::int64_t part, Place place, const RowLayout& layout, std::uint8_t* bytes,
                      std::uint8_t* present) const {
  const auto [at, n] = part_of(part);
  const auto width = static_cast<std::size_t>(layout.bytes());
  // In a pass where every trajectory has a path, rows and keys are the same and nothing is moved.
  const bool same = names_all_rows();
  std::vector<std::uint8_t> room(same ? 0 : n * width), flags(same ? 0 : n);
  std::uint8_t* const to = same ? bytes + at * width : room.data();
  std::uint8_t* const there = same ? present + at : flags.data();
  trace_->read(std::span(pack_.keys).subspan(at, n), contract_,
               {place, layout, std::as_writable_bytes(std::span(to, n * width))},
               std::span(there, n));
  if (same) return;
  for (std::size_t i = 0; i < n; ++i) {
    const auto row = static_cast<std::size_t>(pack_.key_row[at + i]);
    present[row] = flags[i];
    std::copy_n(room.data() + i * width, width, bytes + row * width);
  }
}

namespace {

/// Copies a record's experts; false where they are not K distinct ones, which no router wrote.
bool decode(const std::uint8_t* record, Encoding encoding, std::int64_t k, std::int32_t experts,
            std::int32_t* out) {
  for (std::int64_t j = 0; j < k; ++j) {
    out[j] = encoding == Encoding::kExperts8 ? record[j] : record[2 * j] | record[2 * j + 1] << 8;
    if (out[j] >= experts || std::find(out, out + j, out[j]) != out + j) return false;
  }
  return true;
}

bool same_set(const std::int64_t* a, const std::int32_t* b, std::int64_t k) {
  return std::all_of(a, a + k, [&](std::int64_t e) { return std::find(b, b + k, e) != b + k; });
}

}  // namespace

Tensor Sites::experts(Layer layer, const Tensor& p) const {
  const Tensor chosen = ops::choose_experts(p, agreement_.model.experts_per_token);
  if (chosen.is_cuda()) {
    if constexpr (build::has_cuda) {
      if (own_.follow != nullptr || follows_routes(layer)) {
        follow_there(layer, chosen);
      }
    }
  } else if (own_.follow != nullptr || follows_routes(layer)) {
    follow(layer, chosen);
  }
  if (own_.keep != nullptr) keep_own(layer, chosen);
  show_experts(layer, chosen);
  return chosen;
}

bool Sites::follows_routes(Layer layer) const {
  return trace_ != nullptr && agreement_.encoding({layer, Site::kRouter}) != Encoding::kNone;
}

/// The recorded ones of the part's keys.
void Sites::recorded(std::int64_t part, Layer layer, const Choice& into) const {
  const Place place = {layer, Site::kRouter};
  const RowLayout layout = agreement_.layout(place, agreement_.encoding(place));
  const std::int64_t k = agreement_.model.experts_per_token;
  const auto [at, n] = part_of(part);
  const auto width = static_cast<std::size_t>(layout.bytes());
  std::vector<std::uint8_t> records(n * width), flags(n);
  trace_->read(std::span(pack_.keys).subspan(at, n), contract_,
               {place, layout, std::as_writable_bytes(std::span(records))}, flags);
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t row = pack_.key_row[at + i];
    std::int32_t* const experts = into.experts + row * k;
    if (flags[i] != 0 &&
        decode(&records[i * width], layout.encoding, k, agreement_.model.num_experts, experts)) {
      into.present[row] = 1;
    }
  }
}

void Sites::follow(Layer layer, const Tensor& chosen) const {
  const std::int64_t k = chosen.size(1);
  const auto rows = static_cast<std::size_t>(pack_.rows());
  std::vector<std::int32_t> experts(rows * static_cast<std::size_t>(k));
  std::vector<std::uint8_t> present(rows);
  const Choice choice = {experts.data(), present.data()};
  if (own_.follow != nullptr) {
    own(layer, choice);
  } else {
    parallel_for(parts(), 1, [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t part = first; part < end; ++part) recorded(part, layer, choice);
    });
  }
  std::int64_t* native = chosen.data_ptr<std::int64_t>();
  const std::int32_t* other = experts.data();
  std::int64_t followed = 0, mismatched = 0;
  for (const std::uint8_t is : present) {
    if (is != 0) {
      ++followed;
      mismatched += same_set(native, other, k) ? 0 : 1;
      std::copy_n(other, k, native);
    }
    native += k;
    other += k;
  }
  count_routes(followed, mismatched);
}

/// Where a token's experts of a layer begin in its trajectory's row of Routes.
std::size_t Sites::route_at(Layer layer, std::int64_t position) const {
  return static_cast<std::size_t>((position * agreement_.model.num_layers + layer.value) *
                                  agreement_.model.experts_per_token);
}

void Sites::own(Layer layer, const Choice& into) const {
  const std::int64_t k = agreement_.model.experts_per_token;
  for (std::size_t i = 0; i < pack_.start.size(); ++i) {
    const std::vector<std::uint16_t>& routes = (*own_.follow)[pack_.first + i];
    const std::int64_t end = i + 1 < pack_.start.size() ? pack_.start[i + 1] : pack_.rows();
    for (std::int64_t row = pack_.start[i]; row < end && !routes.empty(); ++row) {
      const auto from =
          routes.begin() + static_cast<std::ptrdiff_t>(route_at(layer, row - pack_.start[i]));
      std::copy_n(from, k, into.experts + row * k);
      into.present[row] = 1;
    }
  }
}

void Sites::keep_own(Layer layer, const Tensor& chosen) const {
  const std::int64_t k = chosen.size(1);
  const Tensor here = chosen.to(at::kCPU, at::kLong);
  const std::int64_t* all = here.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < pack_.start.size(); ++i) {
    std::vector<std::uint16_t>& routes = (*own_.keep)[pack_.first + i];
    const std::int64_t end = i + 1 < pack_.start.size() ? pack_.start[i + 1] : pack_.rows();
    for (std::int64_t row = pack_.start[i]; row < end; ++row) {
      std::transform(
          all + row * k, all + (row + 1) * k,
          routes.begin() + static_cast<std::ptrdiff_t>(route_at(layer, row - pack_.start[i])),
          [](std::int64_t e) { return static_cast<std::uint16_t>(e); });
    }
  }
}

void Sites::count_routes(std::int64_t followed, std::int64_t mismatched) const {
  if (tally_ == nullptr) return;
  tally_->routes_followed += followed;
  tally_->routes_absent += pack_.rows() - followed;
  tally_->routes_mismatched += mismatched;
}

/// Rows that have a name; BF16 compute or not, a dump holds BF16.
void Sites::show(Place place, const Tensor& x) const {
  if (reveal_.sink == nullptr || pack_.keys.empty()) return;
  std::vector<Bf16> all(static_cast<std::size_t>(x.numel()));
  ops::store_bf16(x.detach().to(at::kCPU, at::kFloat).contiguous(), all.data());
  const std::int64_t width = x.size(1);
  std::vector<Bf16> rows;
  rows.reserve(pack_.keys.size() * static_cast<std::size_t>(width));
  for (const std::int64_t row : pack_.key_row) {
    rows.insert(rows.end(), all.begin() + row * width, all.begin() + (row + 1) * width);
  }
  const std::lock_guard lock(*reveal_.mutex);
  reveal_.sink->append(pack_.keys, {place, agreement_.layout(place, Encoding::kBf16),
                                    std::as_bytes(std::span(rows))});
}

void Sites::show_experts(Layer layer, const Tensor& chosen) const {
  if (reveal_.sink == nullptr || pack_.keys.empty()) return;
  const Place place = {layer, Site::kRouter};
  const std::int64_t k = chosen.size(1);
  const Tensor here = chosen.to(at::kCPU, at::kLong);
  const std::int64_t* all = here.const_data_ptr<std::int64_t>();
  std::vector<std::uint8_t> rows;
  for (const std::int64_t row : pack_.key_row) {
    for (std::int64_t j = 0; j < k; ++j) {
      rows.push_back(static_cast<std::uint8_t>(all[row * k + j] & 0xff));
      rows.push_back(static_cast<std::uint8_t>(all[row * k + j] >> 8));
    }
  }
  const std::lock_guard lock(*reveal_.mutex);
  reveal_.sink->append(pack_.keys, {place, agreement_.layout(place, Encoding::kExperts16),
                                    std::as_bytes(std::span(rows))});
}

}  // namespace lockstep::train
