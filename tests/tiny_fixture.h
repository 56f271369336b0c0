/// For tests across folders: models/tiny-moe under the contract lockstep, and a text that it knows.
#pragma once

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "model/checkpoint.h"
#include "record/agreement.h"
#include "rollout/engine.h"

namespace lockstep {

class TinyFixture : public ::testing::Test {
 protected:
  TinyFixture() : checkpoint_("models/tiny-moe") {
    agreement_.model = checkpoint_.config();
    agreement_.contract = contracts::lockstep(agreement_.model.num_layers);
    constexpr std::string_view kText = "37*46=37*40=1480;37*6=222;1480+222=1702";
    text_.assign(kText.begin(), kText.end());  // its tokens are bytes
    agreement_.contract.kv_exponents =
        rollout::calibrate_kv(agreement_.model, checkpoint_, {&text_, 1});
  }

  CheckpointSource checkpoint_;
  Agreement agreement_;
  std::vector<Token> text_;
};

}  // namespace lockstep
