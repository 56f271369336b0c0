/// The inside of a Store: what store.cc (the caller's side) and spiller.cc (the store's own thread)
/// share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/disk.h"
#include "store/span_body.h"
#include "store/store.h"

namespace lockstep::store {

using OnDisk = std::shared_ptr<const DiskSpan>;

/// A span: in RAM, on disk, or both.
struct Entry {
  Span span{};
  ContractId contract{};
  bool sealed = false;
  std::uint64_t order = 0;       // of sealing
  std::shared_ptr<Body> body{};  // null: on disk alone; not changed once sealed
  std::int64_t body_bytes = 0;   // counted in ram_used
  OnDisk disk{};                 // null: in RAM alone
};

/// What a span gets of the rows that come together. All threads put them there, past the mutex:
/// nobody reads a span that is open, and whoever gives it up leaves its body to them.
struct Inflow {
  SpanId span{};
  std::int32_t begin = 0;          // the span's first position
  std::size_t first = 0, end = 0;  // of the tokens: those of the span
  std::shared_ptr<Body> body{};
  std::int64_t grown = 0;  // bytes of its memory; several threads add
};

/// A place whose rows come.
struct Arrival {
  const Rows<const std::byte>* rows;
  std::size_t column;  // by the schema
  std::int32_t width;
};

/// What is counted since the last call of metrics().
struct Counts {
  std::int64_t rows_written = 0;
  std::int64_t bytes_written = 0;
  std::int64_t tokens_sealed = 0;
  std::int64_t bytes_sealed = 0;
  std::int64_t spilled_bytes = 0;
  std::int64_t spans_given_up = 0;
  std::int64_t holds = 0;
};

struct Store::Impl {
  explicit Impl(const Options& options);
  ~Impl();

  using Entries = std::unordered_map<std::uint64_t, Entry>;

  // Under the mutex, unless said otherwise.
  Entry& open_entry(SpanId span, const char* doing);
  Entry& cached_entry(std::size_t i, SpanId span);
  std::vector<Inflow> inflows(std::span<const TokenKey> tokens);
  std::vector<Arrival> arrivals(std::span<const Rows<const std::byte>> places);
  std::vector<std::shared_ptr<Body>> open_bodies(std::span<const SpanId> ids);
  struct Size {
    std::int64_t memory = 0;
    std::int64_t rows = 0;  // bytes of them
    std::int32_t end = 0;   // past the last position
  };
  void settle(SpanId span, const Body& body, Size size);
  void drop(Entries::iterator entry);
  void give_up_body(Entry& entry);
  void wake();
  void wake_if_pressed();
  std::int64_t room() const { return options.ram_bytes - ram_used + clean_bytes; }

  // Reading. Takes the mutex for a look-up, not while it copies.
  std::size_t read_run(TokenKey first, ContractId contract, const Rows<std::byte>& rows,
                       std::byte* out, std::span<std::uint8_t> present);
  std::size_t read_disk(const DiskSpan& disk, TokenKey first, const Rows<std::byte>& rows,
                        std::byte* out, std::span<std::uint8_t> present);
  std::optional<Block> load(const DiskSpan& disk, const BlockRef& ref);

  // The store's own thread.
  void work();
  bool pressed();
  bool wants_spill();
  void free_bodies(std::unique_lock<std::mutex>& lock);
  void evict_clean();
  void spill_oldest(std::unique_lock<std::mutex>& lock);
  void load_body(std::unique_lock<std::mutex>& lock);
  void forget_on_disk(std::unique_lock<std::mutex>& lock);
  void answer_flush(std::unique_lock<std::mutex>& lock);

  const Options options;
  std::optional<Disk> disk;  // touched by the store's own thread only, past construction

  mutable std::mutex mutex;
  std::condition_variable work_cv;  // there is something to do
  std::condition_variable done_cv;  // something was done
  Entries spans;
  Schema schema;
  std::vector<std::pair<SpanId, Entry*>> recent;  // by place in a batch: who was there last
  std::int64_t ram_used = 0;
  std::int64_t clean_bytes = 0;  // of it, in bodies that are on disk too
  std::int64_t open_spans = 0;
  std::uint64_t next_order = 1;
  std::int64_t floor_version = INT64_MIN;            // spans of older weights go when sealed
  std::map<std::uint64_t, std::uint64_t> unspilled;  // order -> span, in RAM alone
  std::map<std::uint64_t, std::uint64_t> clean;      // order -> span, in RAM and on disk
  std::deque<std::uint64_t> wanted;                  // to be brought back
  std::vector<OnDisk> forgotten;
  std::vector<std::shared_ptr<const Body>> given_up;  // whose memory that thread gives back
  std::int64_t unfreed = 0;                           // bytes of theirs, not in ram_used any more
  std::int64_t wanted_room = 0;                       // bytes that admits() asked for
  bool lowering = false;                              // spilling on past the high water mark
  bool busy = false;                                  // the store's own thread is at work
  bool stop = false;
  std::uint64_t flush_asked = 0;
  std::uint64_t flush_done = 0;
  bool disk_full = false;        // the last write failed; tried again once there may be room
  std::string trouble;           // why
  mutable std::string why_held;  // of the last no
  Counts counts;
  Damage damage;
  std::set<std::pair<std::uint64_t, std::uint64_t>> bad_blocks;  // segment, offset: reported once

  std::atomic<std::int64_t> rows_read = 0;
  std::atomic<std::int64_t> bytes_read = 0;
  std::atomic<std::int64_t> rows_absent = 0;
  std::atomic<std::int64_t> read_errors = 0;
  std::atomic<std::int64_t> disk_bytes_read = 0;

  std::thread thread;  // begun when there is first something to do
};

}  // namespace lockstep::store
