"""What guided and plain fake quantization of NVFP4 cost when written in Triton or for torch.compile.

Run on a CUDA device: python3 tools/bench/guide_rivals.py [rows cols]
Both compute round-to-nearest at the own scale (plain), and rounding by recorded bits at recorded
scales (lsb), in BF16; a check against a slow reading comes first. Times are medians of replayed
graphs of 20 launches, as in cuda_bench.
"""

import statistics
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def e2m1_floor(z):
    """Lower end of the bracket of z, as an index; compares are exact as in the house's kernels."""
    return ((z >= 0.5).to(tl.int32) + (z >= 1.0).to(tl.int32) + (z >= 1.5).to(tl.int32)
            + (z >= 2.0).to(tl.int32) + (z >= 3.0).to(tl.int32) + (z >= 4.0).to(tl.int32))


@triton.jit
def e2m1_nearest(z):
    return ((z > 0.25).to(tl.int32) + (z >= 0.75).to(tl.int32) + (z > 1.25).to(tl.int32)
            + (z >= 1.75).to(tl.int32) + (z > 2.5).to(tl.int32) + (z >= 3.5).to(tl.int32)
            + (z > 5.0).to(tl.int32))


@triton.jit
def e2m1_value(m):
    return tl.where(m < 4, m.to(tl.float32) * 0.5,
                    tl.where(m == 4, 2.0, tl.where(m == 5, 3.0, tl.where(m == 6, 4.0, 6.0))))


@triton.jit
def plain_kernel(x_ptr, out_ptr, cols: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, cols)
    x = tl.load(x_ptr + row * cols + at).to(tl.float32)
    a = tl.abs(x)
    amax = tl.max(a, axis=0)
    n = tl.ceil(tl.log2(tl.maximum(amax, 1e-30) / 2688.0))
    power = tl.exp2(n)
    blocks = tl.reshape(a, (cols // 16, 16))
    s8 = (tl.max(blocks, axis=1) / (6.0 * power)).to(tl.float8e4nv).to(tl.float32)
    scale = s8 * power
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    m = e2m1_nearest(blocks * inverse[:, None])
    value = tl.reshape(e2m1_value(m) * scale[:, None], (cols,))
    tl.store(out_ptr + row * cols + at, tl.where(x < 0, -value, value).to(tl.bfloat16))


@triton.jit
def lsb_kernel(x_ptr, out_ptr, bits_ptr, scales_ptr, n_ptr, cols: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, cols)
    x = tl.load(x_ptr + row * cols + at).to(tl.float32)
    power = tl.exp2(tl.load(n_ptr + row).to(tl.float32))
    s8 = tl.load(scales_ptr + row * (cols // 16) + tl.arange(0, cols // 16))
    scale = s8.to(tl.float8e4nv, bitcast=True).to(tl.float32) * power
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    bytes_ = tl.load(bits_ptr + row * (cols // 8) + at // 8).to(tl.int32)
    bit = (bytes_ >> (at % 8)) & 1
    z = tl.reshape(tl.abs(x), (cols // 16, 16)) * inverse[:, None]
    m = e2m1_floor(z)
    m = m + ((m ^ tl.reshape(bit, (cols // 16, 16))) & 1)
    value = tl.reshape(e2m1_value(m) * scale[:, None], (cols,))
    tl.store(out_ptr + row * cols + at, tl.where(x < 0, -value, value).to(tl.bfloat16))


GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def plain_torch(x):
    a = x.float().abs()
    power = torch.exp2(torch.ceil(torch.log2(a.amax(-1, keepdim=True).clamp_min(1e-30) / 2688)))
    blocks = a.unflatten(-1, (-1, 16))
    s8 = (blocks.amax(-1) / (6 * power)).to(torch.float8_e4m3fn).float()
    scale = (s8 * power).unsqueeze(-1)
    z = blocks / torch.where(scale > 0, scale, torch.inf)
    m = sum((z > t) if i % 2 == 0 else (z >= t)
            for i, t in enumerate([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    value = torch.where(m < 4, m * 0.5, torch.where(m < 7, m - 2.0, 6.0)) * scale
    return torch.copysign(value.flatten(-2), x.float()).bfloat16()


def lsb_torch(x, bits, scales, n):
    scale = (scales.view(torch.float8_e4m3fn).float() * torch.exp2(n.float())[:, None]).unsqueeze(-1)
    z = x.float().abs().unflatten(-1, (-1, 16)) / torch.where(scale > 0, scale, torch.inf)
    m = sum((z >= t).int() for t in GRID[1:7])
    shifts = torch.arange(8, device=x.device, dtype=torch.int32)
    bit = (bits.int().unsqueeze(-1) >> shifts & 1).flatten(-2).unflatten(-1, (-1, 16))
    m = m + ((m ^ bit) & 1)
    value = torch.where(m < 4, m * 0.5, torch.where(m < 7, m - 2.0, 6.0)) * scale
    return torch.copysign(value.flatten(-2), x.float()).bfloat16()


def microseconds(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(20):
            call()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / 20)
    return statistics.median(times)


def main():
    rows, cols = (int(v) for v in sys.argv[1:3]) if len(sys.argv) > 2 else (65536, 2048)
    torch.manual_seed(0)
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    bits = torch.randint(0, 256, (rows, cols // 8), device="cuda", dtype=torch.uint8)
    scales = torch.randint(0x70, 0x7C, (rows, cols // 16), device="cuda", dtype=torch.uint8)
    n = torch.full((rows,), -10, device="cuda", dtype=torch.int8)
    few = slice(0, 64)

    def same(name, got, want):
        different = (got[few].float() != want.float()).sum().item()
        print(f"{name}: {different} of {want.numel()} values differ from torch's own reading")

    rivals = {}
    for warps in (4, 8):
        rivals[f"plain, triton, {warps} warps"] = (
            lambda warps=warps: plain_kernel[(rows,)](x, out, cols, num_warps=warps))
        rivals[f"lsb, triton, {warps} warps"] = (
            lambda warps=warps: lsb_kernel[(rows,)](x, out, bits, scales, n, cols, num_warps=warps))
    rivals["plain, triton, 4 warps"]()
    same("plain, triton", out, plain_torch(x[few]))
    rivals["lsb, triton, 4 warps"]()
    same("lsb, triton", out, lsb_torch(x[few], bits[few], scales[few], n[few]))
    compiled_plain = torch.compile(plain_torch)
    compiled_lsb = torch.compile(lsb_torch)
    rivals["plain, torch.compile"] = lambda: compiled_plain(x)
    rivals["lsb, torch.compile"] = lambda: compiled_lsb(x, bits, scales, n)
    rivals["copy, torch"] = lambda: out.copy_(x)
    for name, call in rivals.items():
        time = microseconds(call)
        size = 4 * rows * cols + (rows * cols * 3 // 16 if name.startswith("lsb") else 0)
        print(f"{name:28s} {rows} x {cols} {time:10.2f} us {size / time / 1e6:8.3f} TB/s")


if __name__ == "__main__":
    main()
