#include "kernels/exact/audit.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/testing.h"

namespace lockstep::kernels {
namespace {

using testing::kToken;
using testing::view;

struct Case {
  std::int64_t rows;
  std::vector<Bf16> roll;
  std::vector<Bf16> train;
  std::vector<Bf16> values;  // the rollout's
  RowLayout layout;
  std::vector<std::uint8_t> records;

  Case(std::int64_t n, std::int32_t cols, double drift) : rows(n) {
    for (std::int64_t i = 0; i < n * cols; ++i) {
      const PhiloxWords w = philox(4, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
      const double x = unit(w[0], w[1]) + unit(w[1], w[0]) - 1;
      roll.push_back(to_bf16(static_cast<float>(x)));
      train.push_back(to_bf16(static_cast<float>(x + drift * (unit(w[2], w[3]) - 0.5))));
    }
    layout = {Encoding::kCodes, cols, 16, 1};
    records.resize(static_cast<std::size_t>(n * layout.bytes()));
    values.resize(roll.size());
    record();
  }
  void record() {
    std::vector<std::uint8_t> codes(roll.size() / 2);
    std::vector<std::uint8_t> scales(roll.size() / 16);
    std::vector<float> global(static_cast<std::size_t>(rows));
    QuantizeArgs args;
    args.x = view<const Bf16>(roll, rows);
    args.rule = kToken;
    args.out = {view<std::uint8_t>(codes, rows),
                view<std::uint8_t>(scales, rows),
                {global.data(), {rows}, {1}}};
    args.layout = layout;
    args.records = view<std::uint8_t>(records, rows);
    quantize(args);
    DequantizeArgs back{args.out, kToken};
    back.bf16 = view<Bf16>(values, rows);
    dequantize(back);
  }
  std::vector<Bf16> guided(Guidance guidance) {
    std::vector<Bf16> out(train.size());
    GuideArgs args;
    args.x = view<const Bf16>(train, rows);
    args.rule = kToken;
    args.guidance = guidance;
    if (guidance != Guidance::kOwnScale) {
      args.layout = layout;
      args.records = view<std::uint8_t>(records, rows);
    }
    args.out = view<Bf16>(out, rows);
    guide(args);
    return out;
  }
  std::array<std::int64_t, kNumAuditCounts> audit_with(
      std::vector<Bf16> operand, std::vector<std::uint8_t>* present = nullptr) {
    std::array<std::int64_t, kNumAuditCounts> counts{};
    AuditArgs args;
    args.x = view<const Bf16>(train, rows);
    args.operand = view<const Bf16>(operand, rows);
    args.rule = kToken;
    args.layout = layout;
    args.records = view<std::uint8_t>(records, rows);
    if (present != nullptr) args.present = {present->data(), {rows}, {1}};
    args.counts = {counts.data(), {kNumAuditCounts}, {1}};
    audit(args);
    return counts;
  }
};

TEST(Audit, NothingDiffersWithoutDrift) {
  Case c(20, 128, 0);
  const auto counts = c.audit_with(c.guided(Guidance::kOwnScale));
  EXPECT_EQ(counts[kAuditRows], 20);
  EXPECT_EQ(counts[kAuditCodes], 20 * 128);
  EXPECT_EQ(counts[kAuditBlocks], 20 * 8);
  for (const AuditCount zero : {kAuditFlips, kAuditCodeFlips, kAuditAdjacent, kAuditScaleFlips,
                                kAuditStillDiffer, kAuditBeyond}) {
    EXPECT_EQ(counts[zero], 0) << zero;
  }
}

TEST(Audit, CountsWhatItSays) {
  for (const double drift : {0.01, 0.5}) {
    Case c(60, 128, drift);
    const std::vector<Bf16> own = c.guided(Guidance::kOwnScale);
    const std::vector<Bf16> full = c.guided(Guidance::kFullGuided);
    const auto counts = c.audit_with(full);
    std::int64_t flips = 0;
    std::int64_t still = 0;
    for (std::size_t i = 0; i < own.size(); ++i) {
      flips += to_float(own[i]) != to_float(c.values[i]);
      still += to_float(full[i]) != to_float(c.values[i]);
    }
    EXPECT_EQ(counts[kAuditFlips], flips);
    EXPECT_EQ(counts[kAuditStillDiffer], still);
    EXPECT_GT(counts[kAuditScaleFlips], 0);
    EXPECT_LE(counts[kAuditAdjacent], counts[kAuditCodeFlips]);
    EXPECT_LE(still, counts[kAuditBeyond]);  // within the radius full codes never fail
    if (drift < 0.1) {
      EXPECT_EQ(still, 0);
      EXPECT_EQ(counts[kAuditBeyond], 0);
      EXPECT_EQ(counts[kAuditAdjacent], counts[kAuditCodeFlips]);
    } else {
      EXPECT_GT(counts[kAuditBeyond], 100);
      EXPECT_LT(counts[kAuditAdjacent], counts[kAuditCodeFlips]);
    }
    const auto unguided = c.audit_with(own);
    EXPECT_EQ(unguided[kAuditStillDiffer], unguided[kAuditFlips]);
    EXPECT_EQ(c.audit_with(c.values)[kAuditStillDiffer], 0);
  }
}

TEST(Audit, BeyondBeginsAtAQuarterOfTheScale) {
  // One block of scale 1, by a record written by hand.
  Case c(1, 16, 0);
  std::fill(c.records.begin(), c.records.end(), std::uint8_t{0});
  c.records[8] = 0x38;  // s8 = 1; n = 0
  const auto beyond = [&](float x, std::uint8_t code) {
    std::fill(c.train.begin(), c.train.end(), Bf16{0});
    c.train[3] = to_bf16(x);
    c.records[1] = static_cast<std::uint8_t>(code << 4);
    return c.audit_with(c.values)[kAuditBeyond];
  };
  EXPECT_EQ(beyond(0.484375f, 0), 0);  // the interval of 0 ends at .25
  EXPECT_EQ(beyond(0.5f, 0), 1);
  EXPECT_EQ(beyond(-0.5f, 0), 1);
  EXPECT_EQ(beyond(1.53125f, 4), 0);  // that of 2 begins at 1.75
  EXPECT_EQ(beyond(1.5f, 4), 1);
  EXPECT_EQ(beyond(-1.53125f, 12), 0);
  EXPECT_EQ(beyond(-1.5f, 12), 1);
  EXPECT_EQ(beyond(2.0f, 12), 1);
  EXPECT_EQ(beyond(100.0f, 7), 0);
  EXPECT_EQ(beyond(4.75f, 7), 1);
}

TEST(Audit, LeavesOutAbsentDamagedAndNonfiniteRows) {
  Case c(6, 32, 0.3);
  const std::vector<Bf16> own = c.guided(Guidance::kOwnScale);
  std::vector<std::uint8_t> present = {1, 0, 1, 1, 1, 1};
  c.records[static_cast<std::size_t>(2 * c.layout.bytes() + c.layout.element_bytes())] = 0x7F;
  c.records[static_cast<std::size_t>(4 * c.layout.bytes() - 1)] = 120;
  c.train[4 * 32 + 7] = to_bf16(std::nanf(""));
  const auto counts = c.audit_with(own, &present);
  EXPECT_EQ(counts[kAuditRows], 2);
  EXPECT_EQ(counts[kAuditCodes], 64);
}

TEST(Audit, NamesWhatIsWrong) {
  Case c(2, 32, 0);
  c.layout.encoding = Encoding::kLsb;
  try {
    c.audit_with(c.values);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("must be codes"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::kernels
