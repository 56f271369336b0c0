"""The trainer's forward pass against Hugging Face Transformers on the same checkpoint."""
import os
import pathlib
import subprocess

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOOL = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build")) / "trainer_tool"
if not TOOL.exists():
    pytest.skip(f"{TOOL} is not built", allow_module_level=True)

VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "gates_not_normalized": {"norm_topk_prob": False},
    "one_kv_head": {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 3},
}


def make_model(folder, dtype, **overrides):
    torch.manual_seed(1)
    settings = dict(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, moe_intermediate_size=48, intermediate_size=96, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        vocab_size=97, max_position_embeddings=128, rope_theta=1e4, tie_word_embeddings=False,
        initializer_range=0.15, attn_implementation="eager", experts_implementation="eager")
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings | overrides))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight += 0.2 * torch.randn_like(weight)
    model.to(dtype).save_pretrained(folder)
    return model.float().eval()


def sequences():
    generator = torch.Generator().manual_seed(2)
    lengths = (2, 17, 60, 33, 5, 128)
    return [torch.randint(0, 97, (n,), generator=generator) for n in lengths]


def hf_scores(model, ids):
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def our_scores(folder, mode):
    text = "\n".join(" ".join(map(str, ids.tolist())) for ids in sequences())
    done = subprocess.run([TOOL, folder, mode], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [torch.tensor([float(x) for x in line.split()]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_f32_log_probs_are_equal_to_1e_4(tmp_path, variant):
    model = make_model(tmp_path, torch.float32, **VARIANTS[variant])
    ours = our_scores(tmp_path, "f32")
    worst = max((a - hf_scores(model, ids)).abs().max().item()
                for a, ids in zip(ours, sequences(), strict=True))
    print(f"{variant}: worst difference {worst:.2e}")
    assert worst < 1e-4


def test_bf16_log_probs_are_as_close_to_f32_as_transformers_own(tmp_path):
    """Weights are the same BF16 numbers. The distance that BF16 activations make depends on the
    model, so Transformers' own BF16 forward is the measure (docs/tolerances.md)."""
    f32 = make_model(tmp_path, torch.bfloat16)
    exact = torch.cat([hf_scores(f32, ids) for ids in sequences()])
    ours = (torch.cat(our_scores(tmp_path, "bf16")) - exact).abs()
    bf16 = f32.to(torch.bfloat16)
    theirs = (torch.cat([hf_scores(bf16, ids) for ids in sequences()]) - exact).abs()
    for name, d in (("ours", ours), ("transformers", theirs)):
        print(f"{name}: mean {d.mean():.2e} median {d.median():.2e} worst {d.max():.2e}")
    assert 0 < ours.median() < 1.25 * theirs.median()
    assert ours.mean() < 1.5 * theirs.mean()
