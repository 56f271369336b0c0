#include "instruments/diff.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/philox.h"
#include "numerics/bf16.h"

namespace lockstep::instruments {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kRows = 40, kHidden = 64, kKv = 32;
constexpr std::int32_t kLayers = 3;

double uniform(std::uint32_t stream, std::uint32_t i) {
  return (static_cast<double>(philox(7, philox_counter(stream, i, 3))[0]) + 0.5) / 4294967296.0;
}

double gaussian(std::uint32_t stream, std::uint32_t i) {
  return std::sqrt(-2.0 * std::log(uniform(2 * stream, i))) *
         std::cos(6.283185307179586 * uniform(2 * stream + 1, i));
}

std::vector<Bf16> numbers(std::uint32_t stream, std::int64_t count) {
  std::vector<Bf16> x;
  for (std::int64_t i = 0; i < count; ++i) {
    x.push_back(to_bf16(static_cast<float>(gaussian(stream, static_cast<std::uint32_t>(i)))));
  }
  return x;
}

/// x + sigma * |x| in a random direction: a relative drift of sigma.
std::vector<Bf16> drifted(std::vector<Bf16> x, double sigma, std::uint32_t stream) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double value = static_cast<double>(to_float(x[i]));
    const double noise = sigma * std::abs(value) * gaussian(stream, static_cast<std::uint32_t>(i));
    x[i] = to_bf16(static_cast<float>(value + noise));
  }
  return x;
}

struct Content {
  std::map<Place, std::vector<Bf16>> values;
  std::map<Layer, std::vector<std::int32_t>> experts;
  std::vector<float> logp = std::vector<float>(kRows, -1.0f);
  std::vector<Token> tokens = std::vector<Token>(kRows, 5);
};

std::int64_t width(Place place) { return place.site == Site::kW13In ? kHidden : kKv; }

Content content() {
  Content c;
  std::uint32_t stream = 1;
  for (std::int32_t l = 0; l < kLayers; ++l) {
    for (const Site site : {Site::kK, Site::kV, Site::kW13In}) {
      const Place place = {Layer{l}, site};
      c.values[place] = numbers(stream++, kRows * width(place));
    }
    for (std::int64_t i = 0; i < kRows; ++i) {
      c.experts[Layer{l}].insert(c.experts[Layer{l}].end(), {1, 3});
    }
  }
  return c;
}

class DiffTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("lockstep_diff_" + std::to_string(getpid()) +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const Content& c,
                 const std::map<std::string, std::string>& metadata = {}) const {
    DumpWriter::Plan plan{.rows = static_cast<std::int64_t>(c.tokens.size()),
                          .logp = !c.logp.empty(),
                          .metadata = metadata};
    for (const auto& [place, x] : c.values) plan.widths[place] = std::ssize(x) / plan.rows;
    for (const auto& [layer, x] : c.experts) {
      plan.widths[{layer, Site::kRouter}] = std::ssize(x) / plan.rows;
    }
    const fs::path path = folder_ / (name + ".safetensors");
    DumpWriter writer(path, plan);
    writer.tokens(c.tokens);
    if (plan.logp) writer.logp(c.logp);
    for (const auto& [place, x] : c.values) writer.values(place, x);
    for (const auto& [layer, x] : c.experts) writer.experts(layer, x);
    writer.commit();
    return path;
  }

  Diff diff_of(const Content& a, const Content& b, const DiffOptions& options = {}) const {
    return diff(Dump::open(write("a", a)), Dump::open(write("b", b)), options);
  }

  std::string refusal(const Content& a, const Content& b, const DiffOptions& options = {}) const {
    try {
      diff_of(a, b, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was refused";
  }

  fs::path folder_;
};

#define EXPECT_SAYS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "it says: " << (text)

TEST_F(DiffTest, EqualDumpsAreEqual) {
  const Content c = content();
  const Diff d = diff_of(c, c);
  EXPECT_EQ(d.verdict, Verdict::kEqual);
  EXPECT_EQ(d.places.size(), 9u);
  EXPECT_FALSE(d.first_different.has_value());
  EXPECT_TRUE(d.agrees.value());
  for (const PlaceDiff& place : d.places) {
    EXPECT_EQ(place.drift, 0.0);
    EXPECT_EQ(place.flips, 0);
    EXPECT_EQ(place.scale_flips, 0);
    for (const Left& left : place.left) EXPECT_EQ(left.differ, 0);
  }
}

TEST_F(DiffTest, NamesTheFirstPlaceThatPartsAndMeasuresItsDrift) {
  const Content a = content();
  Content b = a;
  for (auto& [place, x] : b.values) {
    const bool bad = place.layer.value == 2 || (place.layer.value == 1 && place.site != Site::kK);
    if (bad) x = drifted(x, 0.08, 77 + static_cast<std::uint32_t>(place.layer.value));
  }
  Place small = {Layer{0}, Site::kW13In};
  b.values[small] = drifted(a.values.at(small), 0.002, 91);
  for (float& logp : b.logp) logp -= 0.1f;
  const Diff d = diff_of(a, b);
  EXPECT_EQ(d.verdict, Verdict::kApart);
  EXPECT_EQ(d.first_different, small);
  EXPECT_EQ(d.first_apart, (Place{Layer{1}, Site::kV}));
  EXPECT_EQ(d.steepest, (Place{Layer{1}, Site::kV}));
  EXPECT_TRUE(d.agrees.value());
  EXPECT_NEAR(d.logp->mean, 0.1, 1e-6);
  for (const PlaceDiff& p : d.places) {
    if (p.place.layer.value != 2) continue;
    EXPECT_NEAR(p.drift, 0.08, 0.012) << tensor_name(p.place);
    EXPECT_GT(p.worst, p.drift);
  }
  const std::string text = to_text(d);
  EXPECT_SAYS(text, "they part at layers.1.v");
  EXPECT_SAYS(text, "the first that differs is layers.0.w13_in");
}

/// At a drift that field reports call large, what is left falls from mode to mode.
TEST_F(DiffTest, ModesLeaveLessTheMoreTheyRecord) {
  const Content a = content();
  Content b = a;
  for (auto& [place, x] : b.values) x = drifted(x, 0.02, 50);
  const Diff d = diff_of(a, b);
  std::array<std::int64_t, kModes.size()> differ{}, bytes{};
  for (const PlaceDiff& p : d.places) {
    EXPECT_EQ(p.left[0].differ, p.flips) << "own_scale is the unguided trainer";
    EXPECT_GE(p.code_flips, p.adjacent);
    EXPECT_GE(p.code_flips, p.up + p.down);
    EXPECT_GT(p.up, 0);
    EXPECT_GT(p.down, 0);
    EXPECT_LT(p.boundary_flips, p.boundary) << "what flips lies near a midpoint";
    EXPECT_GT(p.dead, 0);
    for (std::size_t i = 0; i < differ.size(); ++i) {
      differ[i] += p.left[i].differ;
      bytes[i] += p.left[i].bytes;
    }
  }
  const auto at = [&](Guidance mode) {
    return differ[static_cast<std::size_t>(std::find(kModes.begin(), kModes.end(), mode) -
                                           kModes.begin())];
  };
  EXPECT_GT(at(Guidance::kOwnScale), 2 * at(Guidance::kRolloutScale));
  EXPECT_GT(at(Guidance::kRolloutScale), 4 * at(Guidance::kLsb));
  EXPECT_EQ(at(Guidance::kLsb), at(Guidance::kLsbScaleMod4)) << "no block drifted by 3/31";
  EXPECT_EQ(at(Guidance::kFullForced), 0);
  // 1.5, 1.125 and 4.5 bits an element, and an exponent a token at w13_in.
  const std::int64_t elements = kLayers * (kHidden + 2 * kKv);
  EXPECT_EQ(bytes[0], 0);
  EXPECT_EQ(bytes[1], elements / 16 + kLayers);
  // Residues take whole bytes: five for a row of 32.
  EXPECT_EQ(bytes[2], kLayers * (kHidden * 9 / 64 + 1 + 2 * 5));
  EXPECT_EQ(bytes[3], elements * 3 / 16 + kLayers);
  EXPECT_EQ(bytes[4], elements * 9 / 16 + kLayers);
  EXPECT_EQ(bytes[5], bytes[4]);
}

TEST_F(DiffTest, ModesOfPowerOfTwoScales) {
  const Content a = content();
  Content b = a;
  for (auto& [place, x] : b.values) x = drifted(x, 0.02, 50);
  for (const char* contract : {"mx-rceil", "fp8"}) {
    const Diff d = diff_of(a, b, {.contract = contract});
    for (const PlaceDiff& p : d.places) {
      EXPECT_EQ(p.left[0].differ, p.flips);
      EXPECT_EQ(p.left[2].differ, p.left[3].differ) << "no block drifted by a factor of 2";
      EXPECT_GT(p.left[0].differ, p.left[3].differ);
      EXPECT_EQ(p.left[5].differ, 0);
    }
  }
}

/// W4A8: MXFP8 activations beside an NVFP4 cache, which no preset is.
TEST_F(DiffTest, EachSiteGoesByItsOwnFieldOfTheContract) {
  const Content a = content();
  Content b = a;
  for (auto& [place, x] : b.values) x = drifted(x, 0.02, 50);
  Contract rules = contracts::lockstep(1);
  rules.activation = contracts::format("mxfp8", contracts::Tensor::kActivation);
  const Diff mixed = diff_of(a, b, {.contract = "mine", .rules = rules});
  Contract all_mx = rules;
  all_mx.k = all_mx.v = contracts::format("mxfp4", contracts::Tensor::kCache);
  const Diff nvfp4 = diff_of(a, b);
  const Diff mxfp8 = diff_of(a, b, {.contract = "all mx", .rules = all_mx});
  ASSERT_EQ(mixed.places.size(), nvfp4.places.size());
  for (std::size_t i = 0; i < mixed.places.size(); ++i) {
    const bool expert = mixed.places[i].place.site == Site::kW13In;
    const PlaceDiff& same = (expert ? mxfp8 : nvfp4).places[i];
    const PlaceDiff& other = (expert ? nvfp4 : mxfp8).places[i];
    EXPECT_EQ(mixed.places[i].flips, same.flips);
    EXPECT_EQ(mixed.places[i].left[3].bytes, same.left[3].bytes);
    EXPECT_NE(mixed.places[i].flips, other.flips);
  }
  EXPECT_EQ(mixed.contract.activation, rules.activation);
  EXPECT_EQ(mixed.contract.k, rules.k);
}

TEST_F(DiffTest, CountsWhatIsSaturatedDeadAndClipped) {
  Content a = content();
  const Place k = {Layer{0}, Site::kK};
  a.values[k].assign(static_cast<std::size_t>(kRows * kKv), to_bf16(1.0f));
  Content b = a;
  b.values[k].assign(static_cast<std::size_t>(kRows * kKv), to_bf16(16.0f));
  const Diff d = diff_of(a, b);
  EXPECT_EQ(d.places[0].saturated_a, 0);
  EXPECT_EQ(d.places[0].saturated_b, kRows * kKv / 16);
  EXPECT_NEAR(d.places[0].drift, 15.0, 1e-9);
  EXPECT_EQ(d.places[0].dead, 0);
}

TEST_F(DiffTest, ExponentsOfTheCacheComeFromTheMetadata) {
  const Content a = content();
  const fs::path path = write("a", a, {{"kv_exponents", "-4 -5 -4 -5 -4 -6"}});
  const Diff d = diff(Dump::open(path), Dump::open(write("b", a)), {});
  EXPECT_EQ(d.contract.kv_exponents, (std::vector<std::int8_t>{-4, -5, -4, -5, -4, -6}));
  const Dump bad = Dump::open(write("bad", a, {{"kv_exponents", "-4,-5"}}));
  EXPECT_THROW(bad.kv_exponents(), Error);
  const Dump few = Dump::open(write("few", a, {{"kv_exponents", "-4 -5"}}));
  EXPECT_THROW(diff(few, few, {}), Error);
}

TEST_F(DiffTest, CountsRoutesThatDifferAsSets) {
  const Content a = content();
  Content b = a;
  std::swap(b.experts[Layer{1}][0], b.experts[Layer{1}][1]);  // the same set
  b.experts[Layer{2}][0] = 9;
  const Diff d = diff_of(a, b);
  EXPECT_EQ(d.routes[1].mismatched, 0);
  EXPECT_EQ(d.routes[2].mismatched, 1);
  EXPECT_EQ(d.routes[2].slots_mismatched, 1);
}

TEST_F(DiffTest, SaysWhereLogProbsAndPlacesDisagree) {
  const Content a = content();
  Content b = a;
  b.logp[3] = -1.5f;
  const Diff d = diff_of(a, b);
  EXPECT_FALSE(d.agrees.value());
  EXPECT_SAYS(to_text(d), "look behind the last place");
  EXPECT_EQ(d.logp->largest_row, 3);
  b.logp.assign(kRows, std::nanf(""));
  EXPECT_FALSE(diff_of(a, b).logp.has_value());
}

TEST_F(DiffTest, LogProbsThatFollowDriftCorrelate) {
  const Content a = content();
  Content b = a;
  const Place last = {Layer{2}, Site::kW13In};
  for (std::int64_t row = 0; row < kRows; ++row) {
    const double sigma = 0.001 * static_cast<double>(row + 1);
    for (std::int64_t i = row * kHidden; i < (row + 1) * kHidden; ++i) {
      const auto at = static_cast<std::size_t>(i);
      b.values[last][at] =
          to_bf16(to_float(a.values.at(last)[at]) * static_cast<float>(1.0 + sigma));
    }
    b.logp[static_cast<std::size_t>(row)] -= static_cast<float>(sigma);
  }
  EXPECT_GT(diff_of(a, b).logp->correlation, 0.95);
}

TEST_F(DiffTest, JsonHoldsEveryPlaceAndMode) {
  const Content a = content();
  Content b = a;
  for (auto& [place, x] : b.values) x = drifted(x, 0.02, 50);
  const Diff d = diff_of(a, b);
  const auto json = nlohmann::json::parse(to_json(d));
  EXPECT_EQ(json["places"].size(), 9u);
  EXPECT_EQ(json["verdict"], "apart");
  EXPECT_EQ(json["first_apart"], "layers.0.k");
  EXPECT_EQ(json["places"][2]["left"]["lsb"]["bytes"], kHidden * 3 / 16 + 1);
  EXPECT_EQ(json["modes"]["lsb"]["bytes_per_token"], kLayers * ((kHidden + 2 * kKv) * 3 / 16 + 1));
}

TEST_F(DiffTest, RefusesDumpsThatCannotBeCompared) {
  const Content a = content();
  Content b = a;
  b.tokens[7] = 6;
  EXPECT_SAYS(refusal(a, b), "token 7 is 5");

  b = a;
  b.values.erase({Layer{1}, Site::kK});
  EXPECT_SAYS(refusal(a, b), "has no layers.1.k");
  EXPECT_SAYS(refusal(b, a), "has no layers.1.k");

  b = a;
  b.values[{Layer{1}, Site::kV}] = numbers(3, kRows * 16);
  EXPECT_SAYS(refusal(a, b), "layers.1.v is 32 wide");

  b = a;
  b.values[{Layer{2}, Site::kW13In}][static_cast<std::size_t>(kHidden + 9)] = to_bf16(NAN);
  EXPECT_SAYS(refusal(a, b), "layers.2.w13_in is NaN at token 1, element 9");

  b = Content{};
  b.values[{Layer{0}, Site::kK}] = numbers(3, 8 * kKv);
  b.logp.resize(8);
  b.tokens.resize(8);
  EXPECT_SAYS(refusal(a, b), "has 40 tokens");

  b = a;
  b.logp[0] = 0.5f;
  EXPECT_SAYS(refusal(a, b), "logp is 0.5");

  b = a;
  b.experts[Layer{0}][1] = -2;
  EXPECT_SAYS(refusal(a, b), "negative");

  b = Content{};
  b.values[{Layer{0}, Site::kK}] = numbers(3, kRows * 24);
  EXPECT_SAYS(refusal(b, b), "blocks of 16 do not divide");
  EXPECT_SAYS(refusal(a, a, {.contract = "te"}), "compare under lockstep");
  EXPECT_SAYS(refusal(a, a, {.contract = "locksteps"}), "did you mean lockstep");
  EXPECT_SAYS(refusal(a, a, {.tolerance = 0.0}), "positive");
}

TEST_F(DiffTest, RefusesWhatIsNoDump) {
  EXPECT_THROW(Dump::open(folder_), Error);  // an empty folder
  EXPECT_THROW(Dump::open(folder_ / "no.safetensors"), Error);
  const auto refused = [&](const TensorInfo& info, std::size_t bytes) -> std::string {
    const fs::path path = folder_ / "odd.safetensors";
    SafetensorsWriter writer(path, {info});
    writer.write(info.name, std::vector<std::byte>(bytes));
    writer.commit();
    try {
      Dump::open(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was refused";
  };
  EXPECT_SAYS(refused({"layers.0.w2", Dtype::kBf16, {2, 16}}, 64), "layers.0.w2 is no tensor");
  EXPECT_SAYS(refused({"layers.00.k", Dtype::kBf16, {2, 16}}, 64), "is no tensor");
  EXPECT_SAYS(refused({"layers.0.k", Dtype::kF32, {2, 16}}, 128), "is F32");
  EXPECT_SAYS(refused({"layers.0.k", Dtype::kBf16, {2, 2, 8}}, 64), "[tokens, width]");
  EXPECT_SAYS(refused({"layers.999.k", Dtype::kBf16, {2, 16}}, 64), "beyond the 128");
  EXPECT_SAYS(refused({"tokens", Dtype::kI32, {2}}, 8), "it is no dump");
}

/// The bytes of the example in docs/formats/dump.md.
std::string example() {
  std::ifstream document("docs/formats/dump.md");
  std::string bytes, line;
  while (std::getline(document, line) && line != "```hex") continue;
  while (std::getline(document, line) && line != "```") {
    std::istringstream pairs(line);
    for (std::string pair; pairs >> pair;) {
      bytes.push_back(static_cast<char>(std::stoi(pair, nullptr, 16)));
    }
  }
  return bytes;
}

TEST_F(DiffTest, ReadsTheExampleOfTheDocument) {
  if (!fs::exists("docs/formats/dump.md")) GTEST_SKIP() << "runs from the source folder";
  const fs::path path = folder_ / "example.safetensors";
  std::ofstream(path, std::ios::binary) << example();
  const Dump dump = Dump::open(path);
  EXPECT_EQ(dump.places(), (std::vector<Place>{{Layer{0}, Site::kK}}));
  EXPECT_EQ(dump.tokens(), std::vector<Token>{5});
  EXPECT_TRUE(dump.logp().empty());
  const std::vector<Bf16> k = dump.values({Layer{0}, Site::kK});
  ASSERT_EQ(k.size(), 16u);
  for (std::size_t i = 0; i < k.size(); ++i) {
    EXPECT_EQ(to_float(k[i]), 1.0f + 0.125f * static_cast<float>(i));
  }
  EXPECT_EQ(diff(dump, dump, {}).verdict, Verdict::kEqual);
}

TEST_F(DiffTest, AFolderOfFilesIsOneDump) {
  const Content a = content();
  Content first = a, second;
  second.logp.clear();
  for (const auto& [place, x] : a.values) {
    if (place.layer.value < 2) continue;
    second.values[place] = x;
    first.values.erase(place);
  }
  const fs::path whole = write("whole", a);
  fs::create_directories(folder_ / "parts");
  fs::rename(write("one", first), folder_ / "parts" / "one.safetensors");
  // The second file names no tokens: those of the first are enough.
  std::vector<TensorInfo> tensors;
  for (const auto& [place, x] : second.values) {
    tensors.push_back({tensor_name(place), Dtype::kBf16, {kRows, width(place)}});
  }
  {
    SafetensorsWriter writer(folder_ / "parts" / "two.safetensors", tensors);
    for (const auto& [place, x] : second.values) {
      writer.write(tensor_name(place), std::as_bytes(std::span(x)));
    }
    writer.commit();
  }
  EXPECT_EQ(diff(Dump::open(whole), Dump::open(folder_ / "parts"), {}).verdict, Verdict::kEqual);
  fs::copy_file(folder_ / "parts" / "two.safetensors", folder_ / "parts" / "three.safetensors");
  EXPECT_THROW(Dump::open(folder_ / "parts"), Error);  // every tensor twice
}

}  // namespace
}  // namespace lockstep::instruments
