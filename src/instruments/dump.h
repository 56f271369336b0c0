/// Dumps: what an engine computed at the places where two engines must agree, in BF16, before
/// anything is quantized. docs/formats/dump.md has the layout, which any engine can write.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "contract/site.h"
#include "model/safetensors.h"
#include "numerics/formats.h"

namespace lockstep::instruments {

/// "layers.3.w13_in"; the routes' is "layers.3.experts".
std::string tensor_name(Place place);

/// A dump, open. Rows are tokens that an engine read, one sequence behind the other.
class Dump {
 public:
  /// A .safetensors file, or a folder of them. Throws Error naming the tensor: one that no dump
  /// has, one that is there twice, of another dtype or shape than the rest asks for.
  static Dump open(const std::filesystem::path& path);

  const std::string& name() const { return name_; }  // the path as it was given
  std::int64_t rows() const { return rows_; }

  /// The places that it holds, layer by layer in the order of their computation: k, v, w13_in,
  /// router.
  const std::vector<Place>& places() const { return places_; }
  bool has(Place place) const;
  std::int64_t width(Place place) const;  // elements of a row; of the routes, experts a token

  /// [rows, width]. Throws Error with row and column of a value that is not finite.
  std::vector<Bf16> values(Place place) const;

  /// [rows, K], in the router's order; none negative.
  std::vector<std::int32_t> experts(Layer layer) const;

  /// [rows] the tokens that were read; empty where the dump does not say.
  std::vector<Token> tokens() const;

  /// [rows] the log-prob of the token that followed, as the pass over the row gave it; NaN where it
  /// was not asked for. Empty where the dump has none. Throws Error on one above 0.
  std::vector<float> logp() const;

  /// The cache's exponents, [L, 2], where the writer names them; else empty.
  std::vector<std::int8_t> kv_exponents() const;

  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  struct Found {
    std::size_t file = 0;
    TensorInfo info{};
  };

  void add(std::size_t file);
  void add(std::size_t file, const TensorInfo& info);
  std::vector<std::int32_t> integers(std::string_view name) const;
  const Found& at(std::string_view name) const;
  std::span<const std::byte> bytes(std::string_view name) const;

  std::string name_;
  std::int64_t rows_ = -1;
  std::vector<Safetensors> files_;
  std::map<std::string, Found, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
  std::vector<Place> places_;
};

/// Writes a dump tensor by tensor, so that no more than one is in memory.
class DumpWriter {
 public:
  struct Plan {
    std::int64_t rows = 0;
    std::map<Place, std::int64_t> widths{};  // of the routes, experts a token
    bool logp = false;
    std::map<std::string, std::string> metadata{};
  };
  /// Throws Error where the file cannot be made.
  DumpWriter(const std::filesystem::path& path, const Plan& plan);

  void tokens(std::span<const Token> values);
  void logp(std::span<const float> values);
  void values(Place place, std::span<const Bf16> values);
  void experts(Layer layer, std::span<const std::int32_t> values);

  /// The file is there, or not at all. Throws Error where a tensor of the plan is missing.
  void commit() { writer_.commit(); }

 private:
  SafetensorsWriter writer_;
};

}  // namespace lockstep::instruments
