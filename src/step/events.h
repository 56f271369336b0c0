#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/metrics.h"

namespace lockstep::step {

/// A TensorBoard event file: TFRecord frames around Event messages, written by hand. Readers drop
/// what earlier files of the folder say of steps from `first_step` on, so a resumed run overwrites.
/// Best effort: a disk that takes no events does not stop a run.
class EventFile {
 public:
  EventFile(const std::filesystem::path& folder, std::int64_t first_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  /// One scalar a metric.
  void append(std::int64_t step, const Metrics& metrics);

 private:
  void write(const std::string& event);
  int file_ = -1;
};

}  // namespace lockstep::step
