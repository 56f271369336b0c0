/// For .cu files alone: which lanes of a warp arrive at a barrier in shared memory for it.
///
/// One of them is enough: behind __syncwarp() its arrival stands for what all lanes have read and
/// written. The racecheck of compute-sanitizer does not follow that, it takes an arrival for the
/// lane's own alone; a build with LOCKSTEP_RACECHECK lets every lane arrive.
#pragma once

namespace lockstep::cuda {

#ifdef LOCKSTEP_RACECHECK
inline constexpr int kArrivals = 32;  // of a warp
#else
inline constexpr int kArrivals = 1;
#endif

__device__ inline bool arrives(int lane) { return lane < kArrivals; }

}  // namespace lockstep::cuda
