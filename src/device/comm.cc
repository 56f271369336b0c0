#include "device/comm.h"

namespace lockstep {
namespace {

class Single final : public Comm {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void sum(std::span<double>) override {}
  void max(std::span<double>) override {}
};

}  // namespace

std::unique_ptr<Comm> Comm::single() { return std::make_unique<Single>(); }

}  // namespace lockstep
