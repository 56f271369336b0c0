// Why is a token guided or not at a place, and what are its codes: the rollout's, those that the
// trainer alone would round to, and those that a record leads it to.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/inspect.h"
#include "cli/record_text.h"
#include "cli/sequences.h"
#include "cli/subject.h"
#include "instruments/diff.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/record_row.h"
#include "numerics/bf16.h"
#include "store/store.h"
#include "train/trainer.h"

namespace lockstep::cli {
namespace {

constexpr std::size_t kShown = 16;

store::Options memory_only(const Agreement& agreement) {
  return {.ram_bytes = std::numeric_limits<std::int64_t>::max() / 4,
          .run = agreement.seed,
          .contract = agreement.contract.id()};
}

/// One row of a place; nothing where it was not recorded.
std::optional<std::vector<std::byte>> row_of(const TraceSource& trace, const Agreement& agreement,
                                             const TokenKey& key, Place place, Encoding encoding) {
  const RowLayout layout = agreement.layout(place, encoding);
  std::vector<std::byte> bytes(static_cast<std::size_t>(layout.bytes()));
  std::uint8_t present = 0;
  trace.read({&key, 1}, agreement.contract.id(), {place, layout, std::span(bytes)}, {&present, 1});
  if (present == 0) return {};
  return bytes;
}

/// Why no record moves the trainer there; "" where one does.
std::string reason(const Subject& subject, Place place, std::int32_t position,
                   std::int32_t tokens) {
  const Arm& arm = subject.arm;
  const std::string where = cat({place.layer.value, ".", site_name(place.site)});
  if (position + 1 >= tokens) {
    return "it is the last token, which no pass read: it has no record, and no log-prob needs one";
  }
  if (subject.agreement.rule(place.site).element == Element::kBf16) {
    return "the contract leaves " + std::string(site_name(place.site)) + " in BF16";
  }
  if (!arm.contract.layers.has(place.layer)) {
    return cat({"contract.layers is \"", subject.recipe.arm.contract_layers, "\", without layer ",
                place.layer.value});
  }
  const bool imitated = place.site == Site::kK   ? arm.qat.k
                        : place.site == Site::kV ? arm.qat.v
                                                 : arm.qat.activations;
  if (!imitated) {
    return cat(
        {"the trainer of arm ", arm.name, " does not quantize ", site_name(place.site), " (qat)"});
  }
  if (arm.guide.mode == Guidance::kOwnScale) {
    return cat({"arm ", arm.name, " follows no record (guide.mode is own_scale)"});
  }
  if (!arm.guide.sites.has(place.site)) {
    return cat({"guide.sites has no ", site_name(place.site)});
  }
  if (!arm.guide.follows(place)) {
    const bool apart = &arm.guide.layers_of(place.site) != &arm.guide.layers;
    const ArmSpec& spec = subject.recipe.arm;
    return cat({apart ? "guide.kv_layers is \"" : "guide.layers is \"",
                apart ? spec.kv_layers : spec.layers, "\", without layer ", place.layer.value});
  }
  return "";
}

/// A token's numbers at a place, on both sides.
struct Row {
  std::vector<std::byte> codes;  // the rollout's, Encoding::kCodes
  RowLayout full;
  std::vector<Bf16> x;    // the trainer's, before it rounds
  bool recorded = false;  // what the arm follows was there
  Quantizer rule;
  std::int8_t exponent = 0;  // where the rule's global scale is the contract's
};

Row rows_at(const Subject& subject, Trajectory t, Place place, std::int32_t position) {
  const std::unique_ptr<Comm> comm = Comm::single();
  Agreement full = subject.agreement;  // all codes, whatever the arm records
  full.guide.mode = Guidance::kFullGuided;
  full.guide.sites = SiteSet{place.site};
  full.guide.layers = LayerSet::range(place.layer.value, place.layer.value + 1);
  full.guide.kv_layers.reset();
  store::Store codes(memory_only(full)), records(memory_only(full)), shown(memory_only(full));
  const auto read = [&](const Agreement& agreement, store::Store& into) {
    rollout::Engine engine(agreement, subject.arm.rollout, subject.device, &into, *comm);
    load(subject, engine);
    return engine.rescore({&t, 1})[0];
  };
  const Trajectory by_codes = read(full, codes);
  Agreement own = subject.agreement;
  own.guide.replay_experts = true;
  const Trajectory by_arm = read(own, records);
  train::Trainer trainer(own, subject.arm.qat, subject.recipe.trainer, subject.device, *comm);
  load(*subject.policy.weights, trainer.initial_weights());
  for (const Span& span : by_arm.path) shown.open(span, own.contract.id());
  trainer.reveal({&by_arm, 1}, &records, shown);
  for (const Span& span : by_arm.path) shown.seal(span.id);

  const auto at = static_cast<std::size_t>(position);
  const auto full_row = row_of(codes, full, keys(by_codes)[at], place, Encoding::kCodes);
  const auto bf16 = row_of(shown, own, keys(by_arm)[at], place, Encoding::kBf16);
  if (!full_row || !bf16) throw Error("the pass left no row there");
  Row row{.codes = *full_row,
          .full = full.layout(place, Encoding::kCodes),
          .x = {},
          .rule = own.rule(place.site)};
  row.x.resize(bf16->size() / 2);
  std::memcpy(row.x.data(), bf16->data(), bf16->size());
  const Encoding kept = own.encoding(place);
  row.recorded =
      kept != Encoding::kNone && row_of(records, own, keys(by_arm)[at], place, kept).has_value();
  if (place.site == Site::kK || place.site == Site::kV) {
    const auto i = static_cast<std::size_t>(2 * place.layer.value + (place.site == Site::kV));
    if (i < own.contract.kv_exponents.size()) row.exponent = own.contract.kv_exponents[i];
  }
  return row;
}

/// What the trainer's numbers become under a guidance by the rollout's codes.
std::vector<float> rounded(const Row& row, Guidance guidance) {
  const auto cols = static_cast<std::int32_t>(row.x.size());
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(row.codes.data());
  const std::int32_t scales = row.full.element_bytes();
  const std::int32_t exponents = scales + row.full.scale_bytes();
  RowLayout layout = row.full;
  layout.encoding = encoding_for(guidance, row.rule);
  std::vector<std::uint8_t> record(static_cast<std::size_t>(layout.bytes()));
  kernels::write_record(
      {.codes = bytes,
       .scales = bytes + scales,
       .cols = cols,
       .exponent = static_cast<std::int8_t>(row.full.exponents > 0 ? bytes[exponents] : 0),
       .wide = row.rule.is_wide()},
      0, layout, record.data());
  std::vector<Bf16> out(row.x.size());
  kernels::guide({.x = {row.x.data(), {1, cols}, {cols, 1}},
                  .rule = row.rule,
                  .guidance = guidance,
                  .layout = layout,
                  .records = {record.data(), {1, layout.bytes()}, {layout.bytes(), 1}},
                  .out = {out.data(), {1, cols}, {cols, 1}},
                  .exponent = row.exponent});
  std::vector<float> values;
  for (const Bf16 value : out) values.push_back(to_float(value));
  return values;
}

std::int64_t differing(const std::vector<float>& a, const std::vector<float>& b) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += a[i] != b[i];
  return count;
}

std::string code_table(const Row& row, const Guide& guide, bool guided) {
  // Nobody follows records: shown is where one bit and the scales would have led.
  const Guidance mode = guide.mode == Guidance::kOwnScale ? Guidance::kLsb : guide.mode;
  const std::vector<float> rollout = rounded(row, Guidance::kFullForced),
                           alone = rounded(row, Guidance::kOwnScale), led = rounded(row, mode);
  const std::string name(instruments::name_of(mode));
  std::string text = cat({"of ", row.x.size(), " values the trainer alone rounds ",
                          differing(alone, rollout), " otherwise than the rollout did; ", name,
                          guided ? " leaves " : " would leave ", differing(led, rollout), "\n"});
  std::vector<std::vector<std::string>> rows = {
      {"element", "trainer has", "rounds alone to", "rollout used", guided ? "guided to" : name}};
  std::int64_t more = 0;
  for (std::size_t i = 0; i < rollout.size(); ++i) {
    if (alone[i] == rollout[i] && led[i] == rollout[i]) continue;
    if (rows.size() > kShown) {
      ++more;
      continue;
    }
    rows.push_back(
        {cat({i}), cat({to_float(row.x[i])}), cat({alone[i]}), cat({rollout[i]}), cat({led[i]})});
  }
  if (rows.size() > 1) text += columns(rows);
  if (more > 0) text += cat({"... and ", more, " more\n"});
  return text;
}

/// "answers.jsonl:3", the line's number being 1 where it is left out.
std::pair<std::string, std::int64_t> file_and_line(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon + 1 == text.size() ||
      text.find_first_not_of("0123456789", colon + 1) != std::string::npos ||
      text.size() - colon > 10) {
    return {text, 1};
  }
  return {text.substr(0, colon), std::stoll(text.substr(colon + 1))};
}

}  // namespace

void inspect_why(const InspectArgs& args) {
  if (args.place.empty() || args.position < 0) {
    throw Usage("--why asks of one token at one place; name them with --position and --place");
  }
  const Place place = parse_place(args.place);
  const Subject subject = open_subject(args.path, {}, "", true);
  const auto [file, line] = file_and_line(args.why);
  const std::vector<SequenceRow> rows = read_sequences(
      recipe::find_file(file, "--why"), subject.policy.tokenizer, subject.policy.config);
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&, n = line](const SequenceRow& row) { return row.line == n; });
  if (found == rows.end()) throw Usage(cat({file, " has no sequence in line ", line}));
  Trajectory t = found->trajectory;
  t.sampling.temperature = subject.recipe.schedule.sampling.temperature;
  const auto tokens = static_cast<std::int32_t>(t.tokens.size());
  if (args.position >= tokens || place.layer.value >= subject.policy.config.num_layers) {
    throw Usage(
        cat({"position ", args.position, " of ", args.place, " is not there: the sequence has ",
             tokens, " tokens, the model ", subject.policy.config.num_layers, " layers"}));
  }
  const std::string why = reason(subject, place, args.position, tokens);
  std::string text =
      cat({subject.numbers(), "\n", file, ":", line, ", position ", args.position, ", token ",
           t.tokens[static_cast<std::size_t>(args.position)], ", ", args.place, ": "});
  const bool shows = args.position + 1 < tokens && place.site != Site::kRouter &&
                     place.site != Site::kW2In &&
                     subject.agreement.rule(place.site).element != Element::kBf16 &&
                     subject.arm.contract.layers.has(place.layer);
  if (!shows) {
    print(text + (why.empty() ? "guided" : "unguided: " + why) + "\n");
    return;
  }
  const Row row = rows_at(subject, std::move(t), place, args.position);
  const bool guided = why.empty() && row.recorded;
  text += guided        ? cat({"guided, by ", instruments::name_of(subject.arm.guide.mode)})
          : why.empty() ? "unguided: its record is absent"
                        : "unguided: " + why;
  print(text + "\n" + code_table(row, subject.arm.guide, guided));
}

}  // namespace lockstep::cli
