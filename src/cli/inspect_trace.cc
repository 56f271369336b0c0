#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "cli/columns.h"
#include "cli/inspect.h"
#include "cli/record_text.h"
#include "recipe/preflight.h"
#include "store/segment.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using recipe::bytes_text;
using Rows = std::vector<std::vector<std::string>>;

constexpr std::size_t kSpansShown = 8;

struct OpenSegment {
  fs::path path;
  std::shared_ptr<store::File> file;
  store::SegmentHeader header;
  store::Scan scan;
  std::int64_t size = 0;
};

/// All that a trace has, and what is wrong with it.
struct Trace {
  std::vector<OpenSegment> segments;
  std::vector<std::string> foreign;  // files that are no segments, and why
  store::Damage damage;
};

void open_segment(const fs::path& path, Trace& trace) {
  auto file = std::make_shared<store::File>(value_or_throw(store::File::open_to_read(path)));
  const Result<store::SegmentHeader> header = store::read_header(*file);
  if (!header) {
    trace.foreign.push_back(header.error().message);
    return;
  }
  trace.segments.push_back({.path = path,
                            .file = file,
                            .header = *header,
                            .scan = value_or_throw(store::scan_segment(*file, trace.damage)),
                            .size = value_or_throw(file->size())});
}

Trace open_trace(const fs::path& path) {
  Trace trace;
  if (!fs::is_directory(path)) {
    open_segment(path, trace);
    if (trace.segments.empty()) throw Error(trace.foreign.front());
    return trace;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".segment") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) open_segment(file, trace);
  return trace;
}

std::string span_text(const Span& span) {
  const std::uint64_t id = span.id.value;
  const auto sample = static_cast<std::int64_t>(id >> 6 & 0x3fff) - 1;
  return cat(
      {hex(id), "  prompt ", id >> 20 & 0xfffffff,
       sample < 0 ? std::string(" (shared)") : cat({" sample ", sample, " turn ", id & 0x3f}),
       ", rank ", id >> 48, ", positions ", span.first, " to ", span.first + span.count - 1,
       ", weights ", span.version.value});
}

std::string place_text(Place place) { return cat({place.layer.value, ".", site_name(place.site)}); }

struct PlaceSum {
  std::int64_t row_bytes = 0, rows = 0, blocks = 0, damaged = 0;
};
using PlaceKey = std::tuple<Site, Encoding, Layer, std::int32_t>;
using PlaceSums = std::map<PlaceKey, PlaceSum>;

/// Rows by place. Every block is read and compared with its checksum.
PlaceSums count_places(const Trace& trace) {
  PlaceSums sums;
  for (const OpenSegment& segment : trace.segments) {
    for (const store::StoredSpan& stored : segment.scan.spans) {
      for (const store::BlockRef& ref : stored.blocks) {
        PlaceSum& sum =
            sums[{ref.place.site, ref.layout.encoding, ref.place.layer, ref.layout.bytes()}];
        const bool good = store::read_block(*segment.file, stored.span.id, ref).has_value();
        sum.row_bytes = ref.layout.bytes();
        sum.rows += good ? ref.rows : 0;
        sum.blocks += 1;
        sum.damaged += good ? 0 : 1;
      }
    }
  }
  return sums;
}

std::int64_t damaged_blocks(const PlaceSums& sums) {
  std::int64_t damaged = 0;
  for (const auto& [key, sum] : sums) damaged += sum.damaged;
  return damaged;
}

std::string place_table(const PlaceSums& sums, std::int64_t tokens) {
  Rows rows = {{"place", "encoding", "bytes a row", "rows", "bytes", "damaged blocks"}};
  std::int64_t bytes = 0, blocks = 0;
  const std::int64_t damaged = damaged_blocks(sums);
  for (const auto& [key, sum] : sums) {
    const auto& [site, encoding, layer, width] = key;
    bytes += sum.row_bytes * sum.rows;
    blocks += sum.blocks;
    rows.push_back({place_text({layer, site}), encoding_name(encoding), cat({sum.row_bytes}),
                    cat({sum.rows}), bytes_text(sum.row_bytes * sum.rows),
                    sum.damaged == 0 ? "" : cat({sum.damaged})});
  }
  std::string text = columns(rows);
  if (tokens > 0) {
    const double each = static_cast<double>(bytes) / static_cast<double>(tokens);
    text += cat({"rows take ", fixed(each, 1), " bytes a token; ", damaged, " of ",
                 counted(static_cast<std::size_t>(blocks), "block"), damaged == 1 ? " is" : " are",
                 " damaged\n"});
  }
  return text;
}

const char* const kNoSegments =
    "no segments: records leave memory only where store.ram is too small for them; "
    "./lockstep rollout --trace FOLDER writes those of its answers";

/// All spans by prompt, sample and turn; they lie in the order in which they were sealed.
std::vector<Span> spans_of(const Trace& trace) {
  std::vector<Span> spans;
  for (const OpenSegment& segment : trace.segments) {
    for (const store::StoredSpan& stored : segment.scan.spans) spans.push_back(stored.span);
  }
  std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::pair(a.id.value, a.version.value) < std::pair(b.id.value, b.version.value);
  });
  return spans;
}

std::string summary(const fs::path& path, const Trace& trace, const PlaceSums& sums) {
  if (trace.segments.empty() && trace.foreign.empty()) {
    return cat({path.string(), ": ", kNoSegments, "\n"});
  }
  std::int64_t spans = 0, tokens = 0, bytes = 0;
  Rows rows = {{"segment", "contract", "run", "spans", "bytes", ""}};
  for (const OpenSegment& s : trace.segments) {
    spans += std::ssize(s.scan.spans);
    bytes += s.size;
    for (const store::StoredSpan& stored : s.scan.spans) tokens += stored.span.count;
    rows.push_back({s.path.filename().string(), hex(s.header.contract.value), cat({s.header.run}),
                    cat({s.scan.spans.size()}), bytes_text(s.size),
                    s.scan.finished ? "ended" : "not ended"});
  }
  const auto number = [](std::int64_t n, const char* what) {
    return counted(static_cast<std::size_t>(n), what);
  };
  std::string text =
      cat({path.string(), ": ", counted(trace.segments.size(), "segment"), ", ",
           number(spans, "span"), " of ", number(tokens, "token"), ", ", bytes_text(bytes), "\n"}) +
      columns(rows) + "\n" + place_table(sums, tokens);
  for (const std::string& line : trace.foreign) text += "left alone: " + line + "\n";
  if (trace.damage.bytes > 0) text += cat({"damaged: ", trace.damage.bytes, " bytes dropped\n"});
  for (const std::string& line : trace.damage.lines) text += "  " + line + "\n";
  text += "\n";
  const std::vector<Span> in_order = spans_of(trace);
  for (std::size_t i = 0; i < std::min(in_order.size(), kSpansShown); ++i) {
    text += span_text(in_order[i]) + "\n";
  }
  if (in_order.size() > kSpansShown) {
    text += cat({"... and ", counted(in_order.size() - kSpansShown, "more span"), "\n"});
  }
  return text;
}

/// What --span says: an id, or PROMPT[:SAMPLE[:TURN]], without a sample the shared span.
struct Wanted {
  std::optional<std::uint64_t> id;
  std::int64_t numbers[3] = {0, -1, 0};
};

Wanted parse_span(const std::string& text) {
  Wanted wanted;
  const char* at = text.data();
  const char* const end = at + text.size();
  if (text.size() == 16 || text.starts_with("0x")) {
    std::uint64_t id = 0;
    if (text.starts_with("0x")) at += 2;
    if (const auto [stop, error] = std::from_chars(at, end, id, 16);
        stop == end && error == std::errc()) {
      wanted.id = id;
      return wanted;
    }
  }
  at = text.data();
  for (std::int64_t& number : wanted.numbers) {
    const auto [stop, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0) break;
    if (stop == end) return wanted;
    if (*stop != ':') break;
    at = stop + 1;
  }
  throw Usage(cat({"--span is '", text,
                   "'; write its id, 16 hexadecimal digits, or PROMPT, PROMPT:SAMPLE or "
                   "PROMPT:SAMPLE:TURN"}));
}

bool matches(const Wanted& wanted, SpanId id) {
  if (wanted.id) return id.value == *wanted.id;
  const SpanId of = span_id(0, PromptId{wanted.numbers[0]}, static_cast<int>(wanted.numbers[1]),
                            static_cast<int>(wanted.numbers[2]));
  return (id.value & 0xffffffffffff) == of.value;
}

/// The row of a position in a block, nothing where it has none.
std::span<const std::byte> row_at(const store::Block& block, std::int32_t row_bytes,
                                  std::int32_t position) {
  for (const store::Run& run : block.runs) {
    if (position < run.position || position >= run.position + run.count) continue;
    const std::byte* row =
        block.rows + store::row_offset(run.row + position - run.position, row_bytes);
    return {row, static_cast<std::size_t>(row_bytes)};
  }
  return {};
}

/// The manifest of one span, and the rows of a place where one is asked for.
std::string span_lines(const OpenSegment& segment, const store::StoredSpan& stored,
                       const InspectArgs& args) {
  std::string text =
      span_text(stored.span) + cat({"\n  in ", segment.path.filename().string(), ", contract ",
                                    hex(segment.header.contract.value), ", prefix hash ",
                                    hex(stored.span.prefix_hash), ", ", stored.bytes, " bytes\n"});
  if (args.place.empty()) {
    Rows rows = {{"  place", "encoding", "positions", "rows", "bytes", ""}};
    for (const store::BlockRef& ref : stored.blocks) {
      const bool good = store::read_block(*segment.file, stored.span.id, ref).has_value();
      rows.push_back({"  " + place_text(ref.place), encoding_name(ref.layout.encoding),
                      cat({ref.first, " to ", ref.end - 1}), cat({ref.rows}), cat({ref.length}),
                      good ? "" : "damaged"});
    }
    return text + columns(rows);
  }
  const Place place = parse_place(args.place);
  const std::int32_t position = args.position >= 0 ? args.position : stored.span.first;
  bool found = false;
  for (const store::BlockRef& ref : stored.blocks) {
    if (ref.place != place || position < ref.first || position >= ref.end) continue;
    const auto block = store::read_block(*segment.file, stored.span.id, ref);
    if (!block) {
      throw Error(cat({segment.path.string(), ": the block of ", args.place, " at byte ",
                       ref.offset, " is damaged; its rows are absent"}));
    }
    const std::span<const std::byte> row = row_at(*block, ref.layout.bytes(), position);
    if (row.empty()) continue;
    found = true;
    text += cat({"position ", position, ", ", args.place, ", "}) + record_text(ref.layout, row);
  }
  if (!found) {
    throw Usage(cat({"span ", hex(stored.span.id.value), " has no row of ", args.place,
                     " at position ", position, "; it covers ", stored.span.first, " to ",
                     stored.span.first + stored.span.count - 1,
                     ", and without --place its places are listed"}));
  }
  return text;
}

}  // namespace

Place parse_place(const std::string& text) {
  std::int32_t layer = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, layer);
  if (error == std::errc() && stop != end && *stop == '.') {
    for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV, Site::kRouter}) {
      if (std::string_view(stop + 1, end) == site_name(site)) return {Layer{layer}, site};
    }
  }
  throw Usage(cat({"--place is '", text,
                   "'; write LAYER.SITE, as 3.w13_in; the sites are w13_in, w2_in, k, v, router"}));
}

namespace {

/// What is left has been told; that something is missing is an error all the same.
void require_whole(const fs::path& path, const Trace& trace, const PlaceSums& sums) {
  const std::int64_t blocks = damaged_blocks(sums);
  if (blocks == 0 && trace.damage.bytes == 0 && trace.foreign.empty()) return;
  std::string what;
  const auto add = [&](const std::string& part) { what += (what.empty() ? "" : ", ") + part; };
  if (blocks > 0) add(counted(static_cast<std::size_t>(blocks), "damaged block"));
  if (trace.damage.bytes > 0) add(cat({trace.damage.bytes, " damaged bytes"}));
  if (!trace.foreign.empty()) {
    add(counted(trace.foreign.size(), "file") + " that begin as no segment does");
  }
  throw Error(cat({path.string(), " has ", what,
                   "; their rows are absent, the rest is whole: take the folder from where it was "
                   "written, or train without them"}));
}

}  // namespace

void inspect_trace(const fs::path& path, const InspectArgs& args) {
  const Trace trace = open_trace(path);
  if (args.span.empty()) {
    const PlaceSums sums = count_places(trace);
    print(summary(path, trace, sums));
    return require_whole(path, trace, sums);
  }
  const Wanted wanted = parse_span(args.span);
  if (trace.segments.empty()) {  // a file that was one says why it is none
    if (trace.foreign.empty()) throw Usage(cat({path.string(), " has ", kNoSegments}));
    throw Error(trace.foreign.front());
  }
  std::string text;
  for (const OpenSegment& segment : trace.segments) {
    for (const store::StoredSpan& stored : segment.scan.spans) {
      if (matches(wanted, stored.span.id)) text += span_lines(segment, stored, args);
    }
  }
  if (text.empty()) {
    if (trace.damage.bytes > 0) {
      throw Error(cat({path.string(), " has no span ", args.span, ", or it is damaged: ",
                       trace.damage.lines.front(), "; without --span what is left is listed"}));
    }
    throw Usage(cat({path.string(), " has no span ", args.span,
                     "; without --span its first spans are listed"}));
  }
  print(text);
}

}  // namespace lockstep::cli
