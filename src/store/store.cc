#include "store/store.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "base/parallel.h"
#include "base/text.h"
#include "store/store_impl.h"

namespace lockstep::store {
namespace {

std::string hex(std::uint64_t value) {
  std::string out = "0x";
  for (int shift = 60; shift >= 0; shift -= 4) out += "0123456789abcdef"[value >> shift & 15];
  return out;
}

/// How many of `tokens`, from `i` on, are consecutive positions of one span.
std::size_t run_length(std::span<const TokenKey> tokens, std::size_t i) {
  std::size_t end = i + 1;
  while (end < tokens.size() && tokens[end].span == tokens[i].span &&
         tokens[end].position == tokens[end - 1].position + 1) {
    ++end;
  }
  return end - i;
}

constexpr std::size_t kLargePart = 16 << 10;  // bytes of a span that several threads take
constexpr std::int64_t kPlacesATask = 8;      // of those
constexpr std::int64_t kColumnsATask = 512;   // of smaller ones
constexpr std::int64_t kSpansATask = 4;       // to seal

void require_rows(std::size_t tokens, std::size_t bytes, const RowLayout& layout) {
  const std::int32_t row = layout.bytes();
  if (row <= 0) throw Error("records: a layout of 0 bytes a row; ask for no such record");
  if (bytes != row_offset(static_cast<std::int64_t>(tokens), row)) {
    throw Error(cat({"records: ", bytes, " bytes given for ", tokens, " rows of ", row}));
  }
}

void require_layout(const RowLayout& held, const RowLayout& asked, Place place) {
  if (held == asked) return;
  throw Error(cat({"records of layer ", place.layer.value, ", site ", static_cast<int>(place.site),
                   ": rows of ", held.width, " elements in blocks of ", held.block, " are held, ",
                   asked.width, " in blocks of ", asked.block, " were asked for"}));
}

}  // namespace

Store::Impl::Impl(const Options& given) : options(given) {
  if (options.ram_bytes < 0 || options.disk_bytes < 0 || options.segment_bytes <= 0) {
    throw Error("store.ram and store.disk must not be negative, segment_bytes must be positive");
  }
  if (options.folder.empty()) return;
  disk.emplace(options);
  damage = disk->damage();
  for (const OnDisk& found : disk->recovered()) {
    const Span& span = found->stored.span;
    if (const auto before = spans.find(span.id.value); before != spans.end()) drop(before);
    spans[span.id.value] = {.span = span,
                            .contract = found->segment->header.contract,
                            .sealed = true,
                            .order = next_order++,
                            .disk = found};
  }
  counts.spans_given_up = 0;
  if (!forgotten.empty()) wake();
}

Store::Impl::~Impl() {
  if (!thread.joinable()) return;
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  work_cv.notify_all();
  thread.join();
}

Entry& Store::Impl::open_entry(SpanId span, const char* doing) {
  const auto found = spans.find(span.value);
  if (found == spans.end()) throw Error(cat({doing, " span ", hex(span.value), ": not opened"}));
  if (found->second.sealed) {
    throw Error(cat({doing, " span ", hex(span.value), ": it is sealed already"}));
  }
  return found->second;
}

/// A pass's rows come in the same order at each layer and site, so the row's place in the batch
/// tells where its span was found last time.
Entry& Store::Impl::cached_entry(std::size_t i, SpanId span) {
  if (i >= recent.size()) recent.resize(i + 1);
  auto& [id, entry] = recent[i];
  if (entry == nullptr || id != span) {
    entry = &open_entry(span, "record of");
    id = span;
  }
  return *entry;
}

std::vector<Arrival> Store::Impl::arrivals(std::span<const Rows<const std::byte>> places) {
  std::vector<Arrival> all;
  all.reserve(places.size());
  std::vector<bool> seen;
  for (const Rows<const std::byte>& rows : places) {
    const std::size_t column = schema.id(rows.place, rows.layout.encoding);
    if (column >= seen.size()) seen.resize(column + 1);
    if (seen[column]) {  // two threads would write one column
      throw Error(cat({"records: layer ", rows.place.layer.value, ", site ",
                       static_cast<int>(rows.place.site),
                       " is twice among the places of one append; give each once"}));
    }
    seen[column] = true;
    all.push_back({&rows, column, rows.layout.bytes()});
  }
  return all;
}

/// By span. A span whose tokens do not follow each other has several, one behind the other.
std::vector<Inflow> Store::Impl::inflows(std::span<const TokenKey> tokens) {
  std::vector<Inflow> all;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (all.empty() || all.back().span != tokens[i].span) {
      const Entry& entry = cached_entry(i, tokens[i].span);
      all.push_back(
          {.span = tokens[i].span, .begin = entry.span.first, .first = i, .body = entry.body});
    }
    all.back().end = i + 1;
  }
  return all;
}

namespace {

/// Room for `count` rows of a span, from `position` on, and the rows.
void extend(Inflow& into, const Arrival& from, std::size_t token, std::int32_t position,
            std::int32_t count) {
  const auto& [place, layout, bytes] = *from.rows;
  Column& column = into.body->columns[from.column];
  if (!column.made()) {
    column = Column(place, layout, from.column);
  } else {
    require_layout(column.layout(), layout, place);
  }
  if (position < std::max(column.end(), into.begin) ||
      position > static_cast<std::int32_t>(kMaxPosition) - count) {
    throw Error(
        cat({"record of span ", hex(into.span.value), ", position ", position,
             ": the span begins at ", into.begin, " and layer ", place.layer.value, ", site ",
             static_cast<int>(place.site), " is recorded up to ", column.end(), " already"}));
  }
  const std::int64_t before = column.capacity_bytes();
  column.append(position, count,
                bytes.data() + row_offset(static_cast<std::int64_t>(token), from.width));
  const std::int64_t grown = column.capacity_bytes() - before;
  if (grown != 0) std::atomic_ref(into.grown) += grown;
}

/// Of several tasks the first one's, whichever thread met it when.
class FirstFailure {
 public:
  void keep(std::int64_t task) {
    const std::lock_guard lock(mutex_);
    if (failure_ && task_ < task) return;
    failure_ = std::current_exception();
    task_ = task;
  }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
  std::int64_t task_ = 0;
};

/// Puts all rows where they belong. Without the mutex: a thread that waits here for the others may
/// take up any task of theirs.
void fill(std::span<Inflow> all, std::span<const Arrival> arrivals,
          std::span<const TokenKey> tokens, std::size_t row_bytes, std::size_t columns,
          FirstFailure& failure) {
  // Spans of which each comes once: several threads may have them at a time.
  std::vector<SpanId> ids;
  ids.reserve(all.size());
  for (const Inflow& into : all) ids.push_back(into.span);
  std::sort(ids.begin(), ids.end());
  const bool apart = std::adjacent_find(ids.begin(), ids.end()) == ids.end();
  const auto places = std::ssize(arrivals);
  const bool large = tokens.size() * row_bytes / all.size() >= kLargePart;
  const std::int64_t each = large ? std::min(kPlacesATask, places) : places;
  const std::int64_t cuts = (places + each - 1) / each;
  const auto count = std::ssize(all);
  const auto make_columns = [columns](const Inflow& into) {
    if (into.body->columns.size() < columns) into.body->columns.resize(columns);
  };
  if (cuts > 1) std::for_each(all.begin(), all.end(), make_columns);
  const std::int64_t grain = large ? 1 : std::max<std::int64_t>(kColumnsATask / places, 1);
  const auto run = [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t task = first; task < end; ++task) {
      Inflow& into = all[static_cast<std::size_t>(task % count)];
      const std::int64_t from = task / count * each;
      const auto mine = arrivals.subspan(static_cast<std::size_t>(from),
                                         static_cast<std::size_t>(std::min(each, places - from)));
      try {
        if (cuts == 1) make_columns(into);
        for (std::size_t i = into.first, n = 0; i < into.end; i += n) {
          n = run_length(tokens.first(into.end), i);
          for (const Arrival& arrival : mine) {
            extend(into, arrival, i, tokens[i].position, static_cast<std::int32_t>(n));
          }
        }
      } catch (...) {
        failure.keep(task % count * cuts + task / count);
      }
    }
  };
  apart ? parallel_for(count * cuts, grain, run) : run(0, count * cuts);
}

}  // namespace

/// Of spans that are open, each once.
std::vector<std::shared_ptr<Body>> Store::Impl::open_bodies(std::span<const SpanId> ids) {
  std::vector<std::shared_ptr<Body>> bodies;
  for (const SpanId id : ids) bodies.push_back(open_entry(id, "sealing").body);
  return bodies;
}

/// A span whose columns are closed is sealed, unless it was given up in the meantime.
void Store::Impl::settle(SpanId span, const Body& body, Size size) {
  const auto found = spans.find(span.value);
  if (found == spans.end() || found->second.body.get() != &body) return;
  Entry& entry = found->second;
  ram_used += size.memory - entry.body_bytes;
  entry.body_bytes = size.memory;
  entry.span.count = std::max(entry.span.count, size.end - entry.span.first);
  entry.sealed = true;
  entry.order = next_order++;
  --open_spans;
  counts.tokens_sealed += std::max(0, size.end - entry.span.first);
  counts.bytes_sealed += size.rows;
  if (entry.span.version.value < floor_version) return drop(found);
  unspilled[entry.order] = span.value;
}

/// Its pieces of memory are many: nobody but the store's own thread should wait for them.
void Store::Impl::give_up_body(Entry& entry) {
  if (!entry.body) return;
  given_up.push_back(std::move(entry.body));
  ram_used -= entry.body_bytes;
  if (entry.disk) clean_bytes -= entry.body_bytes;
  unfreed += std::exchange(entry.body_bytes, 0);
}

void Store::Impl::drop(Entries::iterator found) {
  Entry& entry = found->second;
  give_up_body(entry);
  if (!entry.sealed) --open_spans;
  if (entry.disk) forgotten.push_back(entry.disk);
  unspilled.erase(entry.order);
  clean.erase(entry.order);
  spans.erase(found);
  recent.clear();
  ++counts.spans_given_up;
  disk_full = false;  // there may be room now
}

void Store::Impl::wake() {
  if (!thread.joinable()) thread = std::thread([this] { work(); });
  work_cv.notify_one();
}

void Store::Impl::wake_if_pressed() {
  if (!given_up.empty() || (disk && (wants_spill() || !forgotten.empty()))) wake();
}

std::size_t Store::Impl::read_run(TokenKey first, ContractId contract, const Rows<std::byte>& rows,
                                  std::byte* out, std::span<std::uint8_t> present) {
  std::shared_ptr<const Body> body;
  OnDisk on_disk;
  std::int32_t column = -1;
  {
    const std::lock_guard lock(mutex);
    const auto found = spans.find(first.span.value);
    if (found == spans.end() || !found->second.sealed) return 0;
    const Entry& entry = found->second;
    if (entry.contract != contract) {
      throw Error(cat({"span ", hex(first.span.value), " was recorded under contract ",
                       hex(entry.contract.value), ", not ", hex(contract.value)}));
    }
    body = entry.body;
    on_disk = entry.disk;
    column = schema.find(rows.place, rows.layout.encoding);
  }
  if (!body) return read_disk(*on_disk, first, rows, out, present);
  if (column < 0 || static_cast<std::size_t>(column) >= body->columns.size()) return 0;
  const Column& held = body->columns[static_cast<std::size_t>(column)];
  if (held.rows() == 0) return 0;
  require_layout(held.layout(), rows.layout, rows.place);
  return copy_rows(held.runs(), first.position, present,
                   [&](std::int64_t row, std::int64_t count, std::int64_t at) {
                     if (out == nullptr) return;
                     held.copy(row, count, out + row_offset(at, held.row_bytes()));
                   });
}

std::size_t Store::Impl::read_disk(const DiskSpan& from, TokenKey first,
                                   const Rows<std::byte>& rows, std::byte* out,
                                   std::span<std::uint8_t> present) {
  const std::pair wanted_place(rows.place, rows.layout.encoding);
  const std::int64_t end = first.position + static_cast<std::int64_t>(present.size());
  const std::vector<BlockRef>& blocks = from.stored.blocks;
  auto ref = std::partition_point(blocks.begin(), blocks.end(), [&](const BlockRef& b) {
    return std::pair(b.place, b.layout.encoding) < wanted_place;
  });
  std::size_t count = 0;
  for (; ref != blocks.end() && std::pair(ref->place, ref->layout.encoding) == wanted_place;
       ++ref) {
    require_layout(ref->layout, rows.layout, rows.place);
    if (ref->end <= first.position || ref->first >= end) continue;
    if (const std::optional<Block> block = load(from, *ref)) {
      count += block->copy(ref->layout.bytes(), first.position, out, present);
    }
  }
  return count;
}

std::optional<Block> Store::Impl::load(const DiskSpan& from, const BlockRef& ref) {
  const SpanId id = from.stored.span.id;
  tl::expected<Block, BlockFault> block = read_block(*from.segment->file, id, ref);
  disk_bytes_read += static_cast<std::int64_t>(ref.length);
  if (block) return std::move(*block);
  if (block.error() == BlockFault::kSystem) {
    ++read_errors;
    return {};
  }
  const std::lock_guard lock(mutex);
  if (bad_blocks.emplace(from.segment->header.number, ref.offset).second) {
    damage.drop(from.segment->file->name(), static_cast<std::int64_t>(ref.offset),
                kFrameBytes + static_cast<std::int64_t>(ref.length), "block checksum");
  }
  return {};
}

Store::Store(const Options& options) : impl_(std::make_unique<Impl>(options)) {}
Store::~Store() = default;

void Store::open(const Span& span, ContractId contract) {
  Impl& s = *impl_;
  if (span.first < 0 || span.count < 0) {
    throw Error(cat({"span ", hex(span.id.value), ": first ", span.first, " and count ", span.count,
                     " must not be negative"}));
  }
  if (s.options.contract != ContractId{} && s.options.contract != contract) {
    throw Error(cat({"span ", hex(span.id.value), ": contract ", hex(contract.value),
                     " is not the store's, ", hex(s.options.contract.value)}));
  }
  const std::lock_guard lock(s.mutex);
  if (const auto before = s.spans.find(span.id.value); before != s.spans.end()) s.drop(before);
  Entry entry = {.span = span, .contract = contract, .body = std::make_shared<Body>()};
  s.spans[span.id.value] = std::move(entry);
  ++s.open_spans;
  s.wake_if_pressed();
}

bool Store::admits(std::int64_t bytes) const {
  Impl& s = *impl_;
  std::unique_lock lock(s.mutex);
  bool enough = bytes <= s.room();
  if (enough) {
    s.wanted_room = 0;
  } else if (s.disk) {
    // The answer must not depend on how far the store's own thread is: a run is the same each time.
    if (s.open_spans == 0) s.disk_full = false;  // ask again: somebody may have made room
    s.wanted_room = std::max(s.wanted_room, bytes);
    s.wake();
    s.done_cv.wait(lock, [&] {
      return bytes <= s.room() || (!s.busy && s.forgotten.empty() && !s.wants_spill());
    });
    enough = bytes <= s.room();
    if (enough || s.open_spans == 0) s.wanted_room = 0;
  }
  if (enough) {
    const auto there = [&] { return s.unfreed == 0 || bytes <= s.room() - s.unfreed; };
    if (!there()) s.wake();
    s.done_cv.wait(lock, there);
    return true;
  }
  ++s.counts.holds;
  s.why_held = cat({"records: no room for ", bytes, " more bytes: ", s.ram_used,
                    " of store.ram = ", s.options.ram_bytes, " are in use",
                    s.disk ? (s.trouble.empty() ? "" : "; " + s.trouble)
                           : std::string(" and store.on_disk is off"),
                    s.trouble.empty() ? "; raise store.ram" : ""});
  return false;
}

std::string Store::held() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->why_held;
}

void Store::append(std::span<const TokenKey> tokens, Rows<const std::byte> rows) {
  append_all(tokens, {&rows, 1});
}

void Store::append_all(std::span<const TokenKey> tokens,
                       std::span<const Rows<const std::byte>> places) {
  std::size_t bytes = 0;
  for (const Rows<const std::byte>& rows : places) {
    require_rows(tokens.size(), rows.bytes.size(), rows.layout);
    bytes += rows.bytes.size();
  }
  if (tokens.empty() || places.empty()) return;
  Impl& s = *impl_;
  std::unique_lock lock(s.mutex);
  const std::vector<Arrival> arrivals = s.arrivals(places);
  std::vector<Inflow> inflows = s.inflows(tokens);
  const std::size_t columns = s.schema.size();
  lock.unlock();
  FirstFailure failure;
  fill(inflows, arrivals, tokens, bytes / tokens.size(), columns, failure);
  lock.lock();
  for (const Inflow& into : inflows) {
    if (into.grown == 0) continue;
    const auto found = s.spans.find(into.span.value);
    if (found == s.spans.end() || found->second.body != into.body) continue;  // given up by now
    found->second.body_bytes += into.grown;
    s.ram_used += into.grown;
  }
  s.wake_if_pressed();
  failure.rethrow();
  s.counts.rows_written += std::ssize(tokens) * std::ssize(places);
  s.counts.bytes_written += static_cast<std::int64_t>(bytes);
}

void Store::truncate(SpanId span, std::int32_t position) {
  const std::lock_guard lock(impl_->mutex);
  Entry& entry = impl_->open_entry(span, "truncating");
  for (Column& column : entry.body->columns) column.truncate(position);
  const std::int64_t bytes = entry.body->capacity_bytes();
  impl_->ram_used += bytes - entry.body_bytes;
  entry.body_bytes = bytes;
}

void Store::seal(SpanId span) { seal_all({&span, 1}); }

void Store::seal_all(std::span<const SpanId> ids) {
  Impl& s = *impl_;
  std::unique_lock lock(s.mutex);
  const std::vector<std::shared_ptr<Body>> bodies = s.open_bodies(ids);
  lock.unlock();
  std::vector<Impl::Size> sizes(ids.size());
  parallel_for(std::ssize(ids), kSpansATask, [&](std::int64_t first, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(end); ++i) {
      for (Column& column : bodies[i]->columns) column.close();
      sizes[i] = {bodies[i]->capacity_bytes(), bodies[i]->bytes(), bodies[i]->end()};
    }
  });
  lock.lock();
  s.recent.clear();
  for (std::size_t i = 0; i < ids.size(); ++i) s.settle(ids[i], *bodies[i], sizes[i]);
  s.wake_if_pressed();
}

std::size_t Store::read(std::span<const TokenKey> tokens, ContractId contract, Rows<std::byte> rows,
                        std::span<std::uint8_t> present) const {
  const bool with_bytes = !rows.bytes.empty();
  if (with_bytes) require_rows(tokens.size(), rows.bytes.size(), rows.layout);
  if (present.size() != tokens.size()) {
    throw Error(cat({"records: ", present.size(), " flags for ", tokens.size(), " tokens"}));
  }
  const std::int32_t row_bytes = rows.layout.bytes();
  std::size_t total = 0;
  for (std::size_t i = 0; i < tokens.size();) {
    const std::size_t count = run_length(tokens, i);
    const auto at = static_cast<std::int64_t>(i);
    std::byte* out = with_bytes ? rows.bytes.data() + row_offset(at, row_bytes) : nullptr;
    const std::span<std::uint8_t> flags = present.subspan(i, count);
    std::memset(flags.data(), 0, count);
    const std::size_t found = impl_->read_run(tokens[i], contract, rows, out, flags);
    for (std::size_t k = 0; with_bytes && found < count && k < count; ++k) {
      if (flags[k] != 0) continue;
      const auto row = static_cast<std::int64_t>(k);
      std::memset(out + row_offset(row, row_bytes), 0, static_cast<std::size_t>(row_bytes));
    }
    total += found;
    i += count;
  }
  const auto found = static_cast<std::int64_t>(total);
  impl_->rows_absent += static_cast<std::int64_t>(tokens.size()) - found;
  if (with_bytes) {
    impl_->rows_read += found;
    impl_->bytes_read += found * row_bytes;
  }
  return total;
}

void Store::prefetch(std::span<const TokenKey> tokens) const {
  Impl& s = *impl_;
  if (!s.disk) return;
  const std::lock_guard lock(s.mutex);
  for (std::size_t i = 0; i < tokens.size(); i += run_length(tokens, i)) {
    const auto found = s.spans.find(tokens[i].span.value);
    if (found == s.spans.end() || !found->second.disk || found->second.body) continue;
    if (s.wanted.empty() || s.wanted.back() != found->first) s.wanted.push_back(found->first);
  }
  if (!s.wanted.empty()) s.wake();
}

void Store::retire(WeightVersion version) {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  s.floor_version = std::max(s.floor_version, version.value);
  for (auto it = s.spans.begin(); it != s.spans.end();) {
    const auto here = it++;
    if (here->second.sealed && here->second.span.version < version) s.drop(here);
  }
  s.wake_if_pressed();
}

void Store::release(std::span<const SpanId> spans) {
  const std::lock_guard lock(impl_->mutex);
  for (const SpanId span : spans) {
    if (const auto found = impl_->spans.find(span.value); found != impl_->spans.end()) {
      impl_->drop(found);
    }
  }
  impl_->wake_if_pressed();
}

Result<void> Store::flush() {
  Impl& s = *impl_;
  if (!s.disk) return {};
  std::unique_lock lock(s.mutex);
  s.disk_full = false;
  const std::uint64_t ticket = ++s.flush_asked;
  s.wake();
  s.done_cv.wait(lock, [&] { return s.flush_done >= ticket; });
  if (s.trouble.empty()) return {};
  return fault(s.trouble);
}

std::vector<Span> Store::spans() const {
  std::vector<Span> sealed;
  {
    const std::lock_guard lock(impl_->mutex);
    for (const auto& [id, entry] : impl_->spans) {
      if (entry.sealed) sealed.push_back(entry.span);
    }
  }
  std::sort(sealed.begin(), sealed.end(), [](const Span& a, const Span& b) { return a.id < b.id; });
  return sealed;
}

std::vector<std::string> Store::dropped() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<std::string> lines = impl_->damage.lines;
  if (impl_->disk) {
    for (const std::string& line : impl_->disk->foreign()) lines.push_back(line + ": left alone");
  }
  return lines;
}

Metrics Store::metrics() {
  Impl& s = *impl_;
  const std::lock_guard lock(s.mutex);
  const Counts counts = std::exchange(s.counts, {});
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  Metrics metrics = {
      {"fp4/trace/rows_written", number(counts.rows_written)},
      {"fp4/trace/bytes_written", number(counts.bytes_written)},
      {"fp4/trace/rows_read", number(s.rows_read.exchange(0))},
      {"fp4/trace/bytes_read", number(s.bytes_read.exchange(0))},
      {"fp4/trace/rows_absent", number(s.rows_absent.exchange(0))},
      {"fp4/trace/read_errors", number(s.read_errors.exchange(0))},
      {"perf/trace/spilled_bytes", number(counts.spilled_bytes)},
      {"perf/trace/disk_bytes_read", number(s.disk_bytes_read.exchange(0))},
      {"fp4/trace/spans_given_up", number(counts.spans_given_up)},
      {"fp4/trace/admission_holds", number(counts.holds)},
      {"perf/trace/dropped_bytes", number(s.damage.bytes)},
      {"fp4/trace/spans_live", number(std::ssize(s.spans))},
      {"perf/trace/ram_bytes", number(s.ram_used + s.unfreed)},
      {"perf/trace/disk_bytes", number(s.disk ? s.disk->bytes() : 0)},
      {"perf/trace/segments", number(s.disk ? s.disk->segments() : 0)},
      {"perf/trace/foreign_files", number(s.disk ? std::ssize(s.disk->foreign()) : 0)}};
  if (counts.tokens_sealed > 0) {
    metrics["fp4/guide/bytes_per_token"] =
        number(counts.bytes_sealed) / number(counts.tokens_sealed);
  }
  return metrics;
}

}  // namespace lockstep::store
