#include "base/folder.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep {

bool make_folder(const std::filesystem::path& folder, std::string_view what,
                 std::string_view remedy) {
  std::error_code error;
  const bool is_new = std::filesystem::create_directories(folder, error);
  if (!error) return is_new;
  if (std::filesystem::is_directory(folder)) return false;  // through a link
  const std::string said =
      cat({what, " ", folder.string(), " cannot be made: ", error.message(), "; ", remedy});
  if (error == std::errc::no_space_on_device || error == std::errc::read_only_file_system) {
    throw Error(said);
  }
  throw Usage(said);
}

}  // namespace lockstep
