// What a GPU without memory says, and the remedy that helps where it is the limit that is met, and
// where it is the device that is full.
#include "cli/said.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "base/text.h"
#include "cli/session.h"

namespace lockstep::cli {
namespace {

std::string out_of_memory(const std::string& tried, const std::string& free,
                          const std::string& allowed) {
  return said(std::runtime_error(
      cat({"CUDA out of memory. Tried to allocate ", tried,
           ". GPU 0 has a total capacity of 139.80 GiB of which ", free,
           " is free. Including non-PyTorch memory, this process has 70.00 GiB memory in use. ",
           allowed, "Of the allocated memory 9.00 GiB is allocated by PyTorch.\nfurther lines"})));
}

bool has(const std::string& line, const char* words) {
  return line.find(words) != std::string::npos;
}

TEST(Said, ALimitIsRaisedWhereItIsWhatWasMet) {
  for (const char* tried : {"2.00 GiB", "20.00 MiB", "512.00 KiB", "512 bytes"}) {
    const std::string line = out_of_memory(tried, "60.00 GiB", "4.00 GiB allowed; ");
    EXPECT_TRUE(has(line, "; raise trainer.memory, ")) << line;
    EXPECT_FALSE(has(line, "rollout.cache")) << line;
    EXPECT_EQ(line.find('\n'), std::string::npos);
  }
}

TEST(Said, ALimitIsNotRaisedWhereTheDeviceIsFull) {
  for (const char* free : {"1.99 GiB", "300.00 MiB", "4.00 KiB", "0 bytes"}) {
    const std::string line = out_of_memory("2.00 GiB", free, "40.00 GiB allowed; ");
    EXPECT_FALSE(has(line, "raise trainer.memory")) << line;
    EXPECT_TRUE(has(line, "give other processes on the device less")) << line;
  }
}

TEST(Said, WithoutALimitOneIsNamedForWhichPagesMakeRoom) {
  const std::string line = out_of_memory("2.00 GiB", "1.00 GiB", "");
  EXPECT_TRUE(has(line, "; set trainer.memory to what training takes")) << line;
  EXPECT_TRUE(has(line, "lower trainer.tokens_per_pass")) << line;
  EXPECT_FALSE(has(line, "raise trainer.memory")) << line;
}

TEST(Memory, OfRowsThatAreKeptIsAskedFor) {
  std::vector<Trajectory> batch(2);
  batch[0].tokens = {1, 2};
  batch[1].tokens = {3};
  EXPECT_NO_THROW(require_memory_of_rows(batch, 1, "take less"));
  try {
    require_memory_of_rows(batch, std::int64_t{1} << 50, "take less");
    FAIL() << "3 PiB";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.rfind("the rows of 3 tokens take 3072 TiB, and this machine has ", 0), 0u)
        << what;
    EXPECT_NE(what.find(" of memory free; take less"), std::string::npos) << what;
  }
}

}  // namespace
}  // namespace lockstep::cli
