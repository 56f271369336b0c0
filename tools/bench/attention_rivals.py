#!/usr/bin/env python3
"""What PyTorch makes of the same decode attention: BF16 keys and values, 32 heads on 4.

Prints the median of graph replays for each backend of scaled_dot_product_attention that runs, and for
the plain products, beside the bytes of K and V. The keys lie together, not in pages."""
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, DIM = 32, 4, 128


def replay_us(body, sets, launches=20, rounds=9):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(sets):
            body(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    count = (max(launches, sets) + sets - 1) // sets * sets
    with torch.cuda.graph(graph):
        for i in range(count):
            body(i % sets)
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[2:])


def grouped_products(q, k, v):
    """q [B, H, 1, C] as rows of their KV head: two batched products and a softmax."""
    batch = q.shape[0]
    rows = q.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
    p = torch.softmax(rows @ k.transpose(2, 3) * DIM**-0.5, -1, dtype=torch.float32)
    return p.to(v.dtype) @ v


def main():
    torch.manual_seed(0)
    for batch, tokens in ((1, 2048), (1, 32768), (16, 8192), (64, 8192), (1, 131072), (8, 32768)):
        size = 2 * batch * tokens * KV_HEADS * DIM * 2
        sets = max(1, min(int(180e6 / size + 1), 64))
        shape = (batch, KV_HEADS, tokens, DIM)
        q = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        kv = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
              for _ in range(sets)]
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION),
                              ("efficient", SDPBackend.EFFICIENT_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    us = replay_us(lambda i: F.scaled_dot_product_attention(
                        q, *kv[i], enable_gqa=True), sets)
                # The group's heads as query rows of one KV head: no backend then repeats K and V.
                    rows = q.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
                    grouped = replay_us(lambda i: F.scaled_dot_product_attention(rows, *kv[i]), sets)
                us, how = min((us, "gqa"), (grouped, "grouped rows"))
            except RuntimeError as error:
                print(f"torch {name:10} B={batch} C={tokens}: does not run ({str(error).splitlines()[0][:60]})")
                continue
            print(f"torch {name:10} B={batch} C={tokens} {us:9.1f} us  {size / us / 1e6:6.2f} TB/s  {how}")
        us = replay_us(lambda i: grouped_products(q, *kv[i]), sets)
        print(f"torch products   B={batch} C={tokens} {us:9.1f} us  {size / us / 1e6:6.2f} TB/s", flush=True)
        del kv


if __name__ == "__main__":
    sys.exit(main())
