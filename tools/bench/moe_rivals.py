"""What torch does with the experts of Qwen3-30B-A3B: the prefill's grouped product in BF16, and a
decode step's products from BF16 weights. Beside it stand the rows of `cuda_bench grouped moe`.

A row's time is the median of 15 graph replays; weights rotate so that they do not come from the L2.
"""

import statistics

import torch

HIDDEN, WIDTH, EXPERTS, SLOTS = 2048, 768, 128, 8


def median_us(launch, launches):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(launches):
            launch(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / launches)
    return statistics.median(times)


def offsets_of(tokens):
    scores = torch.rand(tokens, EXPERTS, device="cuda")
    chosen = scores.topk(SLOTS, dim=1).indices.flatten()
    counts = torch.bincount(chosen, minlength=EXPERTS)
    return counts.cumsum(0).to(torch.int32), int((counts > 0).sum())


def weights(out, cols, sets):
    return [torch.randn(EXPERTS, out, cols, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]


def prefill(tokens):
    ends, _ = offsets_of(tokens)
    for name, out, cols in (("w13", 2 * WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)):
        x = torch.randn(tokens * SLOTS, cols, device="cuda", dtype=torch.bfloat16)
        w = weights(out, cols, 1)[0].transpose(1, 2)
        us = median_us(lambda _: torch._grouped_mm(x, w, offs=ends), 5)
        print(f"torch._grouped_mm {name:4} T {tokens:6} {us:9.2f} us "
              f"{2 * tokens * SLOTS * out * cols / us / 1e6:7.1f} TFLOP/s")
        count = tokens * SLOTS // EXPERTS
        y = x.view(EXPERTS, count, cols)
        us = median_us(lambda _: torch.bmm(y, w), 5)
        print(f"torch.bmm (even)  {name:4} T {tokens:6} {us:9.2f} us "
              f"{2 * tokens * SLOTS * out * cols / us / 1e6:7.1f} TFLOP/s")


def decode(tokens):
    ends, active = offsets_of(tokens)
    size = active * 3 * HIDDEN * WIDTH * 2
    sets = max(2, -(-180_000_000 // size))
    up, down = weights(2 * WIDTH, HIDDEN, min(sets, 8)), weights(HIDDEN, WIDTH, min(sets, 8))
    x = torch.randn(tokens * SLOTS, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def layer(i):
        h = torch._grouped_mm(x, up[i % len(up)].transpose(1, 2), offs=ends)
        gate, value = h.chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * value
        y = torch._grouped_mm(h, down[i % len(down)].transpose(1, 2), offs=ends)
        return y.view(tokens, SLOTS, HIDDEN).sum(1)

    us = median_us(layer, 24)
    print(f"torch._grouped_mm BF16 layer, B {tokens:3}, {active:3} experts {us:9.2f} us "
          f"{size / us / 1e6:6.3f} TB/s")


if __name__ == "__main__":
    torch.manual_seed(0)
    for t in (2048, 8192):
        prefill(t)
    for b in (1, 8, 16, 64):
        decode(b)
