#include "store/disk.h"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "base/folder.h"
#include "base/text.h"
#include "model/file.h"

namespace lockstep::store {
namespace {

constexpr std::string_view kSuffix = ".segment";

std::string file_name(std::uint64_t number) {
  std::string digits = std::to_string(number);
  if (digits.size() < 6) digits.insert(0, 6 - digits.size(), '0');
  return digits + std::string(kSuffix);
}

/// The number in a segment's file name, 0 where there is none.
std::uint64_t number_of(const std::filesystem::path& path) {
  const std::string stem = path.stem().string();
  std::uint64_t number = 0;
  const auto parsed = std::from_chars(stem.data(), stem.data() + stem.size(), number);
  return parsed.ec == std::errc() && parsed.ptr == stem.data() + stem.size() ? number : 0;
}

Fault remedied(const Fault& fault) {
  return {fault.message + "; make room there, or raise store.ram"};
}

/// More than a span will take: rows and all framing.
std::int64_t at_most(const Body& body) {
  constexpr std::int64_t kPerBlock = kFrameBytes + kBlockHeaderBytes + kBlockRefBytes;
  std::int64_t bytes = kFrameBytes + kDirectoryHeaderBytes;
  for (const Column& column : body.columns) {
    if (column.rows() == 0) continue;
    const std::int64_t blocks = 2 * column.bytes() / kBlockTarget + 2;
    const auto runs = static_cast<std::int64_t>(column.runs().size());
    bytes += column.bytes() + blocks * kPerBlock + (runs + blocks) * kRunBytes;
  }
  return bytes;
}

}  // namespace

Disk::Disk(const Options& options) : options_(options) {
  namespace fs = std::filesystem;
  if (make_folder(options.folder, "the trace's folder", "name another")) {
    const fs::path made = fs::absolute(options.folder).lexically_normal();
    unsynced_parent_ = (made.has_filename() ? made : made.parent_path()).parent_path();
  }
  const fs::path lock = options.folder / "LOCK";
  Result<File> file = fs::exists(lock) ? File::open(lock) : File::create(lock);
  lock_ = value_or_throw(std::move(file));
  if (!lock_->lock()) {
    throw Error(cat({"trace folder ", options.folder.string(),
                     ": another process uses it; end that one, or give this run another folder"}));
  }
  std::vector<fs::path> paths;
  std::error_code failed;
  fs::directory_iterator entries(options.folder, failed);
  if (failed) throw Error(cat({"trace folder ", options.folder.string(), ": ", failed.message()}));
  for (const auto& entry : entries) {
    if (entry.path().extension() != kSuffix) continue;
    paths.push_back(entry.path());
    next_number_ = std::max(next_number_, number_of(entry.path()) + 1);
  }
  std::sort(paths.begin(), paths.end(), [](const fs::path& a, const fs::path& b) {
    return std::pair(number_of(a), a) < std::pair(number_of(b), b);
  });
  for (const fs::path& path : paths) recover(path);
}

Disk::~Disk() { end_segment(); }

void Disk::recover(const std::filesystem::path& path) {
  Result<File> opened = File::open(path);
  if (!opened) return leave_alone(path, opened.error().message);
  auto file = std::make_shared<File>(std::move(*opened));
  const Result<std::int64_t> size = file->size();
  if (!size) return leave_alone(path, size.error().message);
  if (*size == 0) return remove_file(path);  // its maker died before the header
  const Result<SegmentHeader> header = read_header(*file);
  if (!header) return leave_alone(path, header.error().message);
  const bool any_contract = options_.contract == ContractId{};
  if (header->run != options_.run || (!any_contract && header->contract != options_.contract)) {
    return leave_alone(path, cat({path.string(), ": of another ",
                                  header->run != options_.run ? "run" : "contract"}));
  }
  const Result<Scan> scan = scan_segment(*file, damage_);
  if (!scan) return leave_alone(path, scan.error().message);
  if (scan->spans.empty()) return remove_file(path);
  auto segment = std::make_shared<Segment>(Segment{.path = path,
                                                   .header = *header,
                                                   .file = file,
                                                   .size = *size,
                                                   .live = std::ssize(scan->spans)});
  if (scan->whole < *size && file->truncate(scan->whole)) {
    segment->size = scan->whole;
    changed(segment);
  }
  bytes_ += segment->size;
  ++segments_;
  for (const StoredSpan& stored : scan->spans) {
    recovered_.push_back(std::make_shared<const DiskSpan>(DiskSpan{segment, stored}));
  }
}

void Disk::leave_alone(const std::filesystem::path& path, std::string why) {
  std::error_code failed;
  const std::uintmax_t size = std::filesystem::file_size(path, failed);
  if (!failed) foreign_bytes_ += static_cast<std::int64_t>(size);
  foreign_.push_back(std::move(why));
}

void Disk::changed(const std::shared_ptr<Segment>& segment) {
  if (std::find(unsynced_.begin(), unsynced_.end(), segment) == unsynced_.end()) {
    unsynced_.push_back(segment);
  }
}

Result<void> Disk::begin_segment(ContractId contract) {
  const std::filesystem::path path = options_.folder / file_name(next_number_);
  Result<File> made = File::create(path);
  if (!made) return tl::unexpected(made.error());
  auto file = std::make_shared<File>(std::move(*made));
  const SegmentHeader header = {contract, options_.run, next_number_};
  Result<SegmentWriter> writer = SegmentWriter::create(file, header);
  if (!writer) {
    remove_file(path);
    return tl::unexpected(writer.error());
  }
  ++next_number_;
  writer_ = std::move(*writer);
  current_ = std::make_shared<Segment>(
      Segment{.path = path, .header = header, .file = file, .size = writer_->size()});
  bytes_ += current_->size;
  ++segments_;
  changed(current_);
  folder_unsynced_ = true;
  return {};
}

void Disk::end_segment() {
  if (!writer_) return;
  if (current_->live == 0) {
    remove(current_);
  } else {
    // Without a footer, for want of room, the next scan reads frame by frame: slower, no more.
    static_cast<void>(writer_->finish());
    bytes_ += writer_->size() - current_->size;
    current_->size = writer_->size();
    changed(current_);
  }
  writer_.reset();
  current_.reset();
}

/// Nothing here holds it any more, so its room is free once no read is under way.
void Disk::remove(const std::shared_ptr<Segment>& segment) {
  std::erase(unsynced_, segment);
  remove_file(segment->path);
  bytes_ -= segment->size;
  --segments_;
  segment->size = 0;
}

void Disk::remove_file(const std::filesystem::path& path) {
  std::error_code failed;
  std::filesystem::remove(path, failed);
  if (failed) not_given_up_ = Fault{cat({"removing ", path.string(), ": ", failed.message()})};
  folder_unsynced_ = true;
}

Result<std::shared_ptr<const DiskSpan>> Disk::put(const Span& span, ContractId contract,
                                                  const Body& body) {
  const std::int64_t used = bytes() + foreign_bytes_;
  if (const std::int64_t needed = at_most(body); used + needed > options_.disk_bytes) {
    const std::string others =
        foreign_.empty() ? "" : cat({" (", foreign_bytes_, " by other runs' segments there)"});
    return fault(
        cat({"trace folder ", options_.folder.string(), ": ", used,
             " bytes of store.disk = ", options_.disk_bytes, " are in use", others,
             ", a span needs ", needed, "; raise it", foreign_.empty() ? "" : " or remove those"}));
  }
  if (writer_ &&
      (current_->header.contract != contract || current_->size >= options_.segment_bytes)) {
    end_segment();
  }
  if (!writer_) {
    if (const Result<void> begun = begin_segment(contract); !begun) {
      return tl::unexpected(remedied(begun.error()));
    }
  }
  Result<StoredSpan> stored = writer_->append(span, body);
  if (!stored) return tl::unexpected(remedied(stored.error()));
  bytes_ += stored->bytes;
  current_->size += stored->bytes;
  ++current_->live;
  changed(current_);
  return std::make_shared<const DiskSpan>(DiskSpan{current_, std::move(*stored)});
}

std::int64_t Disk::forget(std::span<const std::shared_ptr<const DiskSpan>> spans) {
  for (const auto& span : spans) --span->segment->live;
  const std::int64_t before = bytes();
  for (const auto& span : spans) {
    const std::shared_ptr<Segment>& segment = span->segment;
    if (segment->live > 0) {
      // Should this fail, a later run finds the span again: stale, and opened anew by its id.
      const Result<void> marked = forget_span(*segment->file, span->stored);
      if (!marked) not_given_up_ = marked.error();
      changed(segment);
    } else if (current_ == segment) {
      end_segment();
    } else if (segment->size > 0) {
      remove(segment);
    }
  }
  return before - bytes();
}

Result<void> Disk::sync() {
  while (!unsynced_.empty()) {
    if (Result<void> synced = unsynced_.back()->file->sync(); !synced) return synced;
    unsynced_.pop_back();
  }
  try {
    if (std::exchange(folder_unsynced_, false)) sync_folder(options_.folder);
    if (!unsynced_parent_.empty()) sync_folder(std::exchange(unsynced_parent_, {}));
  } catch (const Error& error) {
    return fault(error.what());
  }
  if (const auto left = std::exchange(not_given_up_, std::nullopt)) return tl::unexpected(*left);
  return {};
}

}  // namespace lockstep::store
