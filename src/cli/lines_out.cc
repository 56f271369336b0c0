#include "cli/lines_out.h"

#include <unistd.h>

#include "base/error.h"
#include "base/text.h"
#include "cli/columns.h"
#include "cli/interrupt.h"

namespace lockstep::cli {

LinesOut::LinesOut(const std::string& path) : path_(path) {
  if (path.empty()) return;
  if (std::filesystem::is_directory(path_)) {
    throw Error(cat({"--out is '", path, "', a folder; name a file"}));
  }
  std::error_code ignored;  // then the file cannot be opened
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), ignored);
  part_ = cat({path, ".", ::getpid(), ".part"});
  on_interrupt_remove(part_);
  file_.open(part_, std::ios::binary);
  if (!file_) {
    throw Error(cat({"--out: cannot write ", path, "; may you write its folder?"}));
  }
}

LinesOut::~LinesOut() {
  if (part_.empty()) return;
  file_.close();
  std::error_code ignored;
  std::filesystem::remove(part_, ignored);
  on_interrupt_remove("");
}

void LinesOut::line(const std::string& text) {
  if (part_.empty()) return print(text + "\n");
  file_ << text << '\n';
  if (!file_) throw Error(cat({"--out: no room for ", path_.string(), "; nothing was left of it"}));
}

void LinesOut::commit() {
  if (part_.empty()) return;
  file_.close();
  if (!file_) throw Error(cat({"--out: no room for ", path_.string(), "; nothing was left of it"}));
  std::filesystem::rename(part_, path_);
  part_.clear();
  on_interrupt_remove("");
}

std::string LinesOut::where() const { return path_.empty() ? "" : " to " + path_.string(); }

}  // namespace lockstep::cli
