/// Folders for tests that write files.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace lockstep {

/// A new folder that no other test has, to be removed by whoever asked for it.
inline std::filesystem::path make_test_folder(
    const std::filesystem::path& under = std::filesystem::temp_directory_path()) {
  // Six X are where mkdtemp writes a name of its own.
  std::string name = (under / "lockstep_test_").string() + std::string(6, 'X');
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder can be made: " + name);
  return name;
}

/// Such a folder, gone with this.
class TestFolder {
 public:
  explicit TestFolder(const std::filesystem::path& under = std::filesystem::temp_directory_path())
      : path_(make_test_folder(under)) {}
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace lockstep
