/// Scores token ids by the trainer: hf_parity_test.py drives it.
///   trainer_tool MODEL_DIR f32|bf16 < sequences     one sequence of ids a line
/// Writes the log-prob of every id after a line's first.
#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "train/trainer.h"

namespace lockstep {
namespace {

std::vector<Trajectory> sequences(std::istream& in) {
  std::vector<Trajectory> batch;
  for (std::string line; std::getline(in, line);) {
    Trajectory& t = batch.emplace_back();
    std::istringstream numbers(line);
    for (Token token = 0; numbers >> token;) t.tokens.push_back(token);
    t.response_mask.assign(t.tokens.size(), 1);
  }
  return batch;
}

void score(const std::string& folder, bool bf16) {
  const CheckpointSource checkpoint(folder);
  Agreement agreement;
  agreement.model = checkpoint.config();
  const auto comm = Comm::single();
  train::Trainer trainer(agreement, {}, {.bf16 = bf16}, Device{}, *comm);
  WeightSink& sink = trainer.initial_weights();
  sink.begin(WeightVersion{0}, agreement.contract.id());
  checkpoint.each([&](const Weight& weight) { sink.put(weight); });
  sink.commit();
  for (const std::vector<float>& logp : trainer.logprobs(sequences(std::cin), nullptr)) {
    for (std::size_t t = 1; t < logp.size(); ++t) {
      std::printf("%s%.9g", t > 1 ? " " : "", static_cast<double>(logp[t]));
    }
    std::printf("\n");
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  const std::string mode = argc == 3 ? argv[2] : "";
  if (mode != "f32" && mode != "bf16") {
    std::fprintf(stderr, "usage: trainer_tool MODEL_DIR f32|bf16 < sequences\n");
    return 2;
  }
  try {
    lockstep::score(argv[1], mode == "bf16");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
