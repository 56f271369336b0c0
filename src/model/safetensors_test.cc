#include "model/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>

#include "base/bytes.h"
#include "model/json.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

fs::path temporary(const char* name) { return fs::path(testing::TempDir()) / name; }

std::vector<std::byte> file_of(std::string_view header, std::size_t data_bytes,
                               std::uint64_t length) {
  std::vector<std::byte> file;
  put_le(file, length);
  for (char c : header) file.push_back(static_cast<std::byte>(c));
  file.resize(file.size() + data_bytes);
  return file;
}

std::vector<std::byte> file_of(std::string_view header, std::size_t data_bytes) {
  return file_of(header, data_bytes, header.size());
}

/// Refused, in one line that names the file and `named`.
void expect_refused(const std::vector<std::byte>& file, std::string_view named) {
  const auto header = parse_safetensors(file, "x.safetensors");
  ASSERT_FALSE(header) << named;
  const std::string& message = header.error().message;
  EXPECT_TRUE(message.starts_with("x.safetensors: ")) << message;
  EXPECT_NE(message.find(named), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

TEST(Safetensors, WritesAndReadsByName) {
  const fs::path path = temporary("safetensors_test.safetensors");
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<std::uint16_t> b = {0x3F80, 0x4000};
  SafetensorsWriter writer(path,
                           {{.name = "a \"quoted\"", .dtype = Dtype::kF32, .shape = {2, 3}},
                            {.name = "b", .dtype = Dtype::kBf16, .shape = {2}},
                            {.name = "empty", .dtype = Dtype::kF32, .shape = {0, 4}},
                            {.name = "scalar", .dtype = Dtype::kF32, .shape = {}}},
                           {{"step", "7"}});
  writer.write("b", std::as_bytes(std::span(b)));
  writer.write("a \"quoted\"", std::as_bytes(std::span(a)));
  EXPECT_THROW(writer.write("b", std::as_bytes(std::span(b))), Error);
  EXPECT_THROW(writer.write("scalar", std::as_bytes(std::span(a))), Error);
  EXPECT_THROW(writer.commit(), Error);
  writer.write("empty", {});
  writer.write("scalar", std::as_bytes(std::span(a).first(1)));
  EXPECT_FALSE(fs::exists(path));
  writer.commit();

  const auto file = Safetensors::open(path);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->metadata().at("step"), "7");
  ASSERT_EQ(file->tensors().size(), 4u);
  const TensorInfo* info = file->find("a \"quoted\"");
  ASSERT_TRUE(info);
  EXPECT_EQ(info->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(info->first % 8, 0u);
  const auto bytes = file->bytes(*info);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), std::as_bytes(std::span(a)).begin()));
  EXPECT_EQ(file->find("c"), nullptr);
  fs::remove(path);
}

TEST(Safetensors, WithoutCommitNothingIsLeft) {
  const fs::path path = temporary("safetensors_test_dropped");
  { SafetensorsWriter writer(path, {{.name = "a", .dtype = Dtype::kF32, .shape = {8}}}); }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_FALSE(fs::exists(path.string() + ".part"));
}

TEST(Safetensors, NoRoomIsOneLineAndNothingIsLeft) {
  // A limit on file size stands for a full disk: both refuse the room that is asked for.
  const fs::path path = temporary("safetensors_test_full");
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 1 << 16, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    SafetensorsWriter writer(path, {{.name = "a", .dtype = Dtype::kF32, .shape = {1 << 20}}});
  } catch (const Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(message.find("no room for 419"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(path.string() + ".part"));
}

TEST(Safetensors, AHeaderLongerThanTheFileIsRefused) {
  expect_refused({}, "0 bytes");
  expect_refused(std::vector<std::byte>(7), "7 bytes");
  expect_refused(file_of("{}", 0, std::uint64_t{1} << 63), "9223372036854775808");
  expect_refused(file_of("{}", 0, ~std::uint64_t{0}), "18446744073709551615");
  expect_refused(file_of("{}", 0, 3), "3 bytes");
  EXPECT_TRUE(parse_safetensors(file_of("{}", 0), "x"));
}

TEST(Safetensors, ATruncatedFileNamesTheTensor) {
  const std::string header = R"({"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})";
  EXPECT_TRUE(parse_safetensors(file_of(header, 16), "x"));
  expect_refused(file_of(header, 15), "truncated: tensor w");
  expect_refused(file_of(header, 17), "behind the last tensor");
}

TEST(Safetensors, EveryOffsetShapeAndDtypeIsChecked) {
  const auto with = [](std::string_view entry) {
    return file_of("{\"w\":" + std::string(entry) + "}", 16);
  };
  expect_refused(with(R"({"dtype":"F32","shape":[4],"data_offsets":[0,15]})"), "tensor w");
  expect_refused(with(R"({"dtype":"F32","shape":[5],"data_offsets":[0,16]})"), "tensor w");
  expect_refused(with(R"({"dtype":"F32","shape":[4],"data_offsets":[16,0]})"), "tensor w");
  expect_refused(with(R"({"dtype":"F32","shape":[-4],"data_offsets":[0,16]})"), "shape");
  expect_refused(with(R"({"dtype":"F32","shape":[4.0],"data_offsets":[0,16]})"), "shape");
  expect_refused(with(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]})"),
                 "tensor w");
  expect_refused(with(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,16]})"),
                 "shape");
  expect_refused(with(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,16]})"),
                 "shape");
  expect_refused(with(R"({"dtype":"F4","shape":[4],"data_offsets":[0,16]})"), "F4");
  expect_refused(with(R"({"dtype":7,"shape":[4],"data_offsets":[0,16]})"), "dtype");
  expect_refused(with(R"({"dtype":"F32","shape":[4],"data_offsets":[0]})"), "data_offsets");
  expect_refused(with(R"({"dtype":"F32","shape":[4],"data_offsets":[0,-16]})"), "data_offsets");
  expect_refused(with(R"({"dtype":"F32","shape":[4]})"), "data_offsets");
  expect_refused(with(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16],"more":1})"), "no more");
  expect_refused(with(R"([])"), "tensor w");
  expect_refused(file_of(R"({"__metadata__":{"a":1}})", 0), "__metadata__");
  expect_refused(file_of("[]", 0), "object");
  expect_refused(file_of("{", 0), "not JSON");
  expect_refused(file_of(std::string(2000, '['), 0), "nested");
}

TEST(Safetensors, OverlapsGapsAndNamesThatStandTwiceAreRefused) {
  const auto two = [](const char* first, const char* second) {
    return file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":)" + std::string(first) +
                       R"(},"b":{"dtype":"U8","shape":[8],"data_offsets":)" + second + "}}",
                   16);
  };
  EXPECT_TRUE(parse_safetensors(two("[8,16]", "[0,8]"), "x"));
  expect_refused(two("[0,8]", "[0,8]"), "overlap");
  expect_refused(two("[0,8]", "[4,12]"), "overlap");
  expect_refused(file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})", 16),
                 "belong to no tensor");
  expect_refused(file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                         R"("a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
                         8),
                 "twice");
}

/// The bytes of the lines that hold nothing but bytes in hexadecimal.
std::vector<std::byte> example_in(const char* document) {
  std::ifstream in(document);
  std::vector<std::byte> bytes;
  for (std::string line; std::getline(in, line);) {
    const bool hex = line.size() > 6 && line.starts_with("    ") &&
                     line.find_first_not_of("0123456789abcdef ") == std::string::npos;
    for (std::size_t i = 4; hex && i + 1 < line.size(); i += 3) {
      bytes.push_back(static_cast<std::byte>(std::stoi(line.substr(i, 2), nullptr, 16)));
    }
  }
  return bytes;
}

TEST(Safetensors, TheDocumentsExampleReadsAndIsWhatWeWrite) {
  if (!fs::exists("docs/formats/checkpoint.md")) GTEST_SKIP() << "runs from the source folder";
  const std::vector<std::byte> example = example_in("docs/formats/checkpoint.md");
  const auto header = parse_safetensors(example, "example");
  ASSERT_TRUE(header) << header.error().message;
  ASSERT_EQ(header->tensors.size(), 1u);
  EXPECT_EQ(header->tensors[0].name, "model.norm.weight");

  const fs::path path = temporary("safetensors_test_example");
  SafetensorsWriter writer(path,
                           {{.name = "model.norm.weight", .dtype = Dtype::kBf16, .shape = {4}}},
                           {{"format", "pt"}});
  const std::vector<std::uint16_t> values = {0x3F80, 0xBF80, 0x4000, 0x3E80};
  writer.write("model.norm.weight", std::as_bytes(std::span(values)));
  writer.commit();
  const auto written = value_or_throw(MappedFile::open(path));
  EXPECT_TRUE(
      std::equal(written.bytes().begin(), written.bytes().end(), example.begin(), example.end()));
  fs::remove(path);
}

TEST(Safetensors, APipeIsNotWaitedFor) {
  const fs::path pipe = fs::path(testing::TempDir()) / "safetensors_pipe";
  fs::remove(pipe);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_FALSE(Safetensors::open(pipe));
}

TEST(Destination, ALinkStaysOneAndWhatIsNoFileIsWrittenAsItIs) {
  const fs::path folder = fs::path(testing::TempDir()) / "destination_test";
  fs::remove_all(folder);
  write_text(folder / "new/file", "one");  // makes its folder
  fs::create_symlink(folder / "new/file", folder / "link");
  write_text(folder / "link", "two");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(value_or_throw(read_text(folder / "new/file")), "two");
  EXPECT_FALSE(fs::exists(folder / "new/file.part"));

  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(destination(folder / "pipe").in_place());
  EXPECT_TRUE(destination("/dev/null").in_place());
  EXPECT_TRUE(destination("/dev/stdout").in_place());
  EXPECT_THROW(FileInMaking(folder / "pipe", 8), Error);

  EXPECT_THROW(destination(folder), Error);
  EXPECT_THROW(destination(folder / "new/file/below"), Error);
  fs::create_symlink("loop", folder / "loop");
  EXPECT_THROW(destination(folder / "loop"), Error);
  EXPECT_TRUE(fs::is_symlink(folder / "loop"));
  fs::remove_all(folder);
}

TEST(Safetensors, AMissingFileAndAFolderAreNamed) {
  EXPECT_FALSE(Safetensors::open("/no/such/file"));
  EXPECT_FALSE(Safetensors::open("/tmp"));
}

}  // namespace
}  // namespace lockstep
