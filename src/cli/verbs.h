/// The verbs of `lockstep`, each a function of what the command line said. Each returns the exit
/// status or throws Error: Usage (base/error.h) for what the caller wrote, another for what went
/// wrong. main.cc makes the exit status of them, and --help tells it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace lockstep::cli {

struct DemoArgs {
  std::string recipe;             // recipes/demo.toml
  std::vector<std::string> arms;  // those of the demo
  std::vector<std::string> assignments;
  std::string run = "demo";
};
int demo(const DemoArgs& args);

struct CompareArgs {
  std::string recipe;
  std::vector<std::string> arms;  // empty: the recipe's compare.arms
  std::int32_t seeds = 0;         // 0: the recipe's compare.seeds
  std::vector<std::string> assignments;
  std::string run;         // a name below runs/ or a path; empty: the recipe's name
  std::int32_t jobs = 1;   // how many runs at once, each in a process of its own
  std::int32_t cell = -1;  // that run alone, for the process that started this one
  bool look = false;       // only say where all would run, for the process that started this one
};
int compare(const CompareArgs& args);

struct DoctorArgs {
  std::string recipe;  // empty: all of recipes/, of which the demo's counts
  std::vector<std::string> assignments;
  bool quick = false;  // nothing is timed
};
int doctor(const DoctorArgs& args);

struct SftArgs {
  std::string recipe;
  std::vector<std::string> assignments;
  std::string out;  // empty: runs/<the recipe's name>
};
int sft(const SftArgs& args);

struct TrainArgs {
  std::string recipe;
  std::vector<std::string> assignments;
  std::string run;  // a name below runs/ or a path; empty: the recipe's name
};
int train(const TrainArgs& args);

struct RolloutArgs {
  std::string recipe;  // or a checkpoint, or a run directory; empty: the defaults
  std::vector<std::string> assignments;
  std::string model;        // over the recipe's
  std::string prompt;       // text; empty: the task's prompts
  std::int64_t step = -1;   // whose prompts; -1: those of evaluation
  std::string trace;        // a folder for the records
  std::string score;        // a JSONL file of sequences
  bool by_trainer = false;  // scored by the trainer
  bool gap = false;         // scored by both
  std::string out;          // empty: stdout
  std::int32_t prompts = 4;
  std::int32_t samples = 1;
};
int rollout(const RolloutArgs& args);

struct EvalArgs {
  std::string recipe;  // or a checkpoint, or a run directory
  std::vector<std::string> assignments;
  std::string model;
  std::string out;           // the answers; empty: they are not kept
  std::int32_t prompts = 0;  // 0: the recipe's eval.prompts
  std::int32_t samples = 1;
  bool greedy = false;
  std::string posthoc;    // nvfp4, four_over_six, h_scale; empty: as the arm says
  float temperature = 0;  // 0, 0 and -1: the recipe's
  float top_p = 0;
  std::int32_t top_k = -1;
};
int eval(const EvalArgs& args);

struct InspectArgs {
  std::string path;  // a checkpoint, a run directory, a folder of segments, a file of either kind
  std::string contract = "lockstep";  // under which a checkpoint's weights are measured
  std::string span;                   // an id, or PROMPT[:SAMPLE[:TURN]]: what is recorded of it
  std::string place;                  // "3.w13_in": that row of it
  std::int32_t position = -1;         // -1: the span's first
  std::string why;                    // FILE[:LINE], a sequence: why is a token of it unguided?
};
int inspect(const InspectArgs& args);

struct DumpArgs {
  std::string recipe;  // as in RolloutArgs
  std::vector<std::string> assignments;
  std::string model;
  std::string score;  // a JSONL file of sequences
  std::string out;
  bool by_trainer = false;
};
int dump(const DumpArgs& args);

struct VerifyArgs {
  std::string subject;  // as in RolloutArgs
  std::vector<std::string> assignments;
  std::string model;
};
int verify(const VerifyArgs& args);

struct DiffArgs {
  std::string a, b;  // dumps
  std::string contract = "lockstep";
  std::vector<std::string> assignments;  // contract.* and arm, over it
  double tolerance = 0.01;
  std::string json;  // a file; empty: none is written
};
int diff(const DiffArgs& args);

struct DecomposeArgs {
  std::string subject;  // as in RolloutArgs
  std::vector<std::string> assignments;
  std::string model;
  std::int32_t prompts = 32;
  std::int32_t samples = 2;
  bool layers = false;  // a layer at a time, too
  bool places = true;   // the operands' own figures
  std::string json;     // a file; empty: decomposition.json of a run, none of others
};
int decompose(const DecomposeArgs& args);

struct ReportArgs {
  std::vector<std::string> runs;  // names below runs/, or paths: run directories or folders of them
  std::string out;  // empty: report.html in the one that is given; of several, report_A_B.html in
                    // the folder of all
  std::string figures;  // a folder for the charts as SVG files; empty: none
};
int report(const ReportArgs& args);

}  // namespace lockstep::cli
