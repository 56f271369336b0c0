#include "instruments/dump_trace.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "instruments/dump.h"

namespace lockstep::instruments {
namespace {

std::vector<std::byte> read(const TraceDump& dump, std::span<const TokenKey> keys, Place place,
                            Encoding encoding) {
  const RowLayout layout = dump.agreement.layout(place, encoding);
  std::vector<std::byte> bytes(keys.size() * static_cast<std::size_t>(layout.bytes()));
  std::vector<std::uint8_t> present(keys.size());
  const std::size_t found = dump.trace.read(keys, dump.agreement.contract.id(),
                                            {place, layout, std::span(bytes)}, present);
  if (found == keys.size()) return bytes;
  throw Error(cat({tensor_name(place), ": ", keys.size() - found, " of ", keys.size(),
                   " rows were not recorded"}));
}

std::vector<Bf16> numbers(const std::vector<std::byte>& bytes) {
  std::vector<Bf16> values(bytes.size() / 2);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<std::int32_t> expert_ids(const std::vector<std::byte>& bytes, Encoding encoding) {
  std::vector<std::int32_t> ids;
  const std::size_t size = encoding == Encoding::kExperts8 ? 1 : 2;
  for (std::size_t i = 0; i < bytes.size(); i += size) {
    ids.push_back(static_cast<std::int32_t>(bytes[i]) |
                  (size == 2 ? static_cast<std::int32_t>(bytes[i + 1]) << 8 : 0));
  }
  return ids;
}

}  // namespace

std::int64_t write_dump(const std::filesystem::path& path, const TraceDump& dump) {
  std::vector<TokenKey> rows;
  std::vector<Token> tokens;
  std::vector<float> logp;
  for (std::size_t i = 0; i < dump.trajectories.size(); ++i) {
    const Trajectory& t = dump.trajectories[i];
    for (const TokenKey& key : keys(t)) {
      const auto at = static_cast<std::size_t>(key.position);
      rows.push_back(key);
      tokens.push_back(t.tokens[at]);
      logp.push_back(t.response_mask[at + 1] != 0 ? dump.logp[i][at + 1] : std::nanf(""));
    }
  }
  DumpWriter::Plan plan{.rows = std::ssize(rows), .logp = true, .metadata = dump.metadata};
  const ModelConfig& model = dump.agreement.model;
  for (std::int32_t l = 0; l < model.num_layers; ++l) {
    plan.widths[{Layer{l}, Site::kW13In}] = model.hidden;
    plan.widths[{Layer{l}, Site::kK}] = model.kv_width();
    plan.widths[{Layer{l}, Site::kV}] = model.kv_width();
    if (dump.experts == Encoding::kNone) continue;
    plan.widths[{Layer{l}, Site::kRouter}] = model.experts_per_token;
  }
  DumpWriter writer(path, plan);
  writer.tokens(tokens);
  writer.logp(logp);
  for (const auto& [place, width] : plan.widths) {
    if (place.site == Site::kRouter) {
      writer.experts(place.layer, expert_ids(read(dump, rows, place, dump.experts), dump.experts));
    } else {
      writer.values(place, numbers(read(dump, rows, place, Encoding::kBf16)));
    }
  }
  writer.commit();
  return plan.rows;
}

}  // namespace lockstep::instruments
