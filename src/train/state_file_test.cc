#include "train/state_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "base/error.h"

namespace lockstep::train {
namespace {

ModelConfig example_model() {
  ModelConfig config;
  config.num_layers = 1;
  config.hidden = 16;
  config.expert_width = 16;
  config.num_experts = 1;
  config.experts_per_token = 1;
  config.num_heads = 1;
  config.num_kv_heads = 1;
  config.head_dim = 16;
  config.vocabulary = 2;
  config.tied_embeddings = true;
  return config;
}

void fill(const Parameters& parameters) {
  float x = 0.0f;
  for (const Floats* numbers : {&parameters.masters, &parameters.moment1, &parameters.moment2}) {
    for (float& number : numbers->all()) number = x += 0.25f;
  }
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void overwrite(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

class StateFile : public ::testing::Test {
 protected:
  StateFile() {
    std::filesystem::create_directories(folder_);
    fill(parameters_);
    write_state(file_, parameters_, 5);
  }
  ~StateFile() override { std::filesystem::remove_all(folder_); }

  /// What reading says about the file; it must leave the masters alone.
  std::string fault(const ModelConfig& config = example_model()) const {
    Parameters target(config, {});
    try {
      read_state(file_, target);
    } catch (const Error& error) {
      for (const float x : target.masters.all()) EXPECT_EQ(x, 0.0f);
      return error.what();
    }
    return "";
  }

  std::filesystem::path folder_ = std::filesystem::path(::testing::TempDir()) /
                                  ::testing::UnitTest::GetInstance()->current_test_info()->name();
  std::filesystem::path file_ = folder_ / "trainer_state.bin";
  Parameters parameters_{example_model(), {}};
};

TEST_F(StateFile, ComesBackBitForBit) {
  Parameters target(example_model(), {});
  EXPECT_EQ(read_state(file_, target), 5);
  for (const Slot& slot : target.slots()) {
    for (const auto numbers : {&Parameters::masters, &Parameters::moment1, &Parameters::moment2}) {
      EXPECT_TRUE(std::ranges::equal(target.of(target.*numbers, slot),
                                     parameters_.of(parameters_.*numbers, slot)));
    }
  }
  EXPECT_FALSE(std::filesystem::exists(file_.string() + ".part"));
}

TEST_F(StateFile, ADamagedByteAnywhereIsNoticed) {
  const std::string good = contents(file_);
  for (std::size_t at = 0; at < good.size(); at += at < 48 ? 1 : 997) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    overwrite(file_, bad);
    EXPECT_NE(fault().find("trainer_state.bin"), std::string::npos) << at;
  }
}

TEST_F(StateFile, CutOffMissingOrOfAnotherModelIsNamed) {
  ModelConfig other = example_model();
  other.vocabulary = 3;
  EXPECT_NE(fault(other).find("another model"), std::string::npos);
  const std::string good = contents(file_);
  overwrite(file_, good.substr(0, good.size() - 1));
  EXPECT_NE(fault().find("cut off"), std::string::npos);
  overwrite(file_, good.substr(0, 20));
  EXPECT_NE(fault().find("damaged"), std::string::npos);
  std::filesystem::remove(file_);
  EXPECT_NE(fault().find("no trainer state"), std::string::npos);
}

TEST_F(StateFile, AFolderThatIsNotThereLeavesNothing) {
  EXPECT_THROW(write_state(folder_ / "no" / "state.bin", parameters_, 5), Error);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "no"));
}

TEST_F(StateFile, TheDocumentsExampleIsTheHeader) {
  std::ifstream document("docs/formats/trainer_state.md");
  if (!document) GTEST_SKIP() << "run from the root of the repository";
  const std::string text(std::istreambuf_iterator<char>(document), {});
  const std::size_t first = text.find("```\n") + 4;
  std::istringstream hex(text.substr(first, text.find("```", first) - first));
  std::string expected;
  for (unsigned byte = 0; hex >> std::hex >> byte;) expected.push_back(static_cast<char>(byte));
  const std::string bytes = contents(file_);
  EXPECT_EQ(bytes.size(), 23092u);
  EXPECT_EQ(bytes.substr(0, 40), expected);
}

}  // namespace
}  // namespace lockstep::train
