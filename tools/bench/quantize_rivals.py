#!/usr/bin/env python3
"""Times what else there is for NVFP4 quantize on a CUDA device, in cuda_bench's columns.

Same task: BF16 rows to packed codes, E4M3 scales in blocks of 16 and a power-of-two scale a row.
Torch as one writes it, the same under torch.compile, and a Triton kernel of a row a program. Each
is checked against the first before it is timed.
"""
import statistics
import sys

import torch
import triton
import triton.language as tl

ROUNDS = 11
LAUNCHES = 20
COLD_BYTES = 180e6


def quantize_torch(x):
    rows, cols = x.shape
    values = x.float()
    amax = values.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [.5, 1)
    n = torch.where(amax > 0, exponent - 12 + (mantissa > 0.65625).int(), 0).clamp(-116, 116)
    unit = torch.exp2(n.float())
    blocks = values.view(rows, cols // 16, 16)
    scales = (blocks.abs().amax(-1) / unit / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn)
    scale = (scales.float() * unit).unsqueeze(-1)
    a = blocks.abs()
    code = ((a > 0.25 * scale).to(torch.uint8) + (a >= 0.75 * scale).to(torch.uint8)
            + (a > 1.25 * scale).to(torch.uint8) + (a >= 1.75 * scale).to(torch.uint8)
            + (a > 2.5 * scale).to(torch.uint8) + (a >= 3.5 * scale).to(torch.uint8)
            + (a > 5.0 * scale).to(torch.uint8))
    code = torch.where(scale > 0, code, torch.zeros_like(code))
    code = code | ((blocks < 0) & (code > 0)).to(torch.uint8) << 3
    code = code.view(rows, cols)
    return code[:, ::2] | code[:, 1::2] << 4, scales, unit.squeeze(-1)


@triton.jit
def quantize_triton_kernel(x_ptr, codes_ptr, scales_ptr, unit_ptr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, COLS)
    x = tl.load(x_ptr + row * COLS + i).to(tl.float32)
    a = tl.abs(x)
    amax = tl.max(a)
    bits = amax.to(tl.int32, bitcast=True)
    n = (bits >> 23) - 127 - 11 + ((bits & 0x7FFFFF) > 0x280000).to(tl.int32)
    n = tl.where(bits == 0, 0, tl.minimum(tl.maximum(n, -116), 116))
    unit = ((n + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - n) << 23).to(tl.float32, bitcast=True)
    blocks = tl.reshape(a, (COLS // 16, 16))
    scales = (tl.max(blocks, 1) * inverse / 6.0).to(tl.float8e4nv)
    scale = tl.reshape(scales.to(tl.float32) * unit, (COLS // 16, 1))
    code = ((blocks > 0.25 * scale).to(tl.int32) + (blocks >= 0.75 * scale).to(tl.int32)
            + (blocks > 1.25 * scale).to(tl.int32) + (blocks >= 1.75 * scale).to(tl.int32)
            + (blocks > 2.5 * scale).to(tl.int32) + (blocks >= 3.5 * scale).to(tl.int32)
            + (blocks > 5.0 * scale).to(tl.int32))
    code = tl.where(scale > 0, code, 0)
    negative = tl.reshape(x < 0, (COLS // 16, 16))
    code = code | tl.where(negative & (code > 0), 8, 0)
    even, odd = tl.split(tl.reshape(code, (COLS // 2, 2)))
    tl.store(codes_ptr + row * (COLS // 2) + tl.arange(0, COLS // 2), (even | odd << 4).to(tl.uint8))
    tl.store(scales_ptr + row * (COLS // 16) + tl.arange(0, COLS // 16), scales)
    tl.store(unit_ptr + row, unit)


def quantize_triton(x, warps=4):
    rows, cols = x.shape
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, cols // 16, dtype=torch.float8_e4m3fn, device=x.device)
    unit = torch.empty(rows, dtype=torch.float32, device=x.device)
    quantize_triton_kernel[(rows,)](x, codes, scales, unit, COLS=cols, num_warps=warps)
    return codes, scales, unit


def time_us(body, inputs, launches=LAUNCHES):
    """The median microseconds of one launch, of graph replays that rotate over the inputs."""
    body(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            body(inputs[i % len(inputs)])
    times = []
    for i in range(3 + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def row(name, size, us, moved, ceiling):
    floor = f"{moved / ceiling * 1e6 / us:6.3f}" if ceiling else ""
    print(f"{name:<38} {size:<16} {us:9.2f} {moved / 1e6:8.1f} {moved / us / 1e6:8.3f} {'':8} {floor}",
          flush=True)


def main():
    device = "cuda"
    source = torch.empty(2**29, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    us = time_us(lambda _: target.copy_(source), [None])
    ceiling = 2 * source.numel() / us * 1e6
    row("ceiling: torch copy_", "512 MiB", us, 2 * source.numel(), None)
    del source, target
    compiled = torch.compile(quantize_torch, dynamic=False)
    for rows, cols in ((65536, 2048), (8192, 2048), (64, 2048)):
        moved = rows * cols * 2.5625 + rows * 4
        sets = min(max(1, int(COLD_BYTES / moved)), LAUNCHES)
        inputs = [torch.randn(rows, cols, device=device).bfloat16() for _ in range(sets)]
        small = inputs[0][:4096]
        expected = quantize_torch(small)
        bodies = {"torch.compile": lambda x: compiled(x)}
        if rows <= 8192:
            bodies["torch, eager"] = quantize_torch
        for warps in (2, 4, 8):
            bodies[f"triton, {warps} warps"] = lambda x, warps=warps: quantize_triton(x, warps)
        for name, body in bodies.items():
            try:
                got = body(inputs[0])
                differ = [int((a[:4096].view(torch.uint8) != b.view(torch.uint8)).sum())
                          for a, b in zip(got[:2], expected[:2])]
                us = time_us(body, inputs, LAUNCHES if rows < 65536 else 5)
                row(f"rival: {name}", f"{rows}x{cols}", us, moved, ceiling)
                if any(differ):
                    print(f"  its bytes differ: {differ[0]} of codes, {differ[1]} of scales")
            except Exception as error:  # a rival that does not run here is a line, not the end
                print(f"rival: {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        del inputs
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
