/// Traces for the tests and benchmarks of this folder.
#pragma once

#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "record/trace.h"

namespace lockstep::train {

/// Rows by token, place and encoding; what is not there is absent.
class FakeTrace : public TraceSource {
 public:
  std::size_t read(std::span<const TokenKey> tokens, ContractId, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override {
    const auto width = static_cast<std::size_t>(rows.layout.bytes());
    std::size_t found = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto row = rows_.find({tokens[i], rows.place, rows.layout.encoding});
      present[i] = row != rows_.end() ? 1 : 0;
      std::memset(&rows.bytes[i * width], 0, width);
      if (row == rows_.end()) continue;
      if (row->second.size() != width) throw Error("a record of another layout");
      std::memcpy(&rows.bytes[i * width], row->second.data(), width);
      ++found;
    }
    return found;
  }
  void prefetch(std::span<const TokenKey>) const override {}

  void put(TokenKey token, Place place, Encoding encoding, std::vector<std::uint8_t> row) {
    rows_[{token, place, encoding}] = std::move(row);
  }
  void forget(TokenKey token, Place place, Encoding encoding) {
    rows_.erase({token, place, encoding});
  }

 private:
  std::map<std::tuple<TokenKey, Place, Encoding>, std::vector<std::uint8_t>> rows_;
};

/// Every token has a record everywhere, of bits that follow from its name: what a rollout of quite
/// other weights might have left.
class RandomTrace final : public TraceSource {
 public:
  explicit RandomTrace(std::uint32_t num_experts) : num_experts_(num_experts) {}

  std::size_t read(std::span<const TokenKey> tokens, ContractId, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override {
    const auto width = static_cast<std::size_t>(rows.layout.bytes());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      fill(tokens[i], rows.place, rows.layout,
           reinterpret_cast<std::uint8_t*>(&rows.bytes[i * width]));
      present[i] = 1;
    }
    return tokens.size();
  }
  void prefetch(std::span<const TokenKey>) const override {}

 private:
  void fill(TokenKey token, Place place, const RowLayout& layout, std::uint8_t* row) const {
    const auto place_id =
        static_cast<std::uint32_t>(place.layer.value * 8 + static_cast<int>(place.site));
    const auto at = static_cast<std::uint32_t>(token.position);
    const auto word = [&](int i) {
      return philox(token.span.value,
                    philox_counter(place_id, at, static_cast<std::uint32_t>(i)))[0];
    };
    if (layout.encoding == Encoding::kExperts8) {
      const std::uint32_t first = word(0) % num_experts_;
      for (std::int32_t k = 0; k < layout.width; ++k) {
        row[k] =
            static_cast<std::uint8_t>((first + 3 * static_cast<std::uint32_t>(k)) % num_experts_);
      }
      return;
    }
    const int elements = layout.element_bytes(),
              scales = elements + layout.scale_bytes() + layout.map_bytes();
    const bool residues =
        layout.encoding == Encoding::kLsbScaleMod4 || layout.encoding == Encoding::kLsbScaleMod4Map;
    for (int i = 0; i < layout.bytes(); ++i) {
      const std::uint32_t w = word(i);
      if (i < elements) {
        row[i] = static_cast<std::uint8_t>(layout.encoding == Encoding::kCodes ? w & 0x77u : w);
      } else if (i < scales) {
        row[i] = static_cast<std::uint8_t>(residues ? w : 0x58u + w % 0x20u);
      } else {
        row[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(-9));
      }
    }
  }

  std::uint32_t num_experts_;
};

}  // namespace lockstep::train
