"""Checkpoints from and to Transformers: the same values on both sides."""
import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from data_tool import ask_one  # noqa: E402

CONFIG = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, moe_intermediate_size=24, intermediate_size=48, num_experts=4,
              num_experts_per_tok=2, vocab_size=96, norm_topk_prob=True, decoder_sparse_step=1,
              max_position_embeddings=128, rope_theta=12345.0, eos_token_id=95)


def model(tied, dtype):
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(tie_word_embeddings=tied, **CONFIG)
    return transformers.Qwen3MoeForCausalLM(config).to(dtype)


def values(folder):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.config, {name: value for name, value in loaded.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shard", [1 << 30, 20_000])
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(tied, dtype, shard, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model(tied, dtype).save_pretrained(theirs, max_shard_size="20KB" if shard < 1 << 30 else "1GB")
    ask_one({"op": "copy", "from": str(theirs), "to": str(ours), "shard": shard})
    assert (ours / "model.safetensors.index.json").exists() == (shard < 1 << 30)
    config, weights = values(theirs)
    copied_config, copied = values(ours)
    assert weights.keys() == copied.keys()
    for name, value in weights.items():
        assert torch.equal(copied[name], value.to(torch.bfloat16).float()), name
    for key in [*CONFIG, "tie_word_embeddings", "rms_norm_eps", "rope_parameters"]:
        if key not in ("rope_theta", "intermediate_size"):  # the latter is of no layer
            assert getattr(copied_config, key) == getattr(config, key), key


def test_fused_experts_read_as_single_ones(tmp_path):
    from safetensors.torch import load_file, save_file
    single, fused, ours = tmp_path / "single", tmp_path / "fused", tmp_path / "ours"
    model(False, torch.bfloat16).save_pretrained(single)
    weights = load_file(single / "model.safetensors")
    joined = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.experts."
        stack = lambda part: torch.stack([  # noqa: E731
            weights[f"{name}{e}.{part}_proj.weight"] for e in range(CONFIG["num_experts"])])
        joined[name + "gate_up_proj"] = torch.cat([stack("gate"), stack("up")], 1).contiguous()
        joined[name + "down_proj"] = stack("down")
    fused.mkdir()
    save_file(joined, fused / "model.safetensors", metadata={"format": "pt"})
    (fused / "config.json").write_text((single / "config.json").read_text())
    ask_one({"op": "copy", "from": str(fused), "to": str(ours)})
    copied = load_file(ours / "model.safetensors")
    assert copied.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(copied[name], value), name


def test_the_tokenizer_of_the_tiny_model_goes_along(tmp_path):
    tiny = pathlib.Path("models/tiny-moe")
    config = json.loads((tiny / "config.json").read_text())
    own = transformers.AutoConfig.from_pretrained(tiny)
    torch.manual_seed(1)
    source, copied = tmp_path / "source", tmp_path / "copied"
    transformers.Qwen3MoeForCausalLM(own).to(torch.bfloat16).save_pretrained(source)
    for file in tiny.glob("*.json"):
        (source / file.name).write_text(file.read_text())
    ask_one({"op": "copy", "from": str(source), "to": str(copied)})
    assert sum(f.stat().st_size for f in copied.iterdir()) <= 9 << 20
    tokenizer = transformers.AutoTokenizer.from_pretrained(copied)
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer("37*6=").input_ids == [ord(c) for c in "37*6="]
    loaded = transformers.GenerationConfig.from_pretrained(copied)
    assert loaded.eos_token_id == [256]
