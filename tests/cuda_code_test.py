"""What nvcc made of the kernels, read from the objects of the build; no GPU is needed.

Three things compile without a word and cost everything: a table at namespace scope that device code
indexes at run time becomes a trap or an empty kernel, and an array indexed at run time, or too many
registers, go to local memory.
"""
import bisect
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

import pytest

BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build"))

# Kernels that may use local memory: references that know every rule, and guided rounding of rows so
# long that some of a thread's eight chunks have no register.
COLD = re.compile(r"general_kernel|_bands_kernel|guide_narrow_kernel\w*Li8E")
# Kernels known to keep a little there, and how many bytes: more is a fault.
SPILLS = {r"w4a4_kernel": 64, r"write_kv_kernel": 64, r"attention_kernel": 48,
          r"w4a16_hopper_kernel": 8}
# By wgmma: for other chips there is nothing of it, and its host side refuses them or has another.
HOPPER = re.compile(r"grouped_(product|sums)_kernel|\d(linear|route|w4a16_hopper)_kernel")
WRITES = re.compile(r"\b(STG|ST\.E|ST |RED|REDG|ATOM|ATOMG|UTMASTG|UTMAREDG|UBLKRED|UBLKCP)\b")


def tool(name):
    """The toolkit's, or the one that torch's Triton brings."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found:
        return found
    for base in sys.path:
        path = pathlib.Path(base) / "triton/backends/nvidia/bin" / name
        if path.exists():
            return str(path)
    return None


OBJECTS, CODE = tool("cuobjdump"), tool("nvdisasm")
needs_tools = pytest.mark.skipif(None in (OBJECTS, CODE), reason="there is no cuobjdump or nvdisasm")


def run(*arguments, **kwargs):
    return subprocess.run(list(map(str, arguments)), check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, **kwargs).stdout.decode("ascii", "replace")


def kernels_in(cubin):
    """The name and the machine code of each kernel of a cubin, which is a 64-bit ELF file."""
    sections, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    table = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    for name, _, _, _, offset, length in table:
        begin = table[names][4] + name
        name = cubin[begin:cubin.index(b"\0", begin)].decode()
        if name.startswith(".text.") and "_kernel" in name:
            yield name.removeprefix(".text."), cubin[offset:offset + length]


def memory_faults(binary):
    """One line a kernel of an object that keeps something in local memory."""
    usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)",
                       run(OBJECTS, "-res-usage", binary))
    for name, stack, local in usage:
        most = max((most for known, most in SPILLS.items() if re.search(known, name)), default=0)
        if (int(stack) > most or int(local)) and not COLD.search(name):
            yield f"{name}: {stack} bytes of stack, {local} of local memory"


def code_faults(binaries, folder):
    """One line a kernel that traps or writes nothing.

    All kernels for a chip are disassembled as one piece: to begin takes the tool half a second.
    """
    code, begins = {}, {}
    for i, binary in enumerate(binaries):
        (folder / str(i)).mkdir()
        run(OBJECTS, "-xelf", "all", binary.resolve(), cwd=folder / str(i))
        for path in sorted((folder / str(i)).iterdir()):
            arch = re.search(r"sm_(\d+)a?\.cubin", path.name)[1]
            for name, text in kernels_in(path.read_bytes()):
                if HOPPER.search(name) and arch != "90":
                    continue
                begins.setdefault(arch, []).append((len(code.setdefault(arch, bytearray())), name))
                code[arch] += text
    assert begins
    for arch, kernels in begins.items():
        (folder / arch).write_bytes(code[arch])
        traps, writes = set(), set()
        chip = f"SM{arch}a" if int(arch) >= 90 else f"SM{arch}"
        for line in run(CODE, "-b", chip, folder / arch).splitlines():
            if not (trap := "BPT.TRAP" in line) and not WRITES.search(line):
                continue
            at = int(re.match(r"\s*/\*([0-9a-f]+)\*/", line)[1], 16)
            name = kernels[bisect.bisect(kernels, at, key=lambda kernel: kernel[0]) - 1][1]
            (traps if trap else writes).add(name)
        for _, name in kernels:
            for bad, what in ((name in traps, "traps"), (name not in writes, "writes nothing")):
                if bad:
                    yield f"{name}: {what}; does it index a table at namespace scope?"


@needs_tools
def test_kernels_are_whole_and_stay_in_registers(tmp_path):
    objects = sorted(BUILD.glob("CMakeFiles/*.dir/src/**/*_cuda.cu.o"))
    if not objects:
        pytest.skip("the build has no CUDA backend")
    found = [f"{path.name}: {fault}" for path in objects for fault in memory_faults(path)]
    found += code_faults(objects, tmp_path)
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


@needs_tools
def test_the_faults_that_it_looks_for_are_seen(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    source = tmp_path / "trap.cu"
    source.write_text(TRAP)
    built = tmp_path / "trap.o"
    run(nvcc, "-std=c++20", "--expt-relaxed-constexpr", "-c",
        "-gencode=arch=compute_90a,code=sm_90a", "-o", built, source)
    local = "\n".join(memory_faults(built))
    code = "\n".join(code_faults([built], tmp_path))
    assert "local_kernel" in local and "local_kernel" not in code
    assert "table_kernel" in code
    assert "sound_kernel" not in local + code
