#include "rollout/upload.h"

#include <cstring>

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kPartAlignment = 64;

}  // namespace

Upload::Upload(Workplace& at) : at_(&at), room_(at), sent_(at.device) {}

void Upload::send() {
  if (!at_->on_cuda()) return;
  std::int64_t bytes = 0;
  for (Part& part : parts_) {
    part.offset = bytes;
    bytes += (part.bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  }
  sent_.wait();  // what was sent last has left the pinned memory long ago
  if (pinned_.bytes() < bytes) pinned_ = PinnedBuffer(with_headroom(bytes), at_->device);
  for (const Part& part : parts_) {
    if (part.bytes == 0) continue;
    std::memcpy(pinned_.as<>() + part.offset, part.from, static_cast<std::size_t>(part.bytes));
  }
  there_ = static_cast<const std::byte*>(room_.take(bytes));
  copy_bytes(const_cast<std::byte*>(there_), at_->device, pinned_.as<void>(), {}, bytes,
             at_->stream);
  sent_.record(at_->stream);
}

}  // namespace lockstep::rollout
