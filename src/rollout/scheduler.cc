#include "rollout/scheduler.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::rollout {
namespace {

/// Logits of a pass, at most: with a vocabulary of 151,936 this is 441 rows.
constexpr std::int64_t kLogitBytes = 1ll << 28;

/// What audit tokens add to a place, as a share of a row's full codes; rounded up.
std::int64_t audit_bytes(const Agreement& agreement, Place place) {
  const std::int32_t every = agreement.guide.audit_every;
  if (every <= 0 || place.site == Site::kRouter) return 0;
  if (!agreement.rule(place.site).quantizes()) return 0;
  return agreement.layout(place, Encoding::kCodes).bytes() / every + 1;
}

std::int64_t place_bytes(const Agreement& agreement, Place place) {
  const Encoding kept = agreement.encoding(place);
  const std::int64_t row = kept == Encoding::kNone ? 0 : agreement.layout(place, kept).bytes();
  return row + audit_bytes(agreement, place);
}

}  // namespace

std::int32_t next_turn(const std::vector<Span>& path, const Trajectory& of, std::int32_t sample) {
  constexpr std::uint64_t kTurns = 0x3f;
  std::int32_t turn = 0;
  for (const Span& span : path) {
    if ((span.id.value & ~kTurns & 0xffffffffffff) != span_id(0, of.prompt, sample, 0).value) {
      continue;
    }
    turn = std::max(turn, static_cast<std::int32_t>(span.id.value & kTurns) + 1);
  }
  if (turn > static_cast<std::int32_t>(kTurns)) {
    throw Error(cat({"prompt ", of.prompt.value, ", sample ", sample, " has ", turn,
                     " spans, the most there are: end it before more turns or weight updates"}));
  }
  return turn;
}

Scheduler::Scheduler(const Agreement& agreement, const Options& options, KvCache& cache,
                     const TraceSink* trace, std::function<void(Sequence&)> begin)
    : agreement_(agreement),
      options_(options),
      cache_(cache),
      trace_(trace),
      begin_(std::move(begin)) {
  if (options.tokens_per_pass < 1) {
    throw Error(cat({"rollout.tokens_per_pass is ", options.tokens_per_pass, ", not at least 1"}));
  }
  if (options.max_sequences < 1) {
    throw Error(cat({"rollout.max_sequences is ", options.max_sequences, ", not at least 1"}));
  }
  wanted_per_pass_ =
      std::max<std::int64_t>(1, kLogitBytes / (4 * std::int64_t{agreement.model.vocabulary}));
  for (std::int32_t l = 0; l < agreement.model.num_layers; ++l) {
    for (const Site site : {Site::kW13In, Site::kW2In, Site::kRouter}) {
      bytes_all_ += place_bytes(agreement, {Layer{l}, site});
    }
    for (const Site site : {Site::kK, Site::kV}) {
      bytes_kv_ += place_bytes(agreement, {Layer{l}, site});
    }
  }
  bytes_all_ += bytes_kv_;
  for (std::int32_t l = 0; l < agreement.model.num_layers && options.record_bf16; ++l) {
    for (const Site site : {Site::kW13In, Site::kK, Site::kV}) {
      bytes_all_ += agreement.layout({Layer{l}, site}, Encoding::kBf16).bytes();
    }
  }
}

std::int64_t Scheduler::most_fed(const Request& request, bool scored) const {
  const auto prompt = static_cast<std::int64_t>(request.prefix.tokens.size());
  if (scored) return std::max<std::int64_t>(prompt - 1, 0);
  return std::min<std::int64_t>(prompt + request.prefix.sampling.max_new_tokens,
                                agreement_.model.max_positions) -
         1;
}

/// Pages that a group holds at most: the full pages of the prompt once, what follows each sample's
/// own, and the prompt's last page until all have their copy.
std::int64_t Scheduler::group_pages(const Request& request, bool scored,
                                    std::int64_t samples) const {
  const auto prompt = static_cast<std::int64_t>(request.prefix.tokens.size());
  const std::int64_t each = cache_.pages_for(most_fed(request, scored));
  if (scored) return each;
  const std::int64_t shared = prompt / cache_.page_tokens();
  const std::int64_t partial = samples > 1 && prompt % cache_.page_tokens() != 0 ? 1 : 0;
  return shared + partial + samples * std::max<std::int64_t>(each - shared, 0);
}

void Scheduler::check(const Request& request, bool scored) const {
  const std::int64_t tokens = most_fed(request, scored);
  const std::int64_t needed = std::max<std::int64_t>(1, group_pages(request, scored, 1));
  if (needed <= cache_.frames()) return;
  throw Error(cat({"prompt ", request.prefix.prompt.value, ": one sequence of ", tokens,
                   " tokens needs ", needed * cache_.page_bytes(),
                   " bytes of cache, rollout.cache gives ", cache_.frames() * cache_.page_bytes(),
                   ": raise rollout.cache or lower rollout.max_new_tokens"}));
}

std::int64_t Scheduler::submit(Request request, bool scored) {
  waiting_.push_back({.request = std::move(request), .number = requests_, .scored = scored});
  return requests_++;
}

std::vector<Chunk> Scheduler::plan() {
  held_back_ = false;
  resume();
  admit();
  std::vector<Chunk> chunks;
  Left left = {options_.tokens_per_pass, wanted_per_pass_, options_.max_sequences};
  for (const bool decodes : {true, false}) {
    for (auto& [order, sequence] : active_) {
      if (sequence->parked || sequence->decodes() != decodes) continue;
      if (!place(*sequence, left, chunks)) break;
    }
  }
  return chunks;
}

/// Brings parked sequences back, in order, while there is room for them and one page more each.
void Scheduler::resume() {
  for (auto& [order, sequence] : active_) {
    if (!sequence->parked) continue;
    std::vector<Page> pages = sequence->pages;
    const auto away = std::stable_partition(pages.begin(), pages.end(),
                                            [&](Page page) { return !cache_.on_host(page); });
    const bool nothing_runs =
        std::all_of(active_.begin(), active_.end(), [](const auto& s) { return s.second->parked; });
    if (!nothing_runs && cache_.free_frames() < pages.end() - away + 1) return;
    for (const Page page : pages) {
      [[maybe_unused]] const bool back = cache_.unpark(page);
      assert(back && "there is room for any one sequence");
    }
    sequence->parked = false;
  }
}

std::int64_t Scheduler::record_bytes(std::int64_t all, std::int64_t kv) const {
  return all * (bytes_all_ - bytes_kv_) + kv * bytes_kv_;
}

/// What the sequences under way may still write.
std::int64_t Scheduler::promised_bytes() const {
  std::int64_t bytes = record_bytes(unwritten, 0);
  for (const auto& [order, s] : active_) {
    bytes +=
        record_bytes(s->most_fed() - s->fed, s->most_fed() - (s->span ? s->span->first : s->fed));
    if (s->kind != Sequence::Kind::kPrompt) continue;
    const std::int64_t each = s->limit - 1 - s->prompt;
    bytes += record_bytes(each, each) * s->forks;
  }
  return bytes;
}

/// How many samples of the next request may start now; 0: none.
std::int32_t Scheduler::admissible(const Waiting& waiting) {
  const std::int32_t samples = waiting.request.num_samples - waiting.first_sample;
  const bool alone = active_.empty();
  if (waiting.prompt_path && waiting.prompt_path->empty()) return 0;  // the prompt is being read
  const std::int64_t memory = cache_.frames() + cache_.host_slots();
  std::int32_t fitting = samples;
  while (fitting > 0 &&
         reserved_ + group_pages(waiting.request, waiting.scored, fitting) > memory) {
    fitting = alone ? fitting - 1 : 0;
  }
  if (fitting == 0) return 0;
  const auto prompt = static_cast<std::int64_t>(waiting.request.prefix.tokens.size());
  if (!alone) {
    std::int64_t running = 0;
    for (const auto& [order, sequence] : active_) running += std::max(sequence->forks, 1);
    if (running + samples > options_.max_sequences) return 0;
    if (cache_.free_frames() < cache_.pages_for(prompt) + 1) return 0;
  }
  if (trace_ != nullptr) {
    const std::int64_t each = most_fed(waiting.request, waiting.scored) - prompt;
    const std::int64_t before = promised_bytes() + record_bytes(prompt, prompt);
    while (!trace_->admits(before + fitting * record_bytes(each, each))) {
      held_back_ = !alone || fitting == 1;
      if (held_back_) return 0;
      --fitting;
    }
  }
  return fitting;
}

void Scheduler::admit() {
  for (const auto& [order, sequence] : active_) {
    if (sequence->parked) return;
  }
  while (!waiting_.empty()) {
    Waiting& next = waiting_.front();
    const std::int32_t samples = admissible(next);
    if (samples == 0) return;
    start(next, samples);
    if (next.first_sample == next.request.num_samples) waiting_.pop_front();
  }
}

void Scheduler::start(Waiting& waiting, std::int32_t samples) {
  const Request& request = waiting.request;
  auto sequence = std::make_unique<Sequence>();
  Sequence& s = *sequence;
  s.kind = waiting.scored ? Sequence::Kind::kScored : Sequence::Kind::kPrompt;
  s.order = {waiting.number, 2 * waiting.first_sample};
  s.trajectory = request.prefix;
  s.trajectory.sample += waiting.first_sample;
  if (waiting.prompt_path) s.trajectory.path = *waiting.prompt_path;
  s.earlier = s.trajectory.path;
  s.seed = request.seed;
  s.forks = waiting.scored ? 0 : samples;
  s.prompt = s.size();
  s.limit = static_cast<std::int32_t>(most_fed(waiting.request, waiting.scored)) + 1;
  s.group = std::make_shared<Group>();
  s.group->members = 1;
  const std::int64_t pages = group_pages(waiting.request, waiting.scored, samples);
  const std::int64_t own =
      std::max<std::int64_t>(cache_.pages_for(s.limit - 1) - s.prompt / cache_.page_tokens(), 0);
  // A prompt holds what its samples will; they take over their own part when they begin.
  s.group->shared_pages = waiting.scored ? 0 : pages - samples * own;
  s.reserved_pages = pages - s.group->shared_pages;
  reserved_ += pages;
  waiting.prompt_path = s.group->prompt_path;
  waiting.first_sample += samples;
  active_.emplace(s.order, std::move(sequence));
  begin_(s);
}

bool Scheduler::place(Sequence& s, Left& left, std::vector<Chunk>& chunks) {
  if (left.tokens == 0 || (s.decodes() && left.decodes == 0)) return false;
  auto end = static_cast<std::int32_t>(std::min<std::int64_t>(s.target(), s.fed + left.tokens));
  std::int64_t wanted = 0;
  for (std::int32_t p = s.kind == Sequence::Kind::kScored ? s.fed : end - 1; p < end; ++p) {
    if (!s.wants(p)) continue;
    if (wanted == left.wanted) {
      end = p;
      break;
    }
    ++wanted;
  }
  if (end > s.fed) end = make_room(s, end, chunks);
  if (end <= s.fed) return true;  // others may have more luck
  wanted = 0;
  for (std::int32_t p = s.fed; p < end; ++p) wanted += s.wants(p) ? 1 : 0;
  chunks.push_back({&s, s.order, s.fed, end - s.fed});
  left.tokens -= end - s.fed;
  left.wanted -= wanted;
  if (s.decodes()) --left.decodes;
  return true;
}

/// Pages of its own for positions fed .. end-1, as far as that goes: answers where it ended.
std::int32_t Scheduler::make_room(Sequence& s, std::int32_t end, const std::vector<Chunk>& chunks) {
  const std::int32_t page_tokens = cache_.page_tokens();
  const auto first = static_cast<std::size_t>(s.fed / page_tokens);
  const auto last = static_cast<std::size_t>((end - 1) / page_tokens);
  for (std::size_t i = first; i <= last; ++i) {
    const bool is_new = i == s.pages.size();
    for (;;) {
      const Page page = is_new ? cache_.take() : cache_.own(s.pages[i]);
      if (page != kNoPage) {
        if (is_new) s.pages.push_back(page);
        s.pages[i] = page;
        break;
      }
      if (!preempt(s, chunks)) {
        return std::max(s.fed, static_cast<std::int32_t>(i) * page_tokens);
      }
    }
  }
  return end;
}

/// Parks the last sequence behind `needy` that is not in the pass yet; false when there is none.
bool Scheduler::preempt(const Sequence& needy, const std::vector<Chunk>& chunks) {
  for (auto it = active_.rbegin(); it != active_.rend() && needy.order < it->first; ++it) {
    Sequence& victim = *it->second;
    const bool runs = std::any_of(chunks.begin(), chunks.end(),
                                  [&](const Chunk& chunk) { return chunk.sequence == &victim; });
    if (victim.parked || victim.pages.empty() || runs) continue;
    if (park(victim)) return true;
  }
  return false;
}

/// Answers whether that freed a frame.
bool Scheduler::park(Sequence& sequence) {
  bool freed = false;
  for (const Page page : sequence.pages) freed |= cache_.park(page);
  sequence.parked = true;
  ++preemptions;
  return freed;
}

std::vector<Sequence*> Scheduler::fork(Sequence& prompt) {
  std::vector<Sequence*> samples;
  const std::int64_t own = prompt.reserved_pages / std::max(prompt.forks, 1);
  const std::int32_t first = prompt.trajectory.sample;
  *prompt.group->prompt_path = prompt.trajectory.path;
  for (std::int32_t i = 0; i < prompt.forks; ++i) {
    auto sample = std::make_unique<Sequence>(prompt);
    sample->kind = Sequence::Kind::kSample;
    sample->order.place = prompt.order.place + 2 * i + 1;
    sample->trajectory.sample = first + i;
    sample->span.reset();
    sample->opened = false;
    sample->forks = 0;
    sample->reserved_pages = own;
    ++sample->group->members;
    for (const Page page : sample->pages) cache_.share(page);
    samples.push_back(sample.get());
    const bool is_new = active_.emplace(sample->order, std::move(sample)).second;
    assert(is_new && "each sample has a place of its own");
    (void)is_new;
  }
  shared_pages += static_cast<std::int64_t>(prompt.pages.size()) * (prompt.forks - 1);
  prompt.reserved_pages = 0;
  remove(prompt);
  return samples;
}

void Scheduler::clear(Sequence& sequence) {
  // The last first: of remembered pages those near the front are worth most.
  for (auto it = sequence.pages.rbegin(); it != sequence.pages.rend(); ++it) {
    cache_.drop(*it, sequence.parked);
  }
  sequence.pages.clear();
  sequence.parked = false;
  sequence.fed = 0;
}

void Scheduler::remove(Sequence& sequence) {
  clear(sequence);
  reserved_ -= sequence.reserved_pages;
  if (--sequence.group->members == 0) reserved_ -= sequence.group->shared_pages;
  active_.erase(sequence.order);
}

}  // namespace lockstep::rollout
