#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/inspect.h"
#include "cli/log.h"
#include "cli/session.h"
#include "data/chat_template.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/mx_error.h"
#include "kernels/exact/quantize.h"
#include "model/names.h"
#include "model/safetensors.h"
#include "numerics/macro_block.h"
#include "sync/refit.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using recipe::bytes_text;
using Role = WeightId::Role;

constexpr std::array kParts = {
    "embedding", "final norm", "head",   "attention norm",  "q",           "k", "v", "o", "q norm",
    "k norm",    "mlp norm",   "router", "experts gate+up", "experts down"};

struct PartSum {
  std::int64_t weights = 0;
  std::int64_t parameters = 0;
  std::int64_t file_bytes = 0;
  std::set<std::string> dtypes{};
  std::int64_t quantized = 0;  // weights that the contract makes codes of
  std::int64_t code_bytes = 0;
  std::int64_t blocks = 0, zero_blocks = 0;
  double error = 0, norm = 0;
  kernels::MxError mx{};   // of MXFP4: the parts of `error`
  double macro_error = 0;  // and what would be left of it under macro blocks
};
using Parts = std::array<PartSum, kParts.size()>;

std::size_t index(Role role) { return static_cast<std::size_t>(role); }

/// What the files hold, by part. CheckpointSource has checked them.
void count_files(const fs::path& folder, Parts& parts) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const Safetensors file = value_or_throw(Safetensors::open(entry.path()));
    for (const TensorInfo& tensor : file.tensors()) {
      const std::optional<TensorName> name = parse_name(tensor.name);
      if (!name) continue;
      PartSum& part = parts[index(name->id.role)];
      part.file_bytes += static_cast<std::int64_t>(tensor.end - tensor.first);
      part.dtypes.insert(std::string(dtype_name(tensor.dtype)));
    }
  }
}

/// The codes of weights, one after another, and how far they are from what they stand for.
class Measure {
 public:
  explicit Measure(const Quantizer& rule) : rule_(rule) {}

  void add(const Weight& weight, PartSum& part) {
    const TensorView<const float, 2> x = as_f32(weight.value);
    const auto [rows, cols] = x.shape;
    const PackedView<std::uint8_t> packed = {
        view(codes_, rows, rule_.code_bytes(cols)),
        view(scales_, rule_.scale_rows(rows), rule_.scale_cols(cols)),
        {&global_, {1}, {0}}};
    kernels::quantize_weight(x, rule_, packed);
    const auto back = view(back_, rows, cols);
    kernels::dequantize({.codes = packed, .rule = rule_, .f32 = back});
    for (std::size_t i = 0; i < back_.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) / cols;
      const auto col = static_cast<std::int64_t>(i) % cols;
      const double value = x.data[row * x.stride[0] + col * x.stride[1]];
      const double difference = static_cast<double>(back_[i]) - value;
      part.error += difference * difference;
      part.norm += value * value;
    }
    if (rule_.is_mx() && rule_.element == Element::kE2m1) add_mx(x, packed, part);
    part.quantized += 1;
    part.code_bytes += static_cast<std::int64_t>(codes_.size() + scales_.size() + sizeof global_);
    part.blocks += static_cast<std::int64_t>(scales_.size());
    part.zero_blocks += std::count(scales_.begin(), scales_.end(), std::uint8_t{0});
  }

 private:
  template <typename T>
  static TensorView<T, 2> view(std::vector<T>& values, std::int64_t rows, std::int64_t cols) {
    values.resize(static_cast<std::size_t>(rows * cols));
    return {values.data(), {rows, cols}, {cols, 1}};
  }

  /// Where MXFP4's error comes from. Overwrites the codes.
  void add_mx(const TensorView<const float, 2>& x, const PackedView<std::uint8_t>& packed,
              PartSum& part) {
    const auto [rows, cols] = x.shape;
    const auto numbers = view(bf16_, rows, cols);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t col = 0; col < cols; ++col) {
        numbers.data[row * cols + col] = to_bf16(x.data[row * x.stride[0] + col]);
      }
    }
    part.mx.add(kernels::mx_error(numbers, rule_));
    Quantizer macro = rule_;
    macro.macro_block = kMacroBlock;
    PackedView<std::uint8_t> stretched = packed;
    stretched.mantissas = view(mantissas_, rows, macro.macro_cols(cols));
    kernels::quantize({.x = numbers, .rule = macro, .out = stretched});
    kernels::dequantize({.codes = stretched, .rule = macro, .f32 = view(back_, rows, cols)});
    for (std::size_t i = 0; i < back_.size(); ++i) {
      const auto lost = static_cast<double>(back_[i]) - static_cast<double>(to_float(bf16_[i]));
      part.macro_error += lost * lost;
    }
  }

  TensorView<const float, 2> as_f32(const WeightValue& value) {
    if (const auto* f32 = std::get_if<TensorView<const float, 2>>(&value)) return *f32;
    const auto& bf16 = std::get<TensorView<const Bf16, 2>>(value);
    const auto out = view(f32_, bf16.shape[0], bf16.shape[1]);
    for (std::int64_t row = 0; row < out.shape[0]; ++row) {
      for (std::int64_t col = 0; col < out.shape[1]; ++col) {
        out.data[row * out.stride[0] + col] = to_float(bf16.data[row * bf16.stride[0] + col]);
      }
    }
    return out;
  }

  Quantizer rule_;
  std::vector<float> f32_, back_;
  std::vector<std::uint8_t> codes_, scales_, mantissas_;
  std::vector<Bf16> bf16_;
  float global_ = 0;
};

/// "" where rows of that length fit, else why they do not. FP8's blocks end where a row ends.
std::string unfit(const Quantizer& rule, std::int32_t length) {
  if (!rule.quantizes() || rule.is_wide() || length % rule.block == 0) return "";
  return cat({"no: rows of ", length, " are no multiple of the block of ", rule.block});
}

void measure(const CheckpointSource& source, const Contract& contract, Parts& parts) {
  const ModelConfig& config = source.config();
  Measure measure(contract.weight);
  Progress progress("weights", std::ssize(weight_ids(config)));
  std::int64_t done = 0;
  source.each([&](const Weight& weight) {
    progress.at(++done);
    PartSum& part = parts[index(weight.id.role)];
    const auto [out, in] = weight_shape(config, weight.id.role);
    part.weights += 1;
    part.parameters += out * in;
    const bool coded = sync::quantized(contract, weight.id);
    if (coded && unfit(contract.weight, static_cast<std::int32_t>(in)).empty()) {
      measure.add(weight, part);
    }
  });
}

std::string shape_lines(const Policy& policy, const Parts& parts) {
  const ModelConfig& c = policy.config;
  std::int64_t all = 0, experts = 0, bytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    all += parts[i].parameters;
    bytes += parts[i].file_bytes;
    if (of_expert(static_cast<Role>(i))) experts += parts[i].parameters;
  }
  const std::int64_t active = all - experts + experts / c.num_experts * c.experts_per_token;
  std::string stops;
  for (const Token token : c.stop_tokens) {
    stops += cat({" ", token, " '", policy.tokenizer.decode(std::span(&token, 1)), "'"});
  }
  const auto chat = value_or_throw(data::ChatTemplate::load(policy.folder));
  return cat({policy.folder.string(),
              ": a Qwen3-MoE of ",
              all,
              " parameters, ",
              active,
              " of them active a token, ",
              bytes_text(bytes),
              "\n",
              "shape:     ",
              c.num_layers,
              " layers of width ",
              c.hidden,
              "; ",
              c.num_experts,
              " experts of width ",
              c.expert_width,
              ", ",
              c.experts_per_token,
              " a token; ",
              c.num_heads,
              " heads, ",
              c.num_kv_heads,
              " KV heads of ",
              c.head_dim,
              "; context ",
              c.max_positions,
              "\n",
              "tokenizer: ",
              policy.tokenizer.size(),
              " tokens in a vocabulary of ",
              c.vocabulary,
              c.tied_embeddings ? ", head tied to the embedding" : "",
              "; stops at",
              stops.empty() ? " none" : stops,
              "; ",
              chat ? "a" : "no",
              " chat template\n"});
}

std::string part_lines(const Parts& parts, const ModelConfig& config, const Contract& contract) {
  std::vector<std::vector<std::string>> rows = {{"part", "weights", "parameters", "in the file",
                                                 "dtype", "in the contract", "rel. error",
                                                 "zero blocks"}};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const PartSum& part = parts[i];
    if (part.weights == 0) continue;
    std::string dtypes;
    for (const std::string& dtype : part.dtypes) dtypes += (dtypes.empty() ? "" : "+") + dtype;
    const auto role = static_cast<Role>(i);
    const auto in = static_cast<std::int32_t>(weight_shape(config, role)[1]);
    std::string coded = "BF16";
    if (of_expert(role) && part.quantized == 0) coded = unfit(contract.weight, in);
    if (part.quantized > 0) coded = bytes_text(part.code_bytes);
    if (coded.empty()) coded = "BF16";
    rows.push_back({kParts[i], cat({part.weights}), cat({part.parameters}),
                    part.file_bytes > 0 ? bytes_text(part.file_bytes) : "tied", dtypes, coded,
                    part.norm > 0 ? fixed(std::sqrt(part.error / part.norm), 4) : "",
                    part.quantized > 0 ? cat({part.zero_blocks, " of ", part.blocks}) : ""});
  }
  return columns(rows);
}

std::string fit_text(const Quantizer& rule, std::int32_t length) {
  if (rule.scale == ScaleFormat::kNone) return "under one fixed scale";
  return cat({rule.scale_cols(length), " blocks of ", std::min(rule.block, length)});
}

/// Where MXFP4's squared error comes from.
std::string mx_lines(const Parts& parts) {
  std::vector<std::vector<std::string>> rows = {{"part", "scale's bias", "dead zone", "grid",
                                                 "cos(scale, grid)", "in the dead zone",
                                                 "rel. error in macro blocks"}};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const kernels::MxError& e = parts[i].mx;
    if (e.total <= 0) continue;
    const auto percent = [](double part, double all) { return fixed(100 * part / all, 1) + " %"; };
    rows.push_back({kParts[i], percent(e.scale, e.total), percent(e.dead_zone, e.total),
                    percent(e.grid, e.total), fixed(e.cosine(), 2), percent(e.dead, e.elements),
                    fixed(std::sqrt(parts[i].macro_error / e.signal), 4)});
  }
  return rows.size() == 1 ? "" : "\n" + columns(rows);
}

std::string fit_lines(const ModelConfig& config, const Contract& contract) {
  const struct {
    const char* name;
    const Quantizer& rule;
    std::int32_t length;
  } rows[] = {{"w13_in", contract.activation, config.hidden},
              {"w2_in", contract.activation, config.expert_width},
              {"k", contract.k, config.head_dim},
              {"v", contract.v, config.head_dim}};
  std::string text;
  for (const auto& row : rows) {
    const std::string why = unfit(row.rule, row.length);
    const bool plain = row.rule.element == Element::kBf16;
    text += cat({text.empty() ? "sites:     " : ", ", row.name, " ",
                 !why.empty() ? why
                 : plain      ? std::string("BF16")
                              : fit_text(row.rule, row.length)});
  }
  return text + "\n";
}

}  // namespace

void inspect_checkpoint(const fs::path& folder, const InspectArgs& args) {
  const Policy policy = open_policy(folder.string());
  Contract contract;
  try {
    contract = contracts::preset(args.contract, policy.config.num_layers);
  } catch (const Error& error) {
    throw Usage(error.what());
  }
  Parts parts;
  count_files(folder, parts);
  measure(*policy.weights, contract, parts);
  print(shape_lines(policy, parts) + "contract:  " + args.contract + ", id " +
        hex(contract.id().value) + "\n" + fit_lines(policy.config, contract) + "\n" +
        part_lines(parts, policy.config, contract) + mx_lines(parts));
}

void inspect_safetensors(const fs::path& path) {
  const Safetensors file = value_or_throw(Safetensors::open(path));
  std::vector<std::vector<std::string>> rows = {{"tensor", "dtype", "shape", "bytes", "part"}};
  std::int64_t bytes = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    const auto size = static_cast<std::int64_t>(tensor.end - tensor.first);
    const std::optional<TensorName> name = parse_name(tensor.name);
    bytes += size;
    rows.push_back({tensor.name, std::string(dtype_name(tensor.dtype)), shape_text(tensor.shape),
                    cat({size}), name ? kParts[index(name->id.role)] : "unknown"});
  }
  print(cat({path.string(), ": ", file.tensors().size(), " tensors, ", bytes_text(bytes), "\n"}) +
        columns(rows));
}

}  // namespace lockstep::cli
