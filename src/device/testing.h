/// For tests: on which devices a body runs. One parameterised body serves the CPU and CUDA, and
/// where there is no CUDA device its rows are absent.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "device/memory.h"

namespace lockstep {

inline constexpr Device kFirstCuda{Device::Kind::kCuda, 0};

inline std::vector<Device> devices() {
  static const std::string why = why_unusable(kFirstCuda);
  if (why.empty()) return {Device{}, kFirstCuda};
  static const int told =
      std::fprintf(stderr, "tests on a CUDA device are left out: %s\n", why.c_str());
  (void)told;
  return {Device{}};
}

inline std::string name_of_device(const ::testing::TestParamInfo<Device>& info) {
  return info.param.kind == Device::Kind::kCpu ? "cpu" : "cuda";
}

}  // namespace lockstep
