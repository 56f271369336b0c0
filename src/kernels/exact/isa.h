/// Which instructions a bit-exact op may use. A backend is a function with target attributes, never
/// a file with -m flags; all of them return the same bytes, so that the choice is one of speed.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace lockstep::kernels {

enum class Isa : std::uint8_t {
  kPortable,
  kAvx2,
  kAvx512,  // F, BW, DQ, VL and VNNI together
};

/// The best that this machine has. LOCKSTEP_ISA=portable|avx2|avx512 lowers it, for tests and for
/// measuring; a name that is none of these, or more than the machine has, throws Error.
Isa best_isa();

/// Whether this machine has it.
bool has_isa(Isa isa);

/// All of them, lowest first, for tests that compare backends.
inline constexpr std::initializer_list<Isa> kAllIsas = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

}  // namespace lockstep::kernels
