"""What nvcc made of the kernels, read from the objects of the build; no GPU is needed.

Three things compile without a word and cost everything: a table at namespace scope that device code
indexes at run time becomes a trap or an empty kernel, and an array indexed at run time, or too many
registers, go to local memory.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build"))

# Kernels that may use local memory: references that know every rule, and guided rounding of rows so
# long that some of a thread's eight chunks have no register.
COLD = re.compile(r"general_kernel|_bands_kernel|guide_narrow_kernel\w*Li8E")
# Kernels known to keep a little there, and how many bytes: more is a fault.
SPILLS = {r"w4a4_kernel": 64, r"write_kv_kernel": 64, r"attention_kernel": 48}
# By wgmma: for other chips there is nothing of it, and its host side refuses them or has another.
HOPPER = re.compile(r"grouped_(product|sums)_kernel|\dlinear_kernel")
WRITES = re.compile(r"\b(STG|ST\.E|ST |RED|REDG|ATOM|ATOMG|UTMASTG|UTMAREDG|UBLKRED|UBLKCP)\b")


def cuobjdump():
    """The toolkit's, or the one that torch's Triton brings."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found:
        return found
    for base in sys.path:
        path = pathlib.Path(base) / "triton/backends/nvidia/bin/cuobjdump"
        if path.exists():
            return str(path)
    return None


TOOL = cuobjdump()


def run(*arguments):
    return subprocess.run(arguments, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True).stdout


def faults(binary):
    """One line a fault of the kernels in an object or a cubin."""
    found = []
    usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)",
                       run(TOOL, "-res-usage", str(binary)))
    for name, stack, local in usage:
        most = max((most for known, most in SPILLS.items() if re.search(known, name)), default=0)
        if (int(stack) > most or int(local)) and not COLD.search(name):
            found.append(f"{name}: {stack} bytes of stack, {local} of local memory")
    for part in re.split(r"(?=code for sm_)|Function : ", run(TOOL, "-sass", str(binary))):
        if part.startswith("code for "):
            arch = part.split()[2]
        name = part.split()[0] if part.split() else ""
        if "_kernel" not in name or (HOPPER.search(name) and arch != "sm_90"):
            continue
        if "BPT.TRAP" in part:
            found.append(f"{name}: traps; does it index a table at namespace scope?")
        if not WRITES.search(part):
            found.append(f"{name}: writes nothing; does it index a table at namespace scope?")
    return found


@pytest.mark.skipif(TOOL is None, reason="there is no cuobjdump")
def test_kernels_are_whole_and_stay_in_registers():
    objects = sorted(BUILD.glob("CMakeFiles/*.dir/src/**/*_cuda.cu.o"))
    if not objects:
        pytest.skip("the build has no CUDA backend")
    found = [f"{path.name}: {fault}" for path in objects for fault in faults(path)]
    assert not found, "\n" + "\n".join(found)


TRAP = """
struct Table { int at[8]; };
inline constexpr Table kTable = {{3, 1, 4, 1, 5, 9, 2, 6}};
constexpr int look(int i) { return kTable.at[i]; }
__global__ void table_kernel(int* out, const int* in) { out[threadIdx.x] = look(in[threadIdx.x]); }
__global__ void local_kernel(int* out, const int* in) {
  int held[64];
  for (int i = 0; i < 64; ++i) held[i] = i;
  for (int i = 0; i < 64; ++i) held[in[i] & 63] += in[i];
  out[threadIdx.x] = held[in[threadIdx.x] & 63];
}
__global__ void sound_kernel(int* out, const int* in) { out[threadIdx.x] = in[threadIdx.x] + 1; }
"""


@pytest.mark.skipif(TOOL is None, reason="there is no cuobjdump")
def test_the_faults_that_it_looks_for_are_seen(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    source = tmp_path / "trap.cu"
    source.write_text(TRAP)
    cubin = tmp_path / "trap.cubin"
    run(nvcc, "-std=c++20", "--expt-relaxed-constexpr", "-cubin",
        "-gencode=arch=compute_90a,code=sm_90a", "-o", str(cubin), str(source))
    found = "\n".join(faults(cubin))
    assert "table_kernel" in found
    assert "local_kernel" in found
    assert "sound_kernel" not in found
