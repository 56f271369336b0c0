#include "instruments/dump.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "numerics/bf16.h"

namespace lockstep::instruments {
namespace {

constexpr std::int32_t kMaxLayers = 128;  // a LayerSet's
// In the order in which a layer computes them.
constexpr Site kSites[] = {Site::kK, Site::kV, Site::kW13In, Site::kRouter};

std::string_view word_of(Site site) {
  switch (site) {
    case Site::kW13In: return "w13_in";
    case Site::kW2In: return "w2_in";
    case Site::kK: return "k";
    case Site::kV: return "v";
    case Site::kRouter: return "experts";
  }
  return "";
}

std::optional<Place> parse_place(std::string_view name) {
  constexpr std::string_view kPrefix = "layers.";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int32_t layer = -1;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, layer);
  if (error != std::errc() || layer < 0 || stop == end || *stop != '.') return std::nullopt;
  for (const Site site : kSites) {
    const Place place = {Layer{layer}, site};
    if (std::string_view(stop + 1, end) == word_of(site) && tensor_name(place) == name) {
      return place;
    }
  }
  return std::nullopt;
}

std::vector<std::filesystem::path> files_of(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return {path};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  if (files.empty()) {
    throw Usage(cat({path.string(), ": has no .safetensors file; name a dump"}));
  }
  std::sort(files.begin(), files.end());
  return files;
}

void require_dtype(const std::string& what, const TensorInfo& info, bool holds,
                   std::string_view expected) {
  if (holds) return;
  throw Error(cat({what, ": ", info.name, " is ", dtype_name(info.dtype), ", a dump has ", expected,
                   " there"}));
}

template <typename T>
std::vector<T> copied(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <typename T>
std::vector<std::int32_t> widened(const std::vector<T>& values) {
  std::vector<std::int32_t> all;
  all.reserve(values.size());
  for (const T value : values) {
    const bool fits = value >= 0 && static_cast<std::uint64_t>(value) <= 0x7fffffffu;
    all.push_back(fits ? static_cast<std::int32_t>(value) : -1);
  }
  return all;
}

bool is_integer(Dtype dtype) {
  return dtype == Dtype::kU8 || dtype == Dtype::kU16 || dtype == Dtype::kI32 ||
         dtype == Dtype::kI64;
}

}  // namespace

std::string tensor_name(Place place) {
  return cat({"layers.", place.layer.value, ".", word_of(place.site)});
}

Dump Dump::open(const std::filesystem::path& path) {
  Dump dump;
  dump.name_ = path.string();
  for (const std::filesystem::path& file : files_of(path)) {
    dump.files_.push_back(value_or_throw(Safetensors::open(file)));
    dump.add(dump.files_.size() - 1);
  }
  if (dump.places_.empty()) {
    throw Usage(cat({dump.name_,
                     ": has none of layers.N.w13_in, .k, .v, .experts; it is no dump, which "
                     "./lockstep dump writes"}));
  }
  if (dump.rows_ == 0) throw Error(cat({dump.name_, ": has no rows"}));
  const auto order = [](const Place& place) {
    const auto at = std::find(std::begin(kSites), std::end(kSites), place.site);
    return std::pair(place.layer.value, at - std::begin(kSites));
  };
  std::sort(dump.places_.begin(), dump.places_.end(),
            [&](const Place& a, const Place& b) { return order(a) < order(b); });
  return dump;
}

void Dump::add(std::size_t file) {
  metadata_.insert(files_[file].metadata().begin(), files_[file].metadata().end());
  for (const TensorInfo& info : files_[file].tensors()) add(file, info);
}

void Dump::add(std::size_t file, const TensorInfo& info) {
  const std::string what = files_[file].path().string();
  const std::optional<Place> place = parse_place(info.name);
  if (!place && info.name != "tokens" && info.name != "logp") {
    throw Usage(cat({what, ": ", info.name,
                     " is no tensor of a dump; it holds layers.N.{w13_in,k,v,experts}, tokens and "
                     "logp"}));
  }
  if (place && place->layer.value >= kMaxLayers) {
    throw Error(cat({what, ": ", info.name, " is beyond the ", kMaxLayers, " layers of a dump"}));
  }
  if (info.name == "logp") {
    require_dtype(what, info, info.dtype == Dtype::kF32, "F32");
  } else if (place && place->site != Site::kRouter) {
    require_dtype(what, info, info.dtype == Dtype::kBf16, "BF16 (round to nearest even)");
  } else {
    require_dtype(what, info, is_integer(info.dtype), "I32 (or U8, U16, I64)");
  }
  const std::size_t rank = place ? 2 : 1;
  if (info.shape.size() != rank || (rank == 2 && info.shape[1] == 0)) {
    throw Error(cat({what, ": ", info.name, " is ", shape_text(info.shape), ", must be ",
                     rank == 2 ? "[tokens, width]" : "[tokens]"}));
  }
  if (rows_ >= 0 && info.shape[0] != rows_) {
    throw Error(cat({what, ": ", info.name, " has ", info.shape[0], " tokens, ",
                     tensors_.begin()->first, " has ", rows_}));
  }
  rows_ = info.shape[0];
  const auto [there, is_new] = tensors_.emplace(info.name, Found{file, info});
  if (!is_new) {
    throw Error(cat({what, ": ", info.name, " is in ",
                     files_[there->second.file].path().filename().string(), " already"}));
  }
  if (place) places_.push_back(*place);
}

bool Dump::has(Place place) const { return tensors_.contains(tensor_name(place)); }

const Dump::Found& Dump::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw Error(cat({name_, ": has no ", name}));
  return found->second;
}

std::span<const std::byte> Dump::bytes(std::string_view name) const {
  const Found& found = at(name);
  return files_[found.file].bytes(found.info);
}

std::int64_t Dump::width(Place place) const { return at(tensor_name(place)).info.shape[1]; }

std::vector<Bf16> Dump::values(Place place) const {
  const std::string name = tensor_name(place);
  std::vector<Bf16> values = copied<Bf16>(bytes(name));
  const auto bad =
      std::find_if_not(values.begin(), values.end(), [](Bf16 x) { return is_finite(x); });
  if (bad != values.end()) {
    const std::int64_t at = bad - values.begin();
    throw Error(cat({name_, ": ", name, " is ", std::isnan(to_float(*bad)) ? "NaN" : "infinite",
                     " at token ", at / width(place), ", element ", at % width(place)}));
  }
  return values;
}

std::vector<std::int32_t> Dump::integers(std::string_view name) const {
  const Dtype dtype = at(name).info.dtype;
  const std::span<const std::byte> raw = bytes(name);
  std::vector<std::int32_t> values = dtype == Dtype::kU8    ? widened(copied<std::uint8_t>(raw))
                                     : dtype == Dtype::kU16 ? widened(copied<std::uint16_t>(raw))
                                     : dtype == Dtype::kI32 ? widened(copied<std::int32_t>(raw))
                                                            : widened(copied<std::int64_t>(raw));
  const auto bad = std::find(values.begin(), values.end(), -1);
  if (bad != values.end()) {
    throw Error(cat(
        {name_, ": ", name, " holds a negative or too large number at ", bad - values.begin()}));
  }
  return values;
}

std::vector<std::int32_t> Dump::experts(Layer layer) const {
  return integers(tensor_name({layer, Site::kRouter}));
}

std::vector<Token> Dump::tokens() const {
  return tensors_.contains("tokens") ? integers("tokens") : std::vector<Token>();
}

std::vector<float> Dump::logp() const {
  if (!tensors_.contains("logp")) return {};
  std::vector<float> values = copied<float>(bytes("logp"));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!(values[i] > 0.0f) && !std::isinf(values[i])) continue;
    throw Error(cat({name_, ": logp is ", values[i], " at token ", i,
                     "; a log-prob is finite and at most 0, NaN where there is none"}));
  }
  return values;
}

std::vector<std::int8_t> Dump::kv_exponents() const {
  const auto found = metadata_.find("kv_exponents");
  if (found == metadata_.end()) return {};
  std::vector<std::int8_t> exponents;
  const char* at = found->second.data();
  const char* end = at + found->second.size();
  while (at != end) {
    int n = 0;
    const auto [stop, error] = std::from_chars(at, end, n);
    if (error != std::errc() || n < -116 || n > 116 || (stop != end && *stop != ' ')) {
      throw Error(cat({name_, ": kv_exponents is '", found->second,
                       "'; whole numbers from -116 to 116 with blanks between are expected"}));
    }
    exponents.push_back(static_cast<std::int8_t>(n));
    at = stop == end ? end : stop + 1;
  }
  return exponents;
}

namespace {

std::vector<TensorInfo> tensors_of(const DumpWriter::Plan& plan) {
  std::vector<TensorInfo> tensors;
  tensors.push_back({.name = "tokens", .dtype = Dtype::kI32, .shape = {plan.rows}});
  if (plan.logp) tensors.push_back({.name = "logp", .dtype = Dtype::kF32, .shape = {plan.rows}});
  for (const auto& [place, width] : plan.widths) {
    tensors.push_back({.name = tensor_name(place),
                       .dtype = place.site == Site::kRouter ? Dtype::kI32 : Dtype::kBf16,
                       .shape = {plan.rows, width}});
  }
  return tensors;
}

}  // namespace

DumpWriter::DumpWriter(const std::filesystem::path& path, const Plan& plan)
    : writer_(path, tensors_of(plan), plan.metadata) {}

void DumpWriter::tokens(std::span<const Token> values) {
  writer_.write("tokens", std::as_bytes(values));
}

void DumpWriter::logp(std::span<const float> values) {
  writer_.write("logp", std::as_bytes(values));
}

void DumpWriter::values(Place place, std::span<const Bf16> values) {
  writer_.write(tensor_name(place), std::as_bytes(values));
}

void DumpWriter::experts(Layer layer, std::span<const std::int32_t> values) {
  writer_.write(tensor_name({layer, Site::kRouter}), std::as_bytes(values));
}

}  // namespace lockstep::instruments
