#include "record/agreement.h"

#include <gtest/gtest.h>

#include <map>

#include "kernels/exact/record_row.h"
#include "model/testing.h"
#include "record/testing.h"

namespace lockstep {
namespace {

using Bytes = std::vector<std::uint8_t>;

Agreement large() {
  Agreement agreement;
  agreement.model = testing::qwen3_30b_a3b();
  agreement.contract = contracts::lockstep(48);
  agreement.guide = {.mode = Guidance::kLsb,
                     .sites = {Site::kW13In, Site::kK, Site::kV},
                     .layers = LayerSet::range(24, 48)};
  return agreement;
}

TEST(Agreement, BytesPerTokenAreTheFormula) {
  Agreement agreement = large();
  // n/8 + n/16 + 1 of w13_in, n/8 + n/16 of K and of V, in 24 layers.
  const std::int64_t compact = (2048 / 8 + 2048 / 16 + 1) + 2 * (512 / 8 + 512 / 16);
  EXPECT_EQ(agreement.bytes_per_token(), 24 * compact);
  EXPECT_EQ(agreement.bytes_per_token(), 13'848);  // the 13.8 KB of a 30B-A3B

  agreement.guide.kv_layers = LayerSet::range(36, 48);
  EXPECT_EQ(agreement.bytes_per_token(),
            24 * (2048 / 8 + 2048 / 16 + 1) + 12 * 2 * (512 / 8 + 512 / 16));
  agreement.guide.kv_layers.reset();

  agreement.guide.replay_experts = true;
  EXPECT_EQ(agreement.bytes_per_token(), 24 * compact + 48 * 8);
  agreement.model.num_experts = 512;
  EXPECT_EQ(agreement.bytes_per_token(), 24 * compact + 48 * 16);
  agreement.guide.replay_experts = false;

  agreement.guide.sites = {Site::kW2In};
  EXPECT_EQ(agreement.bytes_per_token(), 24 * (8 * 768 / 8 + 8 * 768 / 16 + 8));

  agreement.guide.sites = {Site::kW13In};
  agreement.guide.mode = Guidance::kLsbScaleMod4;
  EXPECT_EQ(agreement.bytes_per_token(), 24 * (2048 / 8 + 2048 / 64 + 1));
  agreement.guide.mode = Guidance::kFullForced;
  EXPECT_EQ(agreement.bytes_per_token(), 24 * (2048 / 2 + 2048 / 16 + 1));
  agreement.guide.mode = Guidance::kRolloutScale;
  EXPECT_EQ(agreement.bytes_per_token(), 24 * (2048 / 16 + 1));
  agreement.guide.mode = Guidance::kOwnScale;
  EXPECT_EQ(agreement.bytes_per_token(), 0);
}

TEST(Agreement, NothingIsAskedForThatNobodyWrites) {
  const Agreement agreement = large();
  EXPECT_EQ(agreement.encoding({Layer{23}, Site::kK}), Encoding::kNone);
  EXPECT_EQ(agreement.encoding({Layer{24}, Site::kK}), Encoding::kLsb);
  EXPECT_EQ(agreement.encoding({Layer{24}, Site::kW2In}), Encoding::kNone);
  EXPECT_EQ(agreement.encoding({Layer{24}, Site::kRouter}), Encoding::kNone);
}

// R70: the layers of a side network have numbers past the backbone's; nothing is recorded of them
// and nothing replayed, wherever they were named.
TEST(Agreement, R70_SideNetworksAreNotFollowed) {
  Agreement agreement = large();
  agreement.guide.replay_experts = true;
  agreement.guide.layers = LayerSet::range(0, 128);
  agreement.guide.sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV};
  for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV, Site::kRouter}) {
    EXPECT_NE(agreement.encoding({Layer{47}, site}), Encoding::kNone);
    for (const int side : {48, 49, 127, 128, 1000, -1}) {
      EXPECT_EQ(agreement.encoding({Layer{side}, site}), Encoding::kNone) << side;
    }
  }
}

/// The document's row of 32 elements, kept under `layout`.
Bytes example(const RowLayout& layout, std::int8_t second_exponent = 0) {
  const std::vector<int> codes = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 0,
                                  7, 7, 7, 7, 0, 0, 0, 0, 1, 2,  1,  2,  15, 15, 9,  10};
  Bytes packed(16);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    packed[i / 2] = static_cast<std::uint8_t>(packed[i / 2] | codes[i] << 4 * (i % 2));
  }
  const Bytes scales = {0x39, 0x7e};
  Bytes record(static_cast<std::size_t>(layout.bytes()));
  const std::int32_t slots = std::max(1, layout.exponents);
  for (std::int32_t slot = 0; slot < slots; ++slot) {
    const std::int32_t cols = layout.width / slots;
    kernels::write_record({.codes = packed.data() + slot * cols / 2,
                           .scales = scales.data() + slot * cols / 16,
                           .cols = cols,
                           .exponent = slot == 0 ? std::int8_t{-3} : second_exponent},
                          slot, layout, record.data());
  }
  return record;
}

TEST(RecordFormat, TheDocumentsExamplesAreWhatIsWritten) {
  std::map<std::string, Bytes> rows = testing::rows_in("docs/formats/record.md");
  ASSERT_EQ(rows.size(), 11u);
  EXPECT_EQ(rows["codes"], example({Encoding::kCodes, 32, 16, 1}));
  EXPECT_EQ(rows["scale"], example({Encoding::kScale, 32, 16, 1}));
  EXPECT_EQ(rows["lsb"], example({Encoding::kLsb, 32, 16, 1}));
  EXPECT_EQ(rows["lsb_scale_mod4"], example({Encoding::kLsbScaleMod4, 32, 16, 1}));
  EXPECT_EQ(rows["lsb_scale_mod4_map"], example({Encoding::kLsbScaleMod4Map, 32, 16, 1}));
  EXPECT_EQ(rows["k_lsb"], example({Encoding::kLsb, 32, 16, 0}));
  EXPECT_EQ(rows["w2_in_lsb"], example({Encoding::kLsb, 32, 16, 2}, 2));
}

TEST(RecordFormat, TheDocumentsRowOfE4M3IsWhatIsWritten) {
  const RowLayout layout = {Encoding::kCodes8, 32, 32, 0};
  Bytes codes(32), scales = {0x7d}, record(static_cast<std::size_t>(layout.bytes()));
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(8 * i);
  kernels::write_record(
      {.codes = codes.data(), .scales = scales.data(), .cols = 32, .exponent = 0, .wide = true}, 0,
      layout, record.data());
  EXPECT_EQ(testing::rows_in("docs/formats/record.md")["codes8"], record);
}

// rollout/capture_test.cc holds them against what a rollout writes.
TEST(RecordFormat, SizesAreTheDocuments) {
  std::map<std::string, Bytes> rows = testing::rows_in("docs/formats/record.md");
  const auto size = [&](const char* name) { return static_cast<std::int32_t>(rows[name].size()); };
  EXPECT_EQ(size("experts8"), (RowLayout{Encoding::kExperts8, 2, 1, 0}.bytes()));
  EXPECT_EQ(size("experts16"), (RowLayout{Encoding::kExperts16, 2, 1, 0}.bytes()));
  EXPECT_EQ(size("bf16"), (RowLayout{Encoding::kBf16, 2, 16, 1}.bytes()));
}

}  // namespace
}  // namespace lockstep
