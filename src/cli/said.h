/// What a library threw, as this program says it.
#pragma once

#include <exception>
#include <string>

namespace lockstep::cli {

/// One line: what happened, and what to do. An Error says that itself and comes back as it is.
std::string said(const std::exception& failed);

}  // namespace lockstep::cli
