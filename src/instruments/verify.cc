#include "instruments/verify.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/philox.h"
#include "base/text.h"
#include "store/store.h"
#include "sync/refit.h"

namespace lockstep::instruments {
namespace {

// Above it the two engines do not compute the same model, whatever the size (docs/verify.md).
constexpr double kMostGap = 0.05;
constexpr std::uint32_t kStream = 0x76657269;  // of the prompts' random tokens

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2e", value);
  return text;
}

/// "100 %" of all, else four places, so that a row that is missing shows.
std::string rounded_percent(double part) {
  char text[32];
  std::snprintf(text, sizeof text, part == 1.0 ? "%.0f %%" : "%.4f %%", 100 * part);
  return text;
}

/// Hands weights on and keeps the checksums with which the receiver answered.
class Checksums final : public WeightSink {
 public:
  explicit Checksums(WeightSink& to) : to_(to) {}
  void begin(WeightVersion version, ContractId contract) override { to_.begin(version, contract); }
  void put(const Weight& weight) override { to_.put(weight); }
  std::vector<std::uint32_t> commit() override { return received = to_.commit(); }

  std::vector<std::uint32_t> received;

 private:
  WeightSink& to_;
};

struct Gap {
  double mean = 0, largest = 0;
  std::int64_t tokens = 0;
};

Gap gap_between(const std::vector<Trajectory>& batch, const PerToken& logp) {
  Gap gap;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    for (std::size_t t = 0; t < batch[i].tokens.size(); ++t) {
      if (batch[i].response_mask[t] == 0) continue;
      const double d =
          std::abs(static_cast<double>(logp[i][t]) - static_cast<double>(batch[i].rollout_logp[t]));
      gap.mean += d;
      gap.largest = std::max(gap.largest, d);
      ++gap.tokens;
    }
  }
  gap.mean /= static_cast<double>(std::max<std::int64_t>(gap.tokens, 1));
  return gap;
}

class Verifier {
 public:
  Verifier(const VerifyArgs& args, const std::function<void(const Check&)>& each)
      : args_(args), each_(each), agreement_(args.agreement), options_(args.rollout) {
    options_.drift = {};
    const Contract& contract = agreement_.contract;
    qat_ = {.weights = contract.weight.quantizes(),
            .activations = contract.activation.quantizes(),
            .k = contract.k.quantizes(),
            .v = contract.v.quantizes()};
    // All that is quantized is recorded in full, and the trainer is made to use the very codes.
    agreement_.guide = Guide{};
    agreement_.guide.mode = Guidance::kFullForced;
    agreement_.guide.layers = contract.layers;
    agreement_.guide.replay_experts = true;
    agreement_.guide.audit_every = 1;
    for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV}) {
      if (!agreement_.rule(site).quantizes()) continue;
      if (!agreement_.rule(site).is_guidable()) {
        forced_all_ = false;
        continue;
      }
      agreement_.guide.sites.bits =
          static_cast<std::uint8_t>(agreement_.guide.sites.bits | SiteSet{site}.bits);
    }
    if (agreement_.guide.sites.bits == 0) agreement_.guide.mode = Guidance::kOwnScale;
  }

  std::vector<Check> run() {
    check("contract", [&](Check& c) { contract(c); });
    check("refit", [&](Check& c) { refit(c); });
    check("capture", [&](Check& c) { capture(c); });
    trainer_.reset();
    check("prefill", [&](Check& c) { prefill(c); });
    engine_.reset();
    check("batch", [&](Check& c) { batch(c); });
    return std::move(checks_);
  }

 private:
  template <typename Body>
  void check(const char* name, Body&& body) {
    Check check{.name = name};
    try {
      body(check);
    } catch (const std::exception& error) {
      check.ok = false;
      check.figures = error.what();
    }
    checks_.push_back(check);
    each_(check);
  }

  std::unique_ptr<store::Store> make_store() const {
    return std::make_unique<store::Store>(
        store::Options{.ram_bytes = std::numeric_limits<std::int64_t>::max() / 4,
                       .run = agreement_.seed,
                       .contract = agreement_.contract.id()});
  }

  std::vector<rollout::Request> requests() const;
  std::vector<Trajectory> rolled();
  std::size_t differing_records(const std::vector<Trajectory>& a, const TraceSource& of_a,
                                const std::vector<Trajectory>& b, const TraceSource& of_b,
                                std::size_t& rows) const;
  std::vector<std::byte> rows_of(const Trajectory& t, const TraceSource& trace, Place place) const;

  void contract(Check& check);
  void refit(Check& check);
  void capture(Check& check);
  void prefill(Check& check);
  void batch(Check& check);
  void same(const std::vector<Trajectory>& other, const TraceSource& records, Check& check) const;

  const VerifyArgs& args_;
  const std::function<void(const Check&)>& each_;
  Agreement agreement_;
  rollout::Options options_;
  train::Qat qat_;
  std::unique_ptr<Comm> comm_ = Comm::single();
  std::unique_ptr<store::Store> store_;
  std::unique_ptr<rollout::Engine> engine_;
  std::unique_ptr<train::Trainer> trainer_;
  std::vector<Trajectory> trajectories_;  // of the engine that records, the samples of all prompts
  bool forced_all_ = true;                // can a record say all that is quantized?
  std::vector<Check> checks_;
};

/// Prompts of mixed lengths; one fills a page of the cache, one is longer.
std::vector<rollout::Request> Verifier::requests() const {
  const ModelConfig& model = agreement_.model;
  std::vector<rollout::Request> requests;
  for (std::int32_t p = 0; p < args_.prompts; ++p) {
    const std::int32_t most = std::max(1, model.max_positions - args_.max_new_tokens);
    const std::int32_t length = std::min(most, p == 0 ? 16 : 3 + 7 * p);
    rollout::Request request{.prefix = {.prompt = PromptId{p},
                                        .tokens = {},
                                        .sampling = {.max_new_tokens = args_.max_new_tokens}},
                             .num_samples = args_.samples,
                             .seed = agreement_.seed};
    for (std::int32_t i = 0; i < length; ++i) {
      const std::uint32_t word = philox(
          agreement_.seed,
          philox_counter(kStream, static_cast<std::uint32_t>(p), static_cast<std::uint32_t>(i)))[0];
      request.prefix.tokens.push_back(
          static_cast<Token>(word % static_cast<std::uint32_t>(model.vocabulary)));
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

/// The batch that all checks look at, rolled out once.
std::vector<Trajectory> Verifier::rolled() {
  if (engine_ == nullptr) throw Error("the engine has no weights: the refit failed");
  if (trajectories_.empty()) trajectories_ = rollout::generate(*engine_, requests());
  return trajectories_;
}

void Verifier::contract(Check& check) {
  const Contract& contract = agreement_.contract;
  const std::string id = hex(contract.id().value);
  const bool cached = qat_.k || qat_.v;
  if (cached && !contract.k.is_mx() &&
      contract.kv_exponents.size() != static_cast<std::size_t>(2 * agreement_.model.num_layers)) {
    check.figures = cat({"id ", id, " has ", contract.kv_exponents.size(),
                         " exponents for the cache, K's and V's of ", agreement_.model.num_layers,
                         " layers are needed"});
    return;
  }
  if (!args_.run_contract.empty() && args_.run_contract != id) {
    check.figures = cat({"the run names ", args_.run_contract, ", its recipe now gives ", id});
    return;
  }
  // What a part writes under one id, no part may read under another.
  const auto store = make_store();
  const Span span{.id = span_id(0, PromptId{0}, -1, 0), .first = 0, .count = 1};
  store->open(span, contract.id());
  store->seal(span.id);
  const TokenKey key{span.id, 0};
  const Place place{Layer{0}, Site::kRouter};
  const RowLayout layout = agreement_.layout(place, agreement_.encoding(place));
  std::vector<std::byte> row(static_cast<std::size_t>(layout.bytes()));
  std::uint8_t present = 0;
  const auto read = [&](ContractId as) {
    store->read({&key, 1}, as, {place, layout, std::span(row)}, {&present, 1});
  };
  read(contract.id());
  bool refused = false;
  try {
    read(ContractId{contract.id().value ^ 1});
  } catch (const Error&) {
    refused = true;
  }
  check.ok = refused;
  check.figures =
      cat({"id ", id, args_.run_contract.empty() ? "" : ", as the run names it",
           refused ? "; records are refused under another" : "; records were read under another"});
}

void Verifier::refit(Check& check) {
  store_ = make_store();
  auto engine =
      std::make_unique<rollout::Engine>(agreement_, options_, args_.device, store_.get(), *comm_);
  Checksums from_checkpoint(engine->weights());
  const Metrics metrics =
      sync::refit(args_.weights, from_checkpoint, agreement_.contract, WeightVersion{0});
  trainer_ = std::make_unique<train::Trainer>(agreement_, qat_, train::Options{.lr = 0.0},
                                              args_.device, *comm_);
  WeightSink& masters = trainer_->initial_weights();
  masters.begin(WeightVersion{0}, contracts::bf16().id());
  args_.weights.each([&](const Weight& weight) { masters.put(weight); });
  masters.commit();
  Checksums from_trainer(engine->weights());
  sync::refit(trainer_->weights(), from_trainer, agreement_.contract, WeightVersion{0});
  engine_ = std::move(engine);

  std::size_t differ = 0;
  for (std::size_t i = 0; i < from_trainer.received.size(); ++i) {
    differ += from_trainer.received[i] != from_checkpoint.received[i];
  }
  check.ok = differ == 0 && !from_trainer.received.empty();
  check.figures = cat({"CRC32C of ", from_trainer.received.size(), " weights as sent and as held; ",
                       differ, " differ between checkpoint and trainer; quantization takes ",
                       rounded(metrics.at("fp4/refit/rel_err")), " of them"});
}

/// A trainer that is made to use the recorded codes has the rollout's operands, bit for bit.
void Verifier::capture(Check& check) {
  const std::vector<Trajectory> batch = rolled();
  trainer_->accumulate(batch, store_.get(), [](std::size_t, auto, auto) { return 0.0; });
  trainer_->update();
  const Metrics metrics = trainer_->metrics();
  const Gap forced = gap_between(batch, trainer_->logprobs(batch, store_.get()));
  const auto metric = [&](const char* name) {
    const auto found = metrics.find(name);
    return found == metrics.end() ? std::optional<double>() : found->second;
  };
  bool operands = true;
  std::string figures;
  for (const auto& [name, what] :
       {std::pair("fp4/act/residual_frac", "activations"), {"fp4/kv/residual_frac", "K and V"}}) {
    if (const auto left = metric(name)) {
      operands &= *left == 0.0;
      figures += cat({what, " that differ: ", *left == 0.0 ? "0" : rounded(*left), "; "});
    }
  }
  const double covered = metric("fp4/guide/covered_frac").value_or(1.0);
  const double absent = metric("fp4/routes/absent_frac").value_or(0.0);
  const bool quantizes = agreement_.guide.sites.bits != 0;
  const bool near = forced.mean <= kMostGap || !forced_all_;
  check.ok = operands && covered == 1.0 && absent == 0.0 && near;
  check.figures = cat({quantizes ? "full codes forced: " : "nothing is quantized; ", figures,
                       "records for ", rounded_percent(covered), " of the rows, routes for ",
                       rounded_percent(1.0 - absent), "; log-prob gap mean ", rounded(forced.mean),
                       ", largest ", rounded(forced.largest), " over ", forced.tokens, " tokens",
                       !forced_all_ ? "; codes of activations are in no record under this contract"
                       : near       ? ""
                                    : ": engine and trainer do not compute the same model"});
}

std::vector<std::byte> Verifier::rows_of(const Trajectory& t, const TraceSource& trace,
                                         Place place) const {
  const std::vector<TokenKey> rows = keys(t);
  const RowLayout layout = agreement_.layout(place, agreement_.encoding(place));
  std::vector<std::byte> bytes(rows.size() * static_cast<std::size_t>(layout.bytes()));
  std::vector<std::uint8_t> present(rows.size());
  const std::size_t found =
      trace.read(rows, agreement_.contract.id(), {place, layout, std::span(bytes)}, present);
  if (found == rows.size()) return bytes;
  throw Error(cat({"prompt ", t.prompt.value, ", layer ", place.layer.value, ": ",
                   rows.size() - found, " of ", rows.size(), " records are absent"}));
}

std::size_t Verifier::differing_records(const std::vector<Trajectory>& a, const TraceSource& of_a,
                                        const std::vector<Trajectory>& b, const TraceSource& of_b,
                                        std::size_t& rows) const {
  std::size_t differ = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].tokens != b[i].tokens || a[i].tokens.size() < 2) continue;
    const std::size_t count = a[i].tokens.size() - 1;
    for (std::int32_t l = 0; l < agreement_.model.num_layers; ++l) {
      for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV, Site::kRouter}) {
        const Place place{Layer{l}, site};
        if (agreement_.encoding(place) == Encoding::kNone) continue;
        const std::vector<std::byte> left = rows_of(a[i], of_a, place);
        const std::vector<std::byte> right = rows_of(b[i], of_b, place);
        const std::size_t width = left.size() / count;
        rows += count;
        for (std::size_t row = 0; row < count; ++row) {
          differ += !std::equal(left.begin() + static_cast<std::ptrdiff_t>(row * width),
                                left.begin() + static_cast<std::ptrdiff_t>((row + 1) * width),
                                right.begin() + static_cast<std::ptrdiff_t>(row * width));
        }
      }
    }
  }
  return differ;
}

/// Tokens, log-probs and records, against those of the batch.
void Verifier::same(const std::vector<Trajectory>& other, const TraceSource& records,
                    Check& check) const {
  std::size_t tokens = 0, tokens_differ = 0, logp_differ = 0, rows = 0;
  for (std::size_t i = 0; i < trajectories_.size(); ++i) {
    const Trajectory& mine = trajectories_[i];
    const std::size_t count = std::min(mine.tokens.size(), other[i].tokens.size());
    tokens_differ += std::max(mine.tokens.size(), other[i].tokens.size()) - count;
    for (std::size_t t = 0; t < count; ++t) {
      tokens += mine.response_mask[t];
      tokens_differ += mine.tokens[t] != other[i].tokens[t];
      logp_differ += mine.rollout_logp[t] != other[i].rollout_logp[t];
    }
  }
  const std::size_t records_differ =
      differing_records(trajectories_, *store_, other, records, rows);
  check.ok = tokens_differ + logp_differ + records_differ == 0 && tokens > 0;
  check.figures = cat({tokens_differ, " tokens and ", logp_differ, " log-probs of ", tokens,
                       " differ, ", records_differ, " of ", rows, " records"});
}

/// Reading a sequence at once gives what reading it token by token gave.
void Verifier::prefill(Check& check) {
  const std::vector<Trajectory> decoded = rolled();
  same(engine_->rescore(decoded), *store_, check);
  check.figures = "read at once, not token by token: " + check.figures;
}

/// A sample that is alone, read in short chunks, gives what it gave among others.
void Verifier::batch(Check& check) {
  if (trajectories_.empty()) throw Error("there is nothing to compare with: the rollout failed");
  const auto store = make_store();
  rollout::Options alone = options_;
  alone.tokens_per_pass = 5;
  alone.reuse_prefixes = false;
  rollout::Engine engine(agreement_, alone, args_.device, store.get(), *comm_);
  sync::refit(args_.weights, engine.weights(), agreement_.contract, WeightVersion{0});
  std::vector<Trajectory> others;
  for (const rollout::Request& request : requests()) {
    for (std::int32_t sample = 0; sample < request.num_samples; ++sample) {
      rollout::Request one = request;
      one.prefix.sample = sample;
      one.num_samples = 1;
      // The span of a prompt has one name, whoever reads it: each sample's is read by itself.
      for (Trajectory& t : rollout::generate(engine, {std::move(one)})) {
        others.push_back(std::move(t));
      }
    }
  }
  same(others, *store, check);
  check.figures = "alone, five tokens a pass: " + check.figures;
}

}  // namespace

std::vector<Check> verify(const VerifyArgs& args, const std::function<void(const Check&)>& each) {
  return Verifier(args, each).run();
}

}  // namespace lockstep::instruments
