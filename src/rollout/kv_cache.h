/// Pages of K and V: who holds them, where their bytes are, and which of them earlier requests left
/// for later ones.
///
/// A page holds page_tokens positions of every layer. Sequences hold pages by name and count as
/// users; a page is on the device (in a *frame*) while any user may run, and its bytes move to host
/// memory when the last of them is parked. Full pages are never written again, so they are shared;
/// who must write into a shared page copies it first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "device/memory.h"
#include "device/slab.h"
#include "record/agreement.h"
#include "rollout/engine.h"
#include "rollout/forward.h"

namespace lockstep::rollout {

using Page = std::int32_t;
inline constexpr Page kNoPage = -1;

/// Where each layer's rows lie in a page: K, then V, layer by layer, each part at a multiple of 64
/// bytes. The pool is not set. Throws Error where the contract asks for what a cache cannot hold.
std::vector<LayerKv> cache_layout(const Agreement& agreement, std::int32_t page_tokens);

class KvCache {
 public:
  /// Frames on `device`; what is copied from, to and between them is copied in the order of
  /// `stream`. Throws Error naming bytes and option where not even one page fits.
  KvCache(const Agreement& agreement, const Options& options, Device device = {},
          Stream stream = {});

  std::span<const LayerKv> layers() const { return layers_; }
  std::int32_t page_tokens() const { return page_tokens_; }
  std::int64_t page_bytes() const { return page_bytes_; }
  std::int64_t frames() const { return static_cast<std::int64_t>(frame_count_); }
  std::int64_t host_slots() const { return host_count_; }
  std::int64_t pages_for(std::int64_t tokens) const {
    return (tokens + page_tokens_ - 1) / page_tokens_;
  }

  /// Frames that take() could still give: empty ones and those of pages only remembered.
  std::int64_t free_frames() const;
  std::int64_t used_frames() const { return frames() - free_frames(); }

  /// A new page with one user, on the device; kNoPage when no frame is left.
  Page take();

  /// One more user, who may run. The page must be on the device.
  void share(Page page);

  /// A user leaves. `parked`: one whose sequence had been parked.
  void drop(Page page, bool parked);

  /// A page of one's own with the same bytes, in exchange for a shared one; kNoPage when no frame
  /// is left. The page itself when nobody shares it.
  Page own(Page page);
  bool shared(Page page) const { return at(page).users > 1; }

  /// A user may not run for a while. Frees the frame when it was the last who might and host memory
  /// has room; answers whether it did. Else the page leaves its frame once that is so.
  bool park(Page page);

  /// The opposite; false when no frame is left. Of a sequence's pages those that are still on the
  /// device first: they might have to make room for the others.
  bool unpark(Page page);
  bool on_host(Page page) const { return at(page).frame < 0; }

  std::int32_t frame(Page page) const { return at(page).frame; }
  /// On a CUDA device a frame of no page, where rows that only fill a pass up may write; else -1.
  std::int32_t spare_frame() const {
    return device_.kind == Device::Kind::kCuda ? frame_count_ : -1;
  }
  /// Where they lie: on the device, or on_host().
  const std::byte* bytes(Page page) const;

  /// Takes note of the full pages among `pages`, which hold `tokens`, under the names in `tags`
  /// (one a token): whose records these rows have, or 0 where it does not matter.
  void remember(std::span<const Page> pages, std::span<const Token> tokens,
                std::span<const std::uint64_t> tags);

  /// The longest run of remembered full pages that holds a prefix of `tokens` under these names,
  /// each with one more user.
  std::vector<Page> recall(std::span<const Token> tokens, std::span<const std::uint64_t> tags);

  /// Nothing is remembered any more: weights have changed.
  void forget();

  /// Nobody holds a page: what they lie in goes back to a CUDA device, with all that is remembered.
  /// `wake` takes it anew, at the same address. Throws Error naming bytes and option where the
  /// device has not so much free, and can be called again. `rest` throws where a page is in use.
  void rest();
  void wake();
  std::int64_t pool_bytes() const { return pool_.bytes(); }
  /// Bytes that wake() would take.
  std::int64_t owed() const { return pool_.owed(); }

  std::int64_t remembered() const { return static_cast<std::int64_t>(index_.size()); }

 private:
  /// The page before it (its serial) and each token with its tag.
  using Key = std::vector<std::uint64_t>;

  struct Entry {
    std::int32_t users = 0;
    std::int32_t running = 0;  // users that may run
    std::int32_t frame = -1;
    std::int32_t host = -1;
    std::uint64_t serial = 0;  // 0: not remembered
    std::uint64_t last_use = 0;
    const Key* key = nullptr;  // in index_
  };

  const Entry& at(Page page) const { return entries_[static_cast<std::size_t>(page)]; }
  Entry& at(Page page) { return entries_[static_cast<std::size_t>(page)]; }
  std::byte* frame_bytes(std::int32_t frame) const { return pool_.as<>() + frame * page_bytes_; }
  std::byte* host_bytes(std::int32_t slot) const { return slots_[static_cast<std::size_t>(slot)]; }
  void to_host(std::int32_t frame, std::int32_t slot);
  void to_frame(std::int32_t slot, std::int32_t frame);
  bool make_slots();
  std::int32_t take_frame();
  Page new_page(std::int32_t frame);
  void release(Page page);
  void unlist(Page page);
  bool move_to_host(Page page);
  bool leave_frame(Page page);
  void exchange(Page leaves, Page comes);
  Key key(std::uint64_t parent, std::span<const Token> tokens, std::span<const std::uint64_t> tags,
          std::size_t page) const;

  std::vector<LayerKv> layers_;
  std::int32_t page_tokens_;
  std::int64_t cache_bytes_;
  std::int64_t page_bytes_ = 0;
  std::int32_t frame_count_ = 0;
  std::int64_t host_count_ = 0;
  Device device_;
  Stream stream_;
  Slab pool_;
  std::vector<std::int32_t> free_frames_;
  std::vector<PinnedBuffer> host_;  // some slots each, made when first needed
  std::vector<std::byte*> slots_;
  std::int32_t spare_ = -1;  // a slot beyond host_count_, for an exchange
  std::vector<std::int32_t> free_host_;
  std::vector<Entry> entries_;
  std::vector<Page> free_entries_;
  std::map<Key, Page> index_;
  std::set<std::pair<std::uint64_t, Page>> idle_;  // remembered, no users, by last use
  std::set<Page> stranded_;  // on the device, all users parked: host memory was full
  std::uint64_t serials_ = 0;
  std::uint64_t clock_ = 0;
};

}  // namespace lockstep::rollout
