#include "base/folder.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"
#include "base/folder_testing.h"

namespace lockstep {
namespace {

TEST(Folder, IsMadeWithThoseAboveIt) {
  const TestFolder test;
  EXPECT_TRUE(make_folder(test.path() / "a/b", "the folder", "name another"));
  EXPECT_FALSE(make_folder(test.path() / "a/b", "the folder", "name another"));
  EXPECT_FALSE(make_folder(test.path() / "a", "the folder", "name another"));
}

TEST(Folder, MayBeALinkToOne) {
  const TestFolder test;
  std::filesystem::create_directory(test.path() / "there");
  std::filesystem::create_symlink(test.path() / "there", test.path() / "link");
  EXPECT_FALSE(make_folder(test.path() / "link", "the folder", "name another"));
}

TEST(Folder, ThatCannotBeIsTheCallersFault) {
  const TestFolder test;
  std::ofstream(test.path() / "file") << "";
  for (const auto& folder : {test.path() / "file", test.path() / "file/below"}) {
    try {
      make_folder(folder, "the run's folder", "give it another name");
      ADD_FAILURE() << folder;
    } catch (const Usage& refused) {
      const std::string said = refused.what();
      EXPECT_TRUE(said.starts_with("the run's folder " + folder.string() + " cannot be made: "));
      EXPECT_TRUE(said.ends_with("; give it another name"));
    }
  }
}

}  // namespace
}  // namespace lockstep
