#include "cli/lines_out.h"

#include <unistd.h>

#include "base/error.h"
#include "base/text.h"
#include "cli/columns.h"
#include "cli/interrupt.h"
#include "cli/verbs.h"

namespace lockstep::cli {

void check_output(const std::string& path, const char* option,
                  const std::vector<std::string>& inputs) {
  destination(path);
  for (const std::string& input : inputs) {
    std::error_code none;  // then they are not the same
    if (!input.empty() && std::filesystem::equivalent(path, input, none)) {
      throw Usage(cat({option, " is ", path, ", which is read as well; name another file"}));
    }
  }
}

LinesOut::LinesOut(const std::string& path) : path_(path) {
  if (path.empty()) return;
  to_ = destination(path_);
  if (!to_.in_place()) {
    to_.part = cat({to_.place.string(), ".", ::getpid(), ".part"});
    gone_.emplace(to_.part);
  }
  file_.open(to_.part, std::ios::binary | (to_.in_place() ? std::ios::app : std::ios::trunc));
  if (!file_) {
    throw Usage(
        cat({"--out: cannot write ", path, "; name a file in a folder that you may write"}));
  }
}

LinesOut::~LinesOut() {
  if (to_.in_place()) return;
  file_.close();
  std::error_code ignored;
  std::filesystem::remove(to_.part, ignored);
  gone_.reset();
}

void LinesOut::line(const std::string& text) {
  if (path_.empty()) return print(text + "\n");
  file_ << text << '\n';
  if (!file_) throw Error(cat({"--out: no room for ", path_.string(), "; nothing was left of it"}));
}

void LinesOut::commit() {
  if (path_.empty()) return;
  file_.close();
  if (!file_) throw Error(cat({"--out: no room for ", path_.string(), "; nothing was left of it"}));
  if (to_.in_place()) return;
  std::filesystem::rename(to_.part, to_.place);
  to_ = {};
  gone_.reset();
}

std::string LinesOut::where() const { return path_.empty() ? "" : " to " + path_.string(); }

}  // namespace lockstep::cli
