#include "cli/session.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>

#include "base/text.h"
#include "base/timer.h"
#include "base/wait.h"
#include "cli/log.h"
#include "cli/machine.h"
#include "cli/verbs.h"
#include "device/memory.h"
#include "model/config_json.h"
#include "model/json.h"
#include "rollout/door.h"
#include "rollout/kv_cache.h"
#include "sync/refit.h"
#include "train/trainer.h"

namespace lockstep::cli {

namespace {

/// Of a model runs/NAME that is not there: the recipe of that name which teaches it, or "".
std::string taught_by(const std::filesystem::path& model) {
  if (model.parent_path() != "runs") return "";
  const std::string file = "recipes/" + model.filename().string() + ".toml";
  try {
    return recipe::is_sft(recipe::find(file, "the recipe")) ? file : "";
  } catch (const Error&) {
    return "";
  }
}

std::filesystem::path find_model(const std::string& path) {
  try {
    return recipe::find(path, "model");
  } catch (const Error& error) {
    const std::string file = taught_by(std::filesystem::path(path).lexically_normal());
    if (file.empty()) throw;
    throw Usage(cat(
        {"model is '", path, "', which is not there yet; ./lockstep sft ", file, " teaches it"}));
  }
}

}  // namespace

std::filesystem::path checkpoint_folder(const std::string& path) {
  std::filesystem::path folder = find_model(path);
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    throw Usage(
        cat({"model is '", path, "', which is no folder; give it a Hugging Face directory"}));
  }
  if (!std::filesystem::exists(folder / "config.json", error)) {
    throw Usage(
        cat({"model is '", path, "', which has no config.json; give it a Hugging Face directory"}));
  }
  return folder;
}

Policy open_policy(const std::string& path, bool with_weights) {
  const std::filesystem::path folder = checkpoint_folder(path);
  const ModelConfig config = value_or_throw(read_config(folder));
  Policy policy = {.folder = folder,
                   .config = config,
                   .tokenizer = value_or_throw(data::Tokenizer::load(folder)),
                   .weights = nullptr};
  data::check_vocabulary(policy.tokenizer, config);
  if (with_weights) policy.weights = std::make_unique<CheckpointSource>(folder);
  return policy;
}

void load(const WeightSource& from, WeightSink& to) {
  to.begin(WeightVersion{0}, contracts::bf16().id());
  from.each([&](const Weight& weight) { to.put(weight); });
  to.commit();
}

std::unique_ptr<data::Task> make_task(const data::TaskOptions& options, const Policy& policy,
                                      std::int32_t max_new_tokens, bool need_response) {
  data::TaskOptions own = options;
  own.jsonl.max_prompt_tokens = std::max(1, policy.config.max_positions - max_new_tokens);
  own.jsonl.need_response = need_response;
  if (own.name == "jsonl") own.jsonl.file = recipe::find_file(own.jsonl.file, "task.file");
  if (!own.jsonl.eval_file.empty()) {
    own.jsonl.eval_file = recipe::find_file(own.jsonl.eval_file, "task.eval_file");
  }
  return data::make_task(own, policy.folder);
}

void require_not_sft(const std::filesystem::path& file, const std::string& name) {
  if (!recipe::is_sft(file)) return;
  throw Usage(
      cat({name, " is a recipe for sft, not for training by rewards; run ./lockstep sft ", name}));
}

recipe::Recipe load_recipe(const std::string& file, const std::vector<std::string>& assignments) {
  return of_the_caller([&] {
    if (file.empty()) return recipe::parse_recipe("", "defaults", assignments);
    const std::filesystem::path path = recipe::find(file, "the recipe");
    require_not_sft(path, file);
    return recipe::read_recipe(path, assignments);
  });
}

Arm checked_arm(const recipe::Recipe& recipe, const ModelConfig& model) {
  return of_the_caller([&] {
    Arm arm = bind(recipe.arm, model, recipe.rollout, recipe.rl);
    recipe::check(recipe, arm, model);
    return arm;
  });
}

namespace {

void tell(const recipe::SettledDevice& settled) {
  if (settled.name != "cpu") {
    const DeviceMemory memory = device_memory(device_named(settled.name));
    info(cat({"device auto: ", settled.name, ", ", recipe::bytes_text(memory.free), " of ",
              recipe::bytes_text(memory.total), " free"}));
  } else if (!settled.why.empty()) {
    info(cat({"device auto: cpu, for ", settled.why}));
  }
}

void settle(std::string& device, const recipe::SettledDevice& settled) {
  if (device == recipe::kAutoDevice) tell(settled);
  device = settled.name;
}

}  // namespace

recipe::SettledDevice settled_device(const recipe::Recipe& recipe, const Arm& arm,
                                     const ModelConfig& model, bool trains) {
  recipe::Recipe there = recipe;
  if (there.device == recipe::kAutoDevice) there.device = "cuda";
  recipe::Budget budget = recipe::budget(there, arm, model);
  if (!trains) budget.trainer = budget.trainer_most = budget.evaluation = budget.read_ahead = 0;
  return recipe::settle_device(recipe.device, budget, [&](Device device) {
    rollout::require_runs({model, arm.contract, arm.guide, 0}, arm.rollout, device);
    if (trains) train::require_runs(device);
  });
}

void settle_device(recipe::Recipe& recipe, const Arm& arm, const ModelConfig& model, bool trains) {
  settle(recipe.device, settled_device(recipe, arm, model, trains));
}

void settle_device(recipe::SftRecipe& recipe, const recipe::Budget& budget) {
  settle(recipe.device, recipe::settle_device(recipe.device, budget,
                                              [](Device device) { train::require_runs(device); }));
}

namespace {

/// Where a run began; "" where none did.
std::string began_on(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "recipe.toml";
  if (folder.empty() || !std::filesystem::exists(file)) return "";
  recipe::Recipe any;
  recipe::take_settled(value_or_throw(read_text(file)), file.string(), any);
  return any.device;
}

}  // namespace

void check_devices(std::span<const ComparedRun> runs) {
  std::map<std::string, std::string> began;  // by device, who did
  std::string another;
  for (const auto& [recipe, folder] : runs) {
    const std::string device = began_on(folder);
    if (device.empty()) continue;
    const std::string name =
        (folder.parent_path().filename() / folder.filename() / "recipe.toml").string();
    std::string& names = began[device];
    names += (names.empty() ? "" : ", ") + name;
    if (recipe->device != recipe::kAutoDevice && recipe->device != device) another = recipe->device;
  }
  if (began.size() <= 1 && another.empty()) return;
  std::string all;
  for (const auto& [device, names] : began) {
    all += (all.empty() ? "" : "; ") + cat({names, " began on ", device});
  }
  if (began.size() == 1) {
    throw Usage(
        cat({"device is ", another, ", and a run goes on where it began: ", all,
             "; say device=", began.begin()->first, ", or give this comparison another --run"}));
  }
  throw Usage(
      cat({"arms that are compared all run on one device, and files in ",
           runs.front().folder.parent_path().parent_path().string(), " say something else: ", all,
           "; mend the file that is wrong, remove the folders of one of them, whose runs begin "
           "anew then, or give this "
           "comparison another --run"}));
}

void settle_device(std::span<const ComparedRun> runs, const std::string& found) {
  std::vector<recipe::Recipe*> open;
  recipe::SettledDevice common;
  for (const auto& [recipe, folder] : runs) {
    const std::filesystem::path file = folder / "recipe.toml";
    const bool began = !folder.empty() && std::filesystem::exists(file);
    if (recipe->device == recipe::kAutoDevice && began) {
      recipe::take_settled(value_or_throw(read_text(file)), file.string(), *recipe);
    }
    if (recipe->device == recipe::kAutoDevice) {
      open.push_back(recipe);
    } else {
      common.name = recipe->device;
    }
  }
  if (open.empty()) return;
  if (!found.empty()) common.name = found;
  const bool is_choice = common.name.empty();
  for (const recipe::Recipe* recipe : open) {
    if (!is_choice || common.name == "cpu") break;  // one that runs nowhere else decides
    const ModelConfig model = value_or_throw(read_config(checkpoint_folder(recipe->model)));
    common = settled_device(*recipe, checked_arm(*recipe, model), model);
    if (!common.why.empty()) common.why = cat({"arm ", recipe->arm.name, ": ", common.why});
  }
  if (is_choice) tell(common);
  for (recipe::Recipe* recipe : open) recipe->device = common.name;
}

Device require_device(const recipe::Recipe& recipe) {
  const ModelConfig model = value_or_throw(read_config(checkpoint_folder(recipe.model)));
  const recipe::Budget budget = recipe::budget(recipe, checked_arm(recipe, model), model);
  const Device device = recipe::ready_device(recipe.device, budget);
  require_memory(budget, device);
  return device;
}

std::vector<std::vector<Token>> calibration_batch(const Policy& policy, const data::Task& task) {
  constexpr std::int64_t kCalibrationPrompts = 32;
  const auto count = std::min(kCalibrationPrompts, task.evaluation_size());
  std::vector<std::vector<Token>> batch;
  for (const data::Prompt& prompt : task.evaluation(static_cast<std::int32_t>(count))) {
    std::vector<Token> tokens = policy.tokenizer.encode(prompt.text + prompt.solution);
    tokens.resize(std::min(tokens.size(), static_cast<std::size_t>(policy.config.max_positions)));
    batch.push_back(std::move(tokens));
  }
  return batch;
}

Arm ready_arm(recipe::Recipe& recipe, const Policy& policy, const data::Task& task) {
  Arm arm = checked_arm(recipe, policy.config);
  const bool cache =
      arm.contract.k.global == GlobalScale::kStatic && recipe.arm.kv_exponents.empty();
  const bool channels = rollout::takes_groups(arm.rollout) && recipe.arm.residual_groups.empty();
  if (!cache && !channels) return arm;
  const std::vector<std::vector<Token>> batch = calibration_batch(policy, task);
  if (cache) {
    recipe.arm.kv_exponents =
        rollout::calibrate_kv(policy.config, *policy.weights, batch, arm.contract);
  }
  if (channels) {
    for (const std::uint8_t chosen : rollout::calibrate_residual(
             policy.config, arm.contract, arm.rollout, *policy.weights, batch)) {
      recipe.arm.residual_groups += chosen != 0 ? '1' : '0';
    }
  }
  return bind(recipe.arm, policy.config, recipe.rollout, recipe.rl);
}

void require_room(const std::filesystem::path& folder, std::int64_t bytes, const char* what,
                  const char* remedy) {
  std::error_code error;
  std::filesystem::path there = std::filesystem::absolute(folder);
  while (!std::filesystem::exists(there, error) && there.has_relative_path()) {
    there = there.parent_path();
  }
  const auto space = std::filesystem::space(there, error);
  if (error || static_cast<std::uint64_t>(bytes) <= space.available) return;
  throw Error(cat({folder.string(), " has room for ",
                   recipe::bytes_text(static_cast<std::int64_t>(space.available)), ", ", what, " ",
                   recipe::bytes_text(bytes), "; free some, ", remedy}));
}

void require_memory(const recipe::Budget& budget, Device device) {
  const bool on_cpu = device.kind == Device::Kind::kCpu;
  if (on_cpu && budget.host() <= memory().total) {
    wait_for(cat({recipe::bytes_text(budget.host()), " of memory"}), [&] {
      const std::int64_t available = memory().available;
      return available == 0 || budget.host() <= available;
    });
  }
  const Memory there = memory();
  recipe::require_host_memory({.total = there.total, .free = there.available}, budget, device);
}

void require_memory_of_rows(std::span<const Trajectory> batch, std::int64_t bytes_a_token,
                            const char* remedy) {
  std::int64_t tokens = 0;
  for (const Trajectory& trajectory : batch) tokens += std::ssize(trajectory.tokens);
  const std::int64_t available = memory().available;
  if (available == 0 || tokens * bytes_a_token <= available) return;
  throw Error(
      cat({"the rows of ", tokens, " tokens take ", recipe::bytes_text(tokens * bytes_a_token),
           ", and this machine has ", recipe::bytes_text(available), " of memory free; ", remedy}));
}

std::filesystem::path run_folder(const std::string& name) {
  // x/.. is this folder, whether or not there is an x.
  if (name.find('/') != std::string::npos) return std::filesystem::path(name).lexically_normal();
  const char* home = std::getenv("LOCKSTEP_HOME");
  return std::filesystem::path(home == nullptr ? "." : home) / "runs" / name;
}

std::string stem(const std::string& recipe_file) {
  return std::filesystem::path(recipe_file).stem().string();
}

namespace {

/// A cache for these prompts, where that is less than the options': on a GPU it is taken at once,
/// beside the run's own.
rollout::Options fitted(rollout::Options options, const Agreement& agreement,
                        std::span<const data::Prompt> prompts, std::int32_t max_new_tokens) {
  const std::int64_t page = options.page_tokens;
  const std::int64_t most = agreement.model.max_positions;
  std::int64_t pages = 0;
  for (const data::Prompt& prompt : prompts) {
    const std::int64_t tokens =
        std::min(most, static_cast<std::int64_t>(prompt.tokens.size()) + max_new_tokens);
    pages += (tokens + page - 1) / page + 1;
  }
  const auto layers = rollout::cache_layout(agreement, options.page_tokens);
  options.cache_bytes = std::min(options.cache_bytes, pages * layers.front().k.page_bytes);
  return options;
}

}  // namespace

PassRate evaluate(const Agreement& agreement, const WeightSource& weights, const data::Task& task,
                  const recipe::Evaluation& evaluation, const rollout::Options& options,
                  std::int32_t max_new_tokens, Device device) {
  const std::unique_ptr<Comm> comm = Comm::single();
  Agreement unguided = agreement;
  unguided.guide = Guide{};
  const auto count = std::min<std::int64_t>(evaluation.prompts, task.evaluation_size());
  const std::vector<data::Prompt> prompts = task.evaluation(static_cast<std::int32_t>(count));
  rollout::Engine engine(unguided, fitted(options, unguided, prompts, max_new_tokens), device,
                         nullptr, *comm);
  sync::refit(weights, engine.weights(), agreement.contract, WeightVersion{0});

  std::vector<rollout::Request> requests;
  for (const data::Prompt& prompt : prompts) {
    // Numbered anew: an engine's span ids have no room for the task's own numbers.
    requests.push_back({.prefix = {.prompt = PromptId{std::ssize(requests)},
                                   .tokens = prompt.tokens,
                                   .sampling = {.temperature = evaluation.temperature,
                                                .top_p = evaluation.top_p,
                                                .top_k = evaluation.top_k,
                                                .max_new_tokens = max_new_tokens}},
                        .seed = agreement.seed});
  }
  Timer timer;
  const std::vector<Trajectory> answers = rollout::generate(engine, std::move(requests));
  const double took = std::max(timer.lap(), 1e-9);
  PassRate rate;
  double tokens = 0;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const std::span response = std::span(answers[i].tokens).subspan(prompts[i].tokens.size());
    rate.mean += static_cast<double>(task.reward(prompts[i], response));
    tokens += static_cast<double>(response.size());
  }
  const double n = std::max(1.0, static_cast<double>(answers.size()));
  rate.mean /= n;
  rate.response_length = tokens / n;
  rate.tokens_per_s = tokens / took;
  return rate;
}

}  // namespace lockstep::cli
