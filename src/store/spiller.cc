// The store's own thread: writes sealed spans to disk, brings them back, removes what is given up.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "store/store_impl.h"

namespace lockstep::store {

/// Past 7/8 of the budget RAM is emptied to 3/4 of it, so that spilling comes in long writes.
bool Store::Impl::pressed() {
  if (ram_used > options.ram_bytes / 8 * 7) lowering = true;
  if (ram_used <= options.ram_bytes / 4 * 3) lowering = false;
  return lowering || (wanted_room > 0 && wanted_room > options.ram_bytes - ram_used);
}

bool Store::Impl::wants_spill() {
  if (flush_done < flush_asked) return true;
  if (!pressed()) return false;
  return !clean.empty() || (!unspilled.empty() && !disk_full);
}

void Store::Impl::work() {
  std::unique_lock lock(mutex);
  while (true) {
    work_cv.wait(lock, [&] {
      return stop || !given_up.empty() || !forgotten.empty() || !wanted.empty() ||
             (disk && wants_spill());
    });
    if (stop && forgotten.empty()) return;
    busy = true;
    if (!given_up.empty()) {
      free_bodies(lock);
    } else if (!forgotten.empty()) {
      forget_on_disk(lock);
    } else if (!wanted.empty()) {
      load_body(lock);
    } else if (pressed() && !clean.empty()) {
      evict_clean();
    } else if (!unspilled.empty() && !disk_full) {
      spill_oldest(lock);
    } else {
      answer_flush(lock);
    }
    busy = false;
    done_cv.notify_all();
  }
}

/// Many pieces of memory each, which nobody should wait for.
void Store::Impl::free_bodies(std::unique_lock<std::mutex>& lock) {
  auto bodies = std::exchange(given_up, {});
  const std::int64_t bytes = unfreed;
  lock.unlock();
  bodies.clear();  // a read under way has its own share
  lock.lock();
  unfreed -= bytes;
}

void Store::Impl::evict_clean() {
  while (pressed() && !clean.empty()) {
    give_up_body(spans.at(clean.begin()->second));
    clean.erase(clean.begin());
  }
}

void Store::Impl::spill_oldest(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t id = unspilled.begin()->second;
  const Entry before = spans.at(id);
  lock.unlock();
  Result<OnDisk> stored = disk->put(before.span, before.contract, *before.body);
  lock.lock();

  if (!stored) {
    disk_full = true;
    trouble = stored.error().message;
    return;
  }
  trouble.clear();
  counts.spilled_bytes += (*stored)->stored.bytes;
  const auto found = spans.find(id);
  if (found == spans.end() || found->second.body != before.body) {  // given up in the meantime
    forgotten.push_back(std::move(*stored));
    return;
  }
  Entry& entry = found->second;
  entry.disk = std::move(*stored);
  unspilled.erase(entry.order);
  clean[entry.order] = id;
  clean_bytes += entry.body_bytes;
}

void Store::Impl::load_body(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t id = wanted.front();
  wanted.pop_front();
  auto found = spans.find(id);
  if (found == spans.end() || !found->second.disk || found->second.body) return;
  const OnDisk from = found->second.disk;
  if (from->stored.bytes > options.ram_bytes - ram_used) return;  // a hint: no more than fits

  lock.unlock();
  std::vector<Column> columns;
  for (const BlockRef& ref : from->stored.blocks) {
    if (columns.empty() || columns.back().place() != ref.place ||
        columns.back().layout() != ref.layout) {
      columns.emplace_back(ref.place, ref.layout);
    }
    if (const std::optional<Block> block = load(*from, ref)) {
      for (const Run& run : block->runs) {
        columns.back().append(run.position, run.count,
                              block->rows + row_offset(run.row, ref.layout.bytes()));
      }
    }
  }
  for (Column& column : columns) column.close();
  lock.lock();

  found = spans.find(id);
  if (found == spans.end() || found->second.disk != from || found->second.body) {
    lock.unlock();
    columns.clear();
    lock.lock();
    return;
  }
  auto body = std::make_shared<Body>();
  for (Column& column : columns) {
    const std::size_t number = schema.id(column.place(), column.layout().encoding);
    if (number >= body->columns.size()) body->columns.resize(schema.size());
    body->columns[number] = std::move(column);
  }
  Entry& entry = found->second;
  entry.body = std::move(body);
  entry.body_bytes = entry.body->capacity_bytes();
  ram_used += entry.body_bytes;
  clean_bytes += entry.body_bytes;
  clean[entry.order] = id;
}

void Store::Impl::forget_on_disk(std::unique_lock<std::mutex>& lock) {
  const std::vector<OnDisk> gone = std::exchange(forgotten, {});
  lock.unlock();
  const std::int64_t freed = disk->forget(gone);
  lock.lock();
  if (freed > 0) disk_full = false;
}

/// All that could be written is written.
void Store::Impl::answer_flush(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t ticket = flush_asked;
  lock.unlock();
  const Result<void> synced = disk->sync();
  lock.lock();
  if (unspilled.empty()) trouble.clear();
  if (!synced) trouble = synced.error().message;
  flush_done = ticket;
}

}  // namespace lockstep::store
