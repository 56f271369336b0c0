#include "rollout/door.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "contract/contract.h"

namespace lockstep::rollout {
namespace {

TEST(Door, AResidualUnderFp32GlobalScalesNamesTheKeysToSet) {
  ModelConfig model;
  model.num_layers = 2;
  model.hidden = 64;
  model.num_heads = 2;
  model.num_kv_heads = 1;
  model.head_dim = 32;
  model.num_experts = 4;
  model.experts_per_token = 2;
  model.expert_width = 32;
  const Agreement te = {model, contracts::preset("te", 2), {}, 0};
  const Device gpu{Device::Kind::kCuda, 0};
  EXPECT_NO_THROW(require_runs(te, {}, gpu));
  Options dense;
  dense.residual = Residual::kDense;
  try {
    require_runs(te, dense, gpu);
    FAIL() << "a residual under FP32 global scales";
  } catch (const Error& error) {
    const std::string line = error.what();
    for (const char* part :
         {"residual.kind is not none", "FP32 numbers", "residual.kind = \"none\"",
          "contract.preset = \"lockstep\"", "device = \"cpu\""}) {
      EXPECT_NE(line.find(part), std::string::npos) << line << "\nlacks: " << part;
    }
    EXPECT_EQ(line.find('\n'), std::string::npos) << line;
  }
  EXPECT_NO_THROW(require_runs({model, contracts::preset("lockstep", 2), {}, 0}, dense, gpu));
}

}  // namespace
}  // namespace lockstep::rollout
