// A chat template from anybody: it renders, or is refused with one line.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "data/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace lockstep;
  const std::string_view text(reinterpret_cast<const char*>(bytes), size);
  const auto parsed = data::ChatTemplate::parse(text, "fuzz");
  if (!parsed) return 0;
  try {
    const std::vector<data::Message> messages = {
        {"system", "s"}, {"user", "u"}, {"assistant", "<think>\na</think>b"}, {"user", "\xC3\xA9"}};
    (void)parsed->render(messages);
  } catch (const Error&) {
  }
  return 0;
}
