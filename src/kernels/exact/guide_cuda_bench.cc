// Guided rounding on a CUDA device beside plain rounding at the own scale, which is what a trainer
// without records does: rows of w13_in, of w2_in, and a decode step's few.
#include <memory>
#include <string>
#include <vector>

#include "base/philox.h"
#include "base/text.h"
#include "device/cuda/bench.h"
#include "kernels/exact/guide.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kRule = {.element = Element::kE2m1,
                             .scale = ScaleFormat::kE4m3,
                             .global = GlobalScale::kPerToken,
                             .global_is_power_of_two = true};

struct Size {
  std::int64_t rows, cols, slots;
};

/// Records as a rollout writes them of normal numbers: bits at random, scales about 6 sigma / 6.
Buffer make_records(const Size& size, const RowLayout& layout, Device device) {
  const std::int64_t records = size.rows / size.slots;
  const std::int64_t rows = records < 1024 ? records : 1024;
  const auto bytes = static_cast<std::size_t>(layout.bytes());
  std::vector<std::uint8_t> host(static_cast<std::size_t>(rows) * bytes);
  for (std::size_t i = 0; i < host.size(); ++i) {
    const std::uint32_t word = philox(5, philox_counter(i, 0, 0))[0];
    const std::size_t at = i % bytes;
    const auto elements = static_cast<std::size_t>(layout.element_bytes());
    const bool is_scale = at >= elements && layout.encoding != Encoding::kLsbScaleMod4;
    host[i] = static_cast<std::uint8_t>(is_scale ? 0x70 + word % 12 : word);
    if (bytes - at <= static_cast<std::size_t>(layout.exponents)) host[i] = 0xF6;  // n = -10
  }
  Buffer all(device, records * layout.bytes());
  for (std::int64_t first = 0; first < records; first += rows) {
    const std::int64_t count = records - first < rows ? records - first : rows;
    copy_bytes(all.as<std::uint8_t>() + first * layout.bytes(), device, host.data(), {},
               count * layout.bytes());
  }
  synchronize(device);
  return all;
}

/// What the cases of a size read and write; kept while they run.
struct Set {
  Buffer x, out, counts;
};

cuda::BenchCase make_case(const cuda::Bench& bench, const std::shared_ptr<std::vector<Set>>& sets,
                          const Size& size, const char* name, Guidance guidance, bool counted) {
  GuideArgs args;
  args.rule = kRule;
  args.guidance = guidance;
  args.layout = {encoding_for(guidance), static_cast<std::int32_t>(size.cols * size.slots), 16,
                 static_cast<std::int32_t>(size.slots)};
  const std::int64_t records = size.rows / size.slots;
  const std::int64_t bytes = args.layout.bytes();
  std::shared_ptr<Buffer> record;
  if (guidance != Guidance::kOwnScale) {
    record = std::make_shared<Buffer>(make_records(size, args.layout, bench.device()));
    args.records = {record->as<const std::uint8_t>(), {records, bytes}, {bytes, 1}, bench.device()};
  }
  cuda::BenchCase one;
  one.name = cat({"guide ", name, counted ? ", counted" : ""});
  one.size = cat({size.rows, " x ", size.cols});
  const auto elements = static_cast<double>(size.rows * size.cols);
  one.bytes = 4.0 * elements + static_cast<double>(args.records.empty() ? 0 : records * bytes);
  one.sets = static_cast<int>(sets->size());
  one.launch = [sets, record, args, size, counted](int set, Stream stream) mutable {
    const Set& here = (*sets)[static_cast<std::size_t>(set)];
    const Device device = here.x.device();
    args.x = {here.x.as<const Bf16>(), {size.rows, size.cols}, {size.cols, 1}, device};
    args.out = {here.out.as<Bf16>(), {size.rows, size.cols}, {size.cols, 1}, device};
    if (counted) args.counts = {here.counts.as<std::int64_t>(), {kNumGuideCounts}, {1}, device};
    guide(args, stream);
  };
  return one;
}

std::shared_ptr<std::vector<Set>> make_sets(const cuda::Bench& bench, const Size& size) {
  const std::int64_t elements = size.rows * size.cols;
  auto sets = std::make_shared<std::vector<Set>>();
  const int count = cuda::Bench::sets_of(4.0 * static_cast<double>(elements));
  for (int i = 0; i < count; ++i) {
    sets->push_back({bench.normal_bf16(elements, static_cast<std::uint64_t>(i)),
                     Buffer(bench.device(), 2 * elements),
                     Buffer(bench.device(), 8 * kNumGuideCounts)});
    fill_bytes(sets->back().counts.as<void>(), bench.device(), 0, 8 * kNumGuideCounts);
  }
  return sets;
}

void guide_rows(cuda::Bench& bench) {
  for (const Size& size :
       {Size{65536, 2048, 1}, Size{163840, 768, 8}, Size{32768, 4096, 1}, Size{64, 2048, 1}}) {
    const auto sets = make_sets(bench, size);
    bench.compare({
        make_case(bench, sets, size, "own scale (plain)", Guidance::kOwnScale, false),
        make_case(bench, sets, size, "lsb", Guidance::kLsb, false),
        make_case(bench, sets, size, "lsb", Guidance::kLsb, true),
        make_case(bench, sets, size, "lsb, scale mod 4", Guidance::kLsbScaleMod4, false),
        make_case(bench, sets, size, "lsb, scale mod 4", Guidance::kLsbScaleMod4, true),
        make_case(bench, sets, size, "rollout scale", Guidance::kRolloutScale, false),
        make_case(bench, sets, size, "full, guided", Guidance::kFullGuided, false),
        make_case(bench, sets, size, "full, forced", Guidance::kFullForced, false),
    });
  }
}

/// Time by tokens, guided and plain alike.
void guide_law(cuda::Bench& bench) {
  cuda::Law plain = {.cost = "fake-quantize, time", .size = "tokens", .slope = 1, .within = 0.1};
  cuda::Law guided = plain;
  guided.cost = "guided fake-quantize, time";
  for (const std::int64_t tokens : {16384, 32768, 65536, 131072}) {
    const Size size = {tokens, 2048, 1};
    const auto sets = make_sets(bench, size);
    const std::vector<double> us =
        bench.compare({make_case(bench, sets, size, "own scale", Guidance::kOwnScale, false),
                       make_case(bench, sets, size, "lsb", Guidance::kLsb, false)});
    plain.add(static_cast<double>(tokens), us[0]);
    guided.add(static_cast<double>(tokens), us[1]);
  }
  bench.judge(plain);
  bench.judge(guided);
}

const cuda::BenchEntry kGuideLaw("law_guide", guide_law);
const cuda::BenchEntry kGuide("guide", guide_rows);

}  // namespace
}  // namespace lockstep::kernels
