#include "model/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/bytes.h"
#include "base/text.h"
#include "model/json.h"

namespace lockstep {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "values are read as they lie");

constexpr std::uint64_t kLengthBytes = 8;
constexpr JsonLimits kHeaderLimits = {.bytes = 100'000'000, .depth = 4};
constexpr std::size_t kMaxRank = 8;

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  std::int64_t size;
};

constexpr std::array kDtypes = {
    DtypeRow{Dtype::kBool, "BOOL", 1},      DtypeRow{Dtype::kU8, "U8", 1},
    DtypeRow{Dtype::kI8, "I8", 1},          DtypeRow{Dtype::kF8E5M2, "F8_E5M2", 1},
    DtypeRow{Dtype::kF8E4M3, "F8_E4M3", 1}, DtypeRow{Dtype::kF8E8M0, "F8_E8M0", 1},
    DtypeRow{Dtype::kI16, "I16", 2},        DtypeRow{Dtype::kU16, "U16", 2},
    DtypeRow{Dtype::kF16, "F16", 2},        DtypeRow{Dtype::kBf16, "BF16", 2},
    DtypeRow{Dtype::kI32, "I32", 4},        DtypeRow{Dtype::kU32, "U32", 4},
    DtypeRow{Dtype::kF32, "F32", 4},        DtypeRow{Dtype::kF64, "F64", 8},
    DtypeRow{Dtype::kI64, "I64", 8},        DtypeRow{Dtype::kU64, "U64", 8},
};

const DtypeRow& row(Dtype dtype) {
  for (const DtypeRow& entry : kDtypes) {
    if (entry.dtype == dtype) return entry;
  }
  return kDtypes[0];
}

/// Bytes of a shape; nothing where the product is beyond 2^63.
std::optional<std::uint64_t> byte_count(Dtype dtype, std::span<const std::int64_t> shape) {
  std::int64_t bytes = dtype_size(dtype);
  for (std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return static_cast<std::uint64_t>(bytes);
}

std::optional<std::uint64_t> natural(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  return value.get<std::uint64_t>();
}

/// Reads a header's entries; throws Error without the file's name.
class HeaderReader {
 public:
  explicit HeaderReader(std::uint64_t data_first, std::uint64_t file_size)
      : data_first_(data_first), file_size_(file_size) {}

  SafetensorsHeader read(const json& header) const {
    if (!header.is_object()) throw Error("the header is no JSON object");
    SafetensorsHeader result;
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        read_metadata(entry, result.metadata);
      } else {
        result.tensors.push_back(tensor(name, entry));
      }
    }
    std::sort(result.tensors.begin(), result.tensors.end(),
              [](const TensorInfo& a, const TensorInfo& b) {
                return a.first != b.first ? a.first < b.first : a.end < b.end;
              });
    check_cover(result.tensors);
    return result;
  }

 private:
  static void read_metadata(const json& entry, std::map<std::string, std::string>& metadata) {
    if (!entry.is_object()) throw Error("__metadata__ is no JSON object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) throw Error(cat({"__metadata__: ", key, " is no string"}));
      metadata.emplace(key, value.get<std::string>());
    }
  }

  TensorInfo tensor(const std::string& name, const json& entry) const {
    const auto need = [&](bool holds, const char* wrong) {
      if (!holds) throw Error(cat({"tensor ", name, ": ", wrong}));
    };
    need(entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
             entry.contains("shape") && entry.contains("data_offsets"),
         "dtype, shape and data_offsets are expected, and no more");
    TensorInfo info{.name = name};
    need(entry["dtype"].is_string(), "dtype is no string");
    info.dtype = dtype(name, entry["dtype"].get_ref<const std::string&>());
    const json& shape = entry["shape"];
    need(shape.is_array() && shape.size() <= kMaxRank, "shape is no list of up to 8 numbers");
    for (const json& extent : shape) {
      const auto value = natural(extent);
      need(value && *value <= std::uint64_t{1} << 62, "shape has an entry that is no size");
      info.shape.push_back(static_cast<std::int64_t>(*value));
    }
    const json& offsets = entry["data_offsets"];
    need(offsets.is_array() && offsets.size() == 2 && natural(offsets[0]) && natural(offsets[1]),
         "data_offsets are no two numbers");
    place(info, *natural(offsets[0]), *natural(offsets[1]));
    return info;
  }

  static Dtype dtype(const std::string& name, const std::string& text) {
    for (const DtypeRow& entry : kDtypes) {
      if (entry.name == text) return entry.dtype;
    }
    throw Error(cat({"tensor ", name, ": dtype ", text, " is not known"}));
  }

  void place(TensorInfo& info, std::uint64_t first, std::uint64_t end) const {
    const auto bytes = byte_count(info.dtype, info.shape);
    if (!bytes) {
      throw Error(cat({"tensor ", info.name, ": shape ", shape_text(info.shape), " of dtype ",
                       dtype_name(info.dtype), " is beyond all bytes that a file can have"}));
    }
    if (end < first || end - first != *bytes) {
      throw Error(cat({"tensor ", info.name, ": dtype ", dtype_name(info.dtype), " of shape ",
                       shape_text(info.shape), " takes ", *bytes, " bytes, and data_offsets are ",
                       first, " to ", end}));
    }
    if (end > file_size_ - data_first_) {
      throw Error(cat({"truncated: tensor ", info.name, " ends at byte ", end,
                       " of the data, of which there are ", file_size_ - data_first_}));
    }
    info.first = data_first_ + first;
    info.end = data_first_ + end;
  }

  void check_cover(const std::vector<TensorInfo>& tensors) const {
    std::uint64_t at = data_first_;
    const TensorInfo* before = nullptr;
    for (const TensorInfo& info : tensors) {
      if (info.first < at) {
        throw Error(cat({"tensors ", before->name, " and ", info.name, " overlap"}));
      }
      if (info.first > at) {
        throw Error(
            cat({info.first - at, " bytes before tensor ", info.name, " belong to no tensor"}));
      }
      at = info.end;
      before = &info;
    }
    if (at != file_size_) throw Error(cat({file_size_ - at, " bytes behind the last tensor"}));
  }

  std::uint64_t data_first_;
  std::uint64_t file_size_;
};

/// Length, JSON, and spaces so that the data begins at a multiple of 8. Fills in the offsets.
std::string encode_header(std::vector<TensorInfo>& tensors,
                          const std::map<std::string, std::string>& metadata) {
  std::set<std::string_view> names;
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + json(metadata).dump();
  std::uint64_t at = 0;
  for (TensorInfo& info : tensors) {
    const auto bytes = byte_count(info.dtype, info.shape);
    if (!bytes) throw Error(cat({"tensor ", info.name, ": shape ", shape_text(info.shape)}));
    if (!names.insert(info.name).second) {
      throw Error(cat({"tensor ", info.name, " stands twice"}));
    }
    info.first = at;
    info.end = at += *bytes;
    text += cat({text.size() > 1 ? "," : "", json(info.name).dump(), ":{\"dtype\":\"",
                 dtype_name(info.dtype), "\",\"shape\":", json(info.shape).dump(),
                 ",\"data_offsets\":[", info.first, ",", info.end, "]}"});
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  std::vector<std::byte> length;
  put_le(length, static_cast<std::uint64_t>(text.size()));
  for (TensorInfo& info : tensors) {
    info.first += kLengthBytes + text.size();
    info.end += kLengthBytes + text.size();
  }
  return std::string(reinterpret_cast<const char*>(length.data()), length.size()) + text;
}

}  // namespace

std::string_view dtype_name(Dtype dtype) { return row(dtype).name; }

std::int64_t dtype_size(Dtype dtype) { return row(dtype).size; }

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::int64_t extent : shape) text += cat({text.size() > 1 ? ", " : "", extent});
  return text + "]";
}

Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file,
                                            const std::string& what) {
  if (file.size() < kLengthBytes) {
    return fault(cat({what, ": ", file.size(),
                      " bytes are no safetensors file; it is empty or "
                      "was cut short"}));
  }
  const auto length = get_le<std::uint64_t>(file, 0);
  if (length > file.size() - kLengthBytes) {
    return fault(cat({what, ": truncated, or no safetensors file: its header is said to take ",
                      length, " bytes of ", file.size()}));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                              static_cast<std::size_t>(length));
  const auto header = parse_json(text, what, kHeaderLimits);
  if (!header) return tl::unexpected(header.error());
  try {
    return HeaderReader(kLengthBytes + length, file.size()).read(*header);
  } catch (const Error& error) {
    return fault(cat({what, ": ", error.what()}));
  }
}

Result<Safetensors> Safetensors::open(const std::filesystem::path& path) {
  auto file = MappedFile::open(path);
  if (!file) return tl::unexpected(file.error());
  auto header = parse_safetensors(file->bytes(), path.string());
  if (!header) return tl::unexpected(header.error());
  Safetensors result;
  result.path_ = path;
  result.file_ = std::move(*file);
  result.header_ = std::move(*header);
  for (std::size_t i = 0; i < result.header_.tensors.size(); ++i) {
    result.by_name_.emplace(result.header_.tensors[i].name, i);
  }
  return result;
}

const TensorInfo* Safetensors::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const std::byte> Safetensors::bytes(const TensorInfo& tensor) const {
  return file_.bytes().subspan(tensor.first, tensor.end - tensor.first);
}

struct SafetensorsWriter::Plan {
  std::vector<TensorInfo> tensors;
  std::string header;

  Plan(std::vector<TensorInfo> list, const std::map<std::string, std::string>& metadata)
      : tensors(std::move(list)), header(encode_header(tensors, metadata)) {}

  std::uint64_t size() const { return tensors.empty() ? header.size() : tensors.back().end; }
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : SafetensorsWriter(path, Plan(std::move(tensors), metadata)) {}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, Plan plan)
    : what_(path.string()), file_(path, plan.size()) {
  file_.write(0, std::as_bytes(std::span(plan.header)));
  for (TensorInfo& info : plan.tensors) open_.emplace(info.name, std::move(info));
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  const auto found = open_.find(name);
  if (found == open_.end()) {
    throw Error(cat({what_, ": tensor ", name, " is written already, or was not announced"}));
  }
  const TensorInfo& info = found->second;
  if (bytes.size() != info.end - info.first) {
    throw Error(
        cat({what_, ": tensor ", name, " has ", bytes.size(), " bytes; ", dtype_name(info.dtype),
             " ", shape_text(info.shape), " takes ", info.end - info.first}));
  }
  file_.write(info.first, bytes);
  open_.erase(found);
}

void SafetensorsWriter::commit() {
  if (!open_.empty()) {
    throw Error(cat(
        {what_, ": ", open_.size(), " tensors are missing, ", open_.begin()->first, " the first"}));
  }
  file_.commit();
}

}  // namespace lockstep
