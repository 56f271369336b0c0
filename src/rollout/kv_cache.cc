#include "rollout/kv_cache.h"

#include <algorithm>
#include <cassert>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kPlaneAlignment = 64;
constexpr std::int64_t kSlabSlots = 32;  // to pin memory is dear, however little it is

std::int32_t row_bytes(const Agreement& agreement, const Quantizer& rule) {
  const std::int32_t width = agreement.model.kv_width();
  if (!rule.quantizes()) return width * 2;
  return static_cast<std::int32_t>(rule.code_bytes(width) + rule.scale_cols(width));
}

void check_rule(const Agreement& agreement, const Quantizer& rule, const char* name) {
  if (!rule.quantizes()) return;
  if (rule.is_wide() ? rule.global != GlobalScale::kStatic : rule.scale == ScaleFormat::kNone) {
    throw Error(cat({"the contract's ", name,
                     " is neither NVFP4, MXFP4, BF16 nor FP8 under a fixed scale: the cache holds "
                     "no other formats"}));
  }
  if (rule.scale == ScaleFormat::kNone) {
    if (agreement.model.head_dim % 16 != 0) {
      throw Error(
          cat({"head_dim is ", agreement.model.head_dim, "; an FP8 cache needs a multiple of 16"}));
    }
  } else if (rule.block < 16 || agreement.model.head_dim % rule.block != 0) {
    throw Error(cat({"head_dim is ", agreement.model.head_dim, ", not a multiple of ", name,
                     ".block, ", rule.block}));
  }
  const auto needed = static_cast<std::size_t>(2 * agreement.model.num_layers);
  if (rule.global == GlobalScale::kStatic && agreement.contract.kv_exponents.size() != needed) {
    throw Error(cat({"the contract has ", agreement.contract.kv_exponents.size(),
                     " kv_exponents, the cache needs ", needed,
                     " (K and V of each layer): fill them with calibrate_kv"}));
  }
}

/// `take` takes a cache's memory, or says why not and what helps.
template <typename Take>
auto taken(std::int64_t cache_bytes, const char* remedy, const Take& take) {
  std::string why;
  try {
    return take();
  } catch (const std::bad_alloc&) {
    why = "more than this machine gives";
  } catch (const Error& error) {
    why = error.what();
  }
  throw Error(cat({"rollout.cache is ", cache_bytes, " bytes: ", why, "; ", remedy}));
}

}  // namespace

std::vector<LayerKv> cache_layout(const Agreement& agreement, std::int32_t page_tokens) {
  const Contract& contract = agreement.contract;
  check_rule(agreement, contract.k, "k");
  check_rule(agreement, contract.v, "v");
  std::vector<LayerKv> layers(static_cast<std::size_t>(agreement.model.num_layers));
  std::int64_t offset = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const bool quantized = contract.layers.has(Layer{static_cast<std::int32_t>(l)});
    for (const bool is_v : {false, true}) {
      kernels::PagedKv& kv = is_v ? layers[l].v : layers[l].k;
      kv.rule = !quantized ? Quantizer{} : is_v ? contract.v : contract.k;
      kv.row_bytes = row_bytes(agreement, kv.rule);
      kv.page_tokens = page_tokens;
      kv.offset = offset;
      const std::size_t place = 2 * l + (is_v ? 1 : 0);
      if (place < contract.kv_exponents.size()) kv.exponent = contract.kv_exponents[place];
      offset += std::int64_t{kv.row_bytes} * page_tokens;
      offset = (offset + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
    }
  }
  for (LayerKv& layer : layers) layer.k.page_bytes = layer.v.page_bytes = offset;
  return layers;
}

KvCache::KvCache(const Agreement& agreement, const Options& options, Device device, Stream stream)
    : page_tokens_(options.page_tokens),
      cache_bytes_(options.cache_bytes),
      device_(device),
      stream_(stream) {
  if (page_tokens_ < 1)
    throw Error(cat({"rollout.page_tokens is ", page_tokens_, ", not at least 1"}));
  layers_ = cache_layout(agreement, page_tokens_);
  page_bytes_ = layers_.at(0).k.page_bytes;
  const std::int64_t frames = options.cache_bytes / page_bytes_;
  if (frames < 1) {
    throw Error(cat({"rollout.cache is ", options.cache_bytes, ", less than one page of ",
                     page_tokens_, " tokens, ", page_bytes_, " bytes: raise rollout.cache"}));
  }
  frame_count_ = static_cast<std::int32_t>(std::min<std::int64_t>(frames, INT32_MAX));
  host_count_ = std::max<std::int64_t>(options.swap_bytes, 0) / page_bytes_;
  // Not set to zero: pages of a cache that is larger than its use cost nothing until written.
  const std::int64_t pages = std::int64_t{frame_count_} + (spare_frame() >= 0 ? 1 : 0);
  pool_ = taken(options.cache_bytes, "lower it", [&] { return Slab(device, pages * page_bytes_); });
  for (LayerKv& layer : layers_) layer.k.pool = layer.v.pool = pool_.as<>();
  free_frames_.resize(static_cast<std::size_t>(frame_count_));
  for (std::int32_t i = 0; i < frame_count_; ++i) {
    free_frames_[static_cast<std::size_t>(i)] = frame_count_ - 1 - i;
  }
}

std::int64_t KvCache::free_frames() const {
  return static_cast<std::int64_t>(free_frames_.size() + idle_.size());
}

std::int32_t KvCache::take_frame() {
  if (free_frames_.empty() && !idle_.empty()) {
    const Page oldest = idle_.begin()->second;
    unlist(oldest);
    release(oldest);
  }
  if (free_frames_.empty() && !stranded_.empty()) move_to_host(*stranded_.begin());
  if (free_frames_.empty()) return -1;
  const std::int32_t frame = free_frames_.back();
  free_frames_.pop_back();
  return frame;
}

Page KvCache::new_page(std::int32_t frame) {
  if (free_entries_.empty()) {
    free_entries_.push_back(static_cast<Page>(entries_.size()));
    entries_.emplace_back();
  }
  const Page page = free_entries_.back();
  free_entries_.pop_back();
  at(page) = {.users = 1, .running = 1, .frame = frame};
  return page;
}

Page KvCache::take() {
  const std::int32_t frame = take_frame();
  return frame < 0 ? kNoPage : new_page(frame);
}

void KvCache::share(Page page) {
  Entry& entry = at(page);
  assert(entry.frame >= 0 && "only pages on the device are shared");
  if (entry.users == 0) idle_.erase({entry.last_use, page});
  ++entry.users;
  ++entry.running;
}

/// Gives a page without users back: its place and its name.
void KvCache::release(Page page) {
  Entry& entry = at(page);
  stranded_.erase(page);
  if (entry.frame >= 0) free_frames_.push_back(entry.frame);
  if (entry.host >= 0) free_host_.push_back(entry.host);
  entry = {};
  free_entries_.push_back(page);
}

/// No longer remembered.
void KvCache::unlist(Page page) {
  Entry& entry = at(page);
  if (entry.key == nullptr) return;
  if (entry.users == 0) idle_.erase({entry.last_use, page});
  index_.erase(index_.find(*entry.key));
  entry.key = nullptr;
  entry.serial = 0;
}

void KvCache::drop(Page page, bool parked) {
  Entry& entry = at(page);
  assert(entry.users > 0 && "a page that nobody holds is dropped");
  --entry.users;
  if (!parked) --entry.running;
  if (entry.users > 0) {
    if (entry.running == 0 && entry.frame >= 0) leave_frame(page);  // those left are all parked
    return;
  }
  if (entry.key != nullptr) {
    entry.last_use = ++clock_;
    idle_.insert({entry.last_use, page});
  } else {
    release(page);
  }
}

Page KvCache::own(Page page) {
  if (!shared(page)) return page;
  std::int32_t frame = take_frame();
  if (frame >= 0) {
    copy_bytes(frame_bytes(frame), device_, frame_bytes(at(page).frame), device_, page_bytes_,
               stream_);
    const Page copy = new_page(frame);
    drop(page, false);
    return copy;
  }
  // The others are parked: theirs is the copy in host memory, and the frame stays.
  if (at(page).running > 1) return kNoPage;
  frame = at(page).frame;
  if (!move_to_host(page)) return kNoPage;
  free_frames_.pop_back();
  --at(page).users;
  --at(page).running;
  return new_page(frame);
}

/// Host memory for more pages; false when all that there may be is there.
bool KvCache::make_slots() {
  const std::int64_t made = std::ssize(slots_);
  const std::int64_t more = std::min(kSlabSlots, host_count_ - made);
  if (more <= 0) return false;
  std::byte* const slab = host_.emplace_back(more * page_bytes_, device_).as<>();
  for (std::int64_t i = 0; i < more; ++i) slots_.push_back(slab + i * page_bytes_);
  for (std::int64_t i = more; i-- > 0;) free_host_.push_back(static_cast<std::int32_t>(made + i));
  return true;
}

/// Copies follow each other on the stream, as do passes: nobody waits, and a slot or a frame that
/// is given on is written after it was read.
void KvCache::to_host(std::int32_t frame, std::int32_t slot) {
  copy_bytes(host_bytes(slot), {}, frame_bytes(frame), device_, page_bytes_, stream_);
}

void KvCache::to_frame(std::int32_t slot, std::int32_t frame) {
  copy_bytes(frame_bytes(frame), device_, host_bytes(slot), {}, page_bytes_, stream_);
}

/// Nobody who holds the page may run: its frame goes to others. False when host memory is full.
bool KvCache::move_to_host(Page page) {
  unlist(page);
  if (free_host_.empty() && !make_slots()) return false;
  stranded_.erase(page);
  Entry& entry = at(page);
  entry.host = free_host_.back();
  free_host_.pop_back();
  to_host(entry.frame, entry.host);
  free_frames_.push_back(entry.frame);
  entry.frame = -1;
  return true;
}

/// As soon as there is room: now, or when somebody needs the frame.
bool KvCache::leave_frame(Page page) {
  if (move_to_host(page)) return true;
  stranded_.insert(page);
  return false;
}

bool KvCache::park(Page page) {
  assert(at(page).running > 0 && "who is parked may run");
  return --at(page).running == 0 && leave_frame(page);
}

bool KvCache::unpark(Page page) {
  stranded_.erase(page);
  if (at(page).frame < 0) {
    const std::int32_t frame = take_frame();
    if (frame < 0 && stranded_.empty()) return false;
    if (frame < 0) {
      exchange(*stranded_.begin(), page);
    } else {
      Entry& entry = at(page);
      to_frame(entry.host, frame);
      free_host_.push_back(entry.host);
      entry.host = -1;
      entry.frame = frame;
    }
  }
  ++at(page).running;
  return true;
}

/// Device and host are both full: one page goes, the other comes into its place.
void KvCache::exchange(Page leaves, Page comes) {
  Entry& out = at(leaves);
  Entry& in = at(comes);
  if (spare_ < 0) {
    spare_ = static_cast<std::int32_t>(slots_.size());
    slots_.push_back(host_.emplace_back(page_bytes_, device_).as<>());
  }
  to_host(out.frame, spare_);
  to_frame(in.host, out.frame);
  in.frame = std::exchange(out.frame, -1);
  out.host = std::exchange(spare_, std::exchange(in.host, -1));
  stranded_.erase(leaves);
}

const std::byte* KvCache::bytes(Page page) const {
  const Entry& entry = at(page);
  return entry.frame >= 0 ? frame_bytes(entry.frame) : host_bytes(entry.host);
}

KvCache::Key KvCache::key(std::uint64_t parent, std::span<const Token> tokens,
                          std::span<const std::uint64_t> tags, std::size_t page) const {
  const auto count = static_cast<std::size_t>(page_tokens_);
  Key key = {parent};
  key.reserve(2 * count + 1);
  for (std::size_t i = page * count; i < (page + 1) * count; ++i) {
    key.push_back(static_cast<std::uint64_t>(tokens[i]));
    key.push_back(tags[i]);
  }
  return key;
}

void KvCache::remember(std::span<const Page> pages, std::span<const Token> tokens,
                       std::span<const std::uint64_t> tags) {
  const std::size_t full = tokens.size() / static_cast<std::size_t>(page_tokens_);
  std::uint64_t parent = 0;
  for (std::size_t i = 0; i < full; ++i) {
    const auto [found, is_new] = index_.try_emplace(key(parent, tokens, tags, i), pages[i]);
    Entry& entry = at(found->second);
    if (is_new) {
      if (entry.key != nullptr || entry.frame < 0) {  // it has another name, or is not there
        index_.erase(found);
        return;
      }
      entry.key = &found->first;
      entry.serial = ++serials_;
    }
    parent = entry.serial;
  }
}

std::vector<Page> KvCache::recall(std::span<const Token> tokens,
                                  std::span<const std::uint64_t> tags) {
  std::vector<Page> pages;
  std::uint64_t parent = 0;
  const std::size_t full = tokens.size() / static_cast<std::size_t>(page_tokens_);
  for (std::size_t i = 0; i < full; ++i) {
    const auto found = index_.find(key(parent, tokens, tags, i));
    if (found == index_.end()) break;
    share(found->second);
    parent = at(found->second).serial;
    pages.push_back(found->second);
  }
  return pages;
}

void KvCache::forget() {
  while (!index_.empty()) {
    const Page page = index_.begin()->second;
    unlist(page);
    if (at(page).users == 0) release(page);
  }
}

void KvCache::rest() {
  forget();
  if (used_frames() != 0) {
    throw Error(cat({"the KV cache was told to rest with ", used_frames(),
                     " pages in use, which would be lost; this is a fault of lockstep's own"}));
  }
  pool_.give_back();
}

void KvCache::wake() {
  if (owed() == 0) return;
  taken(
      cache_bytes_,
      "lower it, or where another process took the room, set trainer.memory in the recipe of each",
      [&] { pool_.take(); });
}

}  // namespace lockstep::rollout
