// The BF16 numbers of our engine or trainer, for `lockstep diff`.
#include <limits>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/lines_out.h"
#include "cli/log.h"
#include "cli/sequences.h"
#include "cli/subject.h"
#include "cli/verbs.h"
#include "instruments/dump_trace.h"
#include "store/store.h"
#include "train/trainer.h"

namespace lockstep::cli {
namespace {

/// Refuses sequences whose BF16 rows, all kept in memory, have no room there.
void require_rows(const std::vector<Trajectory>& batch, const Subject& subject) {
  const ModelConfig& model = subject.policy.config;
  const std::int64_t numbers = model.num_layers * (model.hidden + 2 * model.kv_width());
  require_memory_of_rows(batch, static_cast<std::int64_t>(sizeof(Bf16)) * numbers,
                         "give --score a file of fewer sequences");
}

std::vector<Trajectory> sequences(const DumpArgs& args, const Subject& subject) {
  std::vector<Trajectory> batch;
  for (SequenceRow& row : read_sequences(recipe::find_file(args.score, "--score"),
                                         subject.policy.tokenizer, subject.policy.config)) {
    if (row.trajectory.tokens.size() < 2) {
      throw Error(cat({args.score, ":", row.line,
                       ": has one token; a dump's rows are those that "
                       "another follows"}));
    }
    row.trajectory.sampling.temperature = subject.recipe.schedule.sampling.temperature;
    batch.push_back(std::move(row.trajectory));
  }
  require_rows(batch, subject);
  return batch;
}

/// In memory: a dump is read once, and written at once.
store::Options in_memory(const Subject& subject) {
  return {.ram_bytes = std::numeric_limits<std::int64_t>::max() / 4,
          .run = subject.recipe.schedule.seed,
          .contract = subject.arm.contract.id()};
}

std::map<std::string, std::string> metadata(const Subject& subject, const char* engine) {
  std::string exponents;
  for (const std::int8_t n : subject.arm.contract.kv_exponents) {
    exponents += cat({exponents.empty() ? "" : " ", static_cast<int>(n)});
  }
  std::map<std::string, std::string> data = {{"engine", engine},
                                             {"model", subject.policy.folder.filename().string()},
                                             {"arm", subject.arm.name},
                                             {"contract", hex(subject.arm.contract.id().value)}};
  if (!exponents.empty()) data["kv_exponents"] = exponents;
  return data;
}

/// A span of its own for each, where no engine gave one.
void name_rows(std::vector<Trajectory>& batch) {
  for (Trajectory& t : batch) {
    t.path = {{.id = span_id(0, t.prompt, 0, 0),
               .first = 0,
               .count = static_cast<std::int32_t>(t.tokens.size()) - 1}};
  }
}

std::int64_t dump_engine(const DumpArgs& args, const Subject& subject, Comm& comm) {
  Agreement agreement = subject.agreement;
  agreement.guide = Guide{};
  agreement.guide.replay_experts = true;  // records the routes
  agreement.guide.audit_every = 0;
  rollout::Options options = subject.arm.rollout;
  options.record_bf16 = true;
  store::Store store(in_memory(subject));
  rollout::Engine engine(agreement, options, subject.device, &store, comm);
  load(subject, engine);
  const std::vector<Trajectory> read = engine.rescore(sequences(args, subject));
  PerToken logp;
  for (const Trajectory& t : read) logp.push_back(t.rollout_logp);
  return instruments::write_dump(args.out,
                                 {.agreement = agreement,
                                  .trajectories = read,
                                  .logp = logp,
                                  .trace = store,
                                  .experts = agreement.encoding({Layer{0}, Site::kRouter}),
                                  .metadata = metadata(subject, "lockstep rollout")});
}

std::int64_t dump_trainer(const DumpArgs& args, const Subject& subject, Comm& comm) {
  const Agreement& agreement = subject.agreement;
  std::vector<Trajectory> batch = sequences(args, subject);
  store::Store records(in_memory(subject)), shown(in_memory(subject));
  const bool follows =
      agreement.guide.mode != Guidance::kOwnScale || agreement.guide.replay_experts;
  if (follows) {
    rollout::Engine engine(agreement, subject.arm.rollout, subject.device, &records, comm);
    load(subject, engine);
    batch = engine.rescore(batch);
  } else {
    name_rows(batch);
  }
  train::Trainer trainer(agreement, subject.arm.qat, subject.recipe.trainer, subject.device, comm);
  load(*subject.policy.weights, trainer.initial_weights());
  for (const Trajectory& t : batch) {
    for (const Span& span : t.path) shown.open(span, agreement.contract.id());
  }
  const PerToken logp = trainer.reveal(batch, follows ? &records : nullptr, shown);
  for (const Trajectory& t : batch) {
    for (const Span& span : t.path) shown.seal(span.id);
  }
  return instruments::write_dump(args.out, {.agreement = agreement,
                                            .trajectories = batch,
                                            .logp = logp,
                                            .trace = shown,
                                            .metadata = metadata(subject, "lockstep trainer")});
}

}  // namespace

int dump(const DumpArgs& args) {
  const Subject subject = open_subject(args.recipe, args.assignments, args.model, args.by_trainer);
  check_output(args.out, "--out", {args.score});
  const GoneOnInterrupt part(destination(args.out).part.string());
  const std::unique_ptr<Comm> comm = Comm::single();
  const std::int64_t rows =
      args.by_trainer ? dump_trainer(args, subject, *comm) : dump_engine(args, subject, *comm);
  info(cat({rows, " tokens of ", args.by_trainer ? "the trainer" : "the engine", " in ", args.out,
            "; ", subject.numbers()}));
  return 0;
}

}  // namespace lockstep::cli
