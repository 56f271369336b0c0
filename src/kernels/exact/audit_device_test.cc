// audit() on every device against the CPU, count for count.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "device/testing.h"
#include "kernels/exact/audit.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kToken = {.element = Element::kE2m1,
                              .scale = ScaleFormat::kE4m3,
                              .global = GlobalScale::kPerToken,
                              .global_is_power_of_two = true};
constexpr Quantizer kMx = {.element = Element::kE2m1,
                           .block = 32,
                           .scale = ScaleFormat::kE8m0,
                           .scale_rule = ScaleRule::kMxRceil};
constexpr Quantizer kMxFp8 = {.element = Element::kE4m3,
                              .block = 32,
                              .scale = ScaleFormat::kE8m0,
                              .scale_rule = ScaleRule::kMxFloor};

/// The trainer's numbers, what guidance by one bit made of them, and the rollout's full codes.
struct Case {
  Quantizer rule;
  std::int64_t rows, cols, slots;
  std::vector<Bf16> x{}, operand{};
  std::vector<std::uint8_t> records{}, present{};
  RowLayout layout{};

  Case(const Quantizer& r, std::int64_t n, std::int64_t c, std::int64_t s)
      : rule(r), rows(n), cols(c), slots(s) {
    std::vector<Bf16> rollout;
    for (std::int64_t i = 0; i < n * c; ++i) {
      const PhiloxWords w = philox(4, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
      const double v = std::ldexp(unit(w[0], w[1]) + unit(w[1], w[0]) - 1, w[2] % 61 == 0 ? 5 : 0);
      rollout.push_back(to_bf16(static_cast<float>(v)));
      x.push_back(to_bf16(static_cast<float>(v * (1 + 0.4 * (unit(w[3], w[2]) - 0.5)))));
    }
    const bool own = r.global == GlobalScale::kPerToken;
    layout = {r.is_wide() ? Encoding::kCodes8 : Encoding::kCodes, static_cast<std::int32_t>(c * s),
              r.block, own ? static_cast<std::int32_t>(s) : 0};
    records.resize(static_cast<std::size_t>(n / s * layout.bytes()));
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(r.code_bytes(n * c)));
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(n * r.scale_cols(c)));
    std::vector<float> global(static_cast<std::size_t>(n));
    QuantizeArgs args;
    args.x = {rollout.data(), {n, c}, {c, 1}};
    args.rule = r;
    args.out = {{codes.data(), {n, r.code_bytes(c)}, {r.code_bytes(c), 1}},
                {scales.data(), {n, r.scale_cols(c)}, {r.scale_cols(c), 1}},
                {global.data(), {n}, {1}}};
    args.layout = layout;
    args.records = {records.data(), {n / s, layout.bytes()}, {layout.bytes(), 1}};
    quantize(args);
    operand.resize(x.size());
    guide({.x = {x.data(), {n, c}, {c, 1}}, .rule = r, .out = {operand.data(), {n, c}, {c, 1}}});
    for (std::int64_t i = 0; i < n / s; ++i) present.push_back(i % 3 != 1);
    records[0] = 0xFF;  // damaged under E4M3 elements alone
    records[static_cast<std::size_t>(2 * layout.bytes() + layout.element_bytes())] = 0xFF;
    x[static_cast<std::size_t>(3 * s * c)] = to_bf16(std::numeric_limits<float>::infinity());
  }

  std::vector<std::int64_t> counts(Device device, bool all) const;
};

/// A case on a device.
struct There {
  There(const Case& c, Device device, bool all)
      : x(to_device(c.x, device)),
        operand(to_device(c.operand, device)),
        records(to_device(c.records, device)),
        present(to_device(c.present, device)),
        counts(to_device(std::vector<std::int64_t>(kNumAuditCounts, 7), device)) {
    const std::int64_t tokens = c.rows / c.slots, bytes = c.layout.bytes();
    args.x = {x.as<const Bf16>(), {c.rows, c.cols}, {c.cols, 1}, device};
    args.operand = {operand.as<const Bf16>(), {c.rows, c.cols}, {c.cols, 1}, device};
    args.rule = c.rule;
    args.layout = c.layout;
    args.records = {records.as<const std::uint8_t>(), {tokens, bytes}, {bytes, 1}, device};
    if (!all) args.present = {present.as<const std::uint8_t>(), {tokens}, {1}, device};
    args.counts = {counts.as<std::int64_t>(), {kNumAuditCounts}, {1}, device};
  }
  Buffer x, operand, records, present, counts;
  AuditArgs args;
};

std::vector<std::int64_t> Case::counts(Device device, bool all) const {
  const There there(*this, device, all);
  audit(there.args);
  return to_host<std::int64_t>(there.counts);
}

std::vector<Case> cases() {
  return {Case(kToken, 24, 128, 1), Case(kToken, 24, 48, 3), Case(kMx, 15, 96, 1),
          Case(kMxFp8, 15, 96, 1), Case(kToken, 9, 2048, 1)};
}

class AuditDevice : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, AuditDevice, testing::ValuesIn(devices()), name_of_device);

TEST_P(AuditDevice, CountsWhatTheCpuCounts) {
  for (const Case& c : cases()) {
    for (const bool all : {true, false}) {
      const std::vector<std::int64_t> want = c.counts({}, all);
      EXPECT_EQ(c.counts(GetParam(), all), want);
      EXPECT_GT(want[kAuditCodeFlips], 7);
      EXPECT_GT(want[kAuditBeyond], 7);
      EXPECT_LT(want[kAuditRows], 7 + c.rows);
    }
  }
}

TEST_P(AuditDevice, SeveralAtATimeAreEachByItself) {
  std::vector<There> there;
  there.reserve(kMostAudits);
  std::vector<std::vector<std::int64_t>> want;
  for (std::size_t i = 0; i < kMostAudits; ++i) {
    const std::vector<Case> all = cases();
    const Case& c = all[i % all.size()];
    there.emplace_back(c, GetParam(), i % 2 == 0);
    want.push_back(c.counts({}, i % 2 == 0));
  }
  std::vector<AuditArgs> args;
  for (const There& one : there) args.push_back(one.args);
  args[3].x.shape[0] = 0;  // nothing to look at
  want[3].assign(kNumAuditCounts, 7);
  audit(args);
  for (std::size_t i = 0; i < args.size(); ++i) {
    EXPECT_EQ(to_host<std::int64_t>(there[i].counts), want[i]) << i;
  }
  args.push_back(args[0]);
  EXPECT_THROW(audit(args), Error);
  audit(std::span<const AuditArgs>());
}

}  // namespace
}  // namespace lockstep::kernels
