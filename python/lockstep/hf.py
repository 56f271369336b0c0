"""Dumps of Hugging Face Transformers' Qwen3-MoE for `lockstep diff` (docs/formats/dump.md).

    with Capture(model) as capture:            # any Qwen3MoeForCausalLM
        capture.read(token_ids)                # one sequence after the other
    capture.save("transformers.safetensors")

or `PYTHONPATH=python python3 -m lockstep.hf MODEL SEQUENCES.jsonl --out transformers.safetensors`,
with rows as `lockstep rollout --score` reads them, of token ids. Needs torch, transformers and
safetensors.
"""
import argparse
import json
import sys

import torch
from safetensors.torch import save_file


def _choice(output, top_k):
    """The experts that a router chose: what it returns (Transformers 5), or what its logits say."""
    if isinstance(output, tuple):
        return output[-1]
    return output.float().softmax(-1).topk(top_k, -1).indices


class Capture:
    """Hooks on every layer: K behind norm and rotation, V, the routed experts' input, the routes.

    Rows are taken while `read` runs, and left alone at any other time. Sequences are read one by
    one, so that no padding comes between them.
    """

    def __init__(self, model):
        self.model = model
        self.layers = model.model.layers
        self.rows = {}  # tensor name -> rows of each sequence
        self._reading = False
        self._hooks = []

    def __enter__(self):
        for index, layer in enumerate(self.layers):
            if not hasattr(layer.mlp, "gate"):
                raise ValueError(f"layer {index} has no routed experts; nothing to compare there")
            self._hook(index, layer)
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _take(self, name, value):
        if self._reading:
            self.rows.setdefault(name, []).append(value)

    def _numbers(self, name, value):
        # [1, T, ...] -> [T, width]; BF16 rounds to nearest even whatever the model computes in.
        self._take(name, value.detach().flatten(0, 1).flatten(1).to(torch.bfloat16).cpu().clone())

    def _hook(self, index, layer):
        attention, mlp = layer.self_attn, layer.mlp
        name = f"layers.{index}."
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        turn = {}

        def keep_rotation(_, args, kwargs):
            turn["cos_sin"] = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]

        def take_k(_, args, k):  # [1, T, N, C], behind its norm; rotated here as attention does
            cos, sin = turn["cos_sin"]
            k = k.transpose(1, 2)
            self._numbers(name + "k", rotate(k, k, cos, sin)[1].transpose(1, 2))

        def take_routes(_, args, output):
            experts = _choice(output, self.model.config.num_experts_per_tok)
            self._take(name + "experts", experts.detach().to(torch.int32).cpu().clone())

        self._hooks += [
            attention.register_forward_pre_hook(keep_rotation, with_kwargs=True),
            attention.k_norm.register_forward_hook(take_k),
            attention.v_proj.register_forward_hook(lambda _, a, v: self._numbers(name + "v", v)),
            mlp.register_forward_pre_hook(lambda _, a: self._numbers(name + "w13_in", a[0])),
            mlp.gate.register_forward_hook(take_routes),
        ]

    @torch.no_grad()
    def read(self, token_ids, scored=None, temperature=1.0):
        """Reads a sequence. `scored[t]` says whether the log-prob of token t is wanted; default: of
        all but the first."""
        ids = torch.as_tensor(token_ids, dtype=torch.long)
        if ids.ndim != 1 or len(ids) < 2:
            raise ValueError(f"a sequence has shape {list(ids.shape)}; two token ids or more are needed")
        if scored is None:
            scored = [0] + [1] * (len(ids) - 1)
        if len(scored) != len(ids):
            raise ValueError(f"scored has {len(scored)} entries for {len(ids)} tokens")
        device = self.model.get_input_embeddings().weight.device
        self._reading = True
        try:
            logits = self.model(ids[None, :-1].to(device), use_cache=False).logits[0].float()
        finally:
            self._reading = False
        logp = (logits / temperature).log_softmax(-1).gather(1, ids[1:, None].to(device))[:, 0].cpu()
        logp[torch.as_tensor(scored[1:]) == 0] = float("nan")
        self._reading = True
        self._take("tokens", ids[:-1].to(torch.int32))
        self._take("logp", logp)
        self._reading = False
        return logp

    def save(self, path):
        """Writes all that was read. Returns how many tokens it is."""
        if not self.rows:
            raise ValueError("nothing was read")
        tensors = {name: torch.cat(rows).contiguous() for name, rows in self.rows.items()}
        save_file(tensors, path, metadata={"engine": "transformers"})
        return len(tensors["tokens"])


def _sequences(path):
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        ids = row.get("token_ids") or row.get("tokens")
        if not ids:
            raise SystemExit(f"{path}:{number}: has neither token_ids nor tokens")
        scored = row.get("response_mask")
        if scored is None:
            first = max(row.get("prompt_len", 1), 1)
            scored = [0] * first + [1] * (len(ids) - first)
        yield ids, scored


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("sequences", help="a JSONL file with token_ids or tokens")
    parser.add_argument("--out", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)).eval()
    with Capture(model) as capture:
        for ids, scored in _sequences(args.sequences):
            capture.read(ids, scored, args.temperature)
    print(f"{capture.save(args.out)} tokens in {args.out}")


if __name__ == "__main__":
    main()
