/// Records as text.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "contract/site.h"
#include "numerics/row.h"

namespace lockstep::cli {

const char* site_name(Site site);              // "w13_in"
const char* encoding_name(Encoding encoding);  // as docs/formats/record.md spells them

/// A row's planes: a line for what the row is, then one a block: scale, then codes, bits or values.
/// Requires row.size() == layout.bytes().
std::string record_text(const RowLayout& layout, std::span<const std::byte> row);

}  // namespace lockstep::cli
