"""Two engines that nobody tuned to each other: Transformers and ours, on the tiny checkpoint."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOCKSTEP = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build")).resolve() / "lockstep"
if not LOCKSTEP.exists():
    pytest.skip(f"{LOCKSTEP} is not built", allow_module_level=True)
sys.path.insert(0, str(ROOT / "python"))

from lockstep import hf  # noqa: E402

MODEL = ROOT / "models" / "tiny-moe"


def lockstep(*args, fails=False):
    done = subprocess.run([LOCKSTEP, *map(str, args)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode != 0) == fails, done.stderr + done.stdout
    return done.stderr.strip().splitlines()[-1] if fails else done.stdout


def diff(folder, a, b, *options):
    lockstep("diff", a, b, "--json", folder / "diff.json", *options)
    return json.loads((folder / "diff.json").read_text())


def problems():
    """Worked products, as the tiny model writes them; its first 256 tokens are bytes."""
    for a, b in ((37, 46), (12, 9), (85, 71), (60, 33), (99, 98), (41, 5), (18, 84), (77, 23),
                 (53, 67), (29, 92), (64, 8), (45, 55)):
        tens, ones = b // 10 * 10, b % 10
        yield list(f"{a}*{b}={a}*{tens}={a * tens};{a}*{ones}={a * ones};"
                   f"{a * tens}+{a * ones}={a * b}".encode())


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    path = tmp_path_factory.mktemp("sequences") / "sequences.jsonl"
    path.write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in problems()))
    return path


def transformers_dump(path, dtype=torch.bfloat16, change=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
    if change:
        change(model)
    with hf.Capture(model) as capture:
        for ids in problems():
            capture.read(ids)
    assert capture.save(path) == sum(len(ids) - 1 for ids in problems())
    return path


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return transformers_dump(tmp_path_factory.mktemp("theirs") / "transformers.safetensors")


def our_dump(path, sequences, arm, *options):
    lockstep("dump", f"arm={arm}", *options, "--model", MODEL, "--score", sequences, "--out", path)
    return path


def figures(found):
    gap = found["logp"]
    print(f'{found["verdict"]}: different at {found["first_different"]}, apart at '
          f'{found["first_apart"]}, gap mean {gap["mean"]:.2e} max {gap["max"]:.2e}; drift '
          + " ".join(f'{p["place"][7:]} {p["drift"]:.1e}' for p in found["places"]))


def test_bf16_engines_are_near_and_an_fp4_one_is_apart(tmp_path, sequences, theirs):
    trainer = our_dump(tmp_path / "trainer.safetensors", sequences, "bf16",
                       "guide.routing_replay=none", "--trainer")
    engine = our_dump(tmp_path / "engine.safetensors", sequences, "bf16")
    rollout = our_dump(tmp_path / "rollout.safetensors", sequences, "naive")

    near = {}
    for name, ours in (("trainer", trainer), ("engine", engine)):
        near[name] = diff(tmp_path, ours, theirs)
        figures(near[name])
        assert near[name]["verdict"] == "near"
        assert near[name]["agrees"]
        assert near[name]["first_different"] in ("layers.0.k", "layers.0.v", "layers.0.w13_in")
        assert near[name]["logp"]["mean"] < 0.02  # Transformers rounds its logits to BF16

    apart = diff(tmp_path, rollout, theirs)
    figures(apart)
    assert apart["verdict"] == "apart"
    assert apart["agrees"]
    # The first K and V see no FP4 yet; what attention makes of them does.
    assert apart["first_apart"] in ("layers.0.w13_in", "layers.1.k", "layers.1.v")
    assert apart["logp"]["mean"] > 3 * max(d["logp"]["mean"] for d in near.values())
    modes = apart["modes"]
    assert modes["lsb"]["w13_in"] < modes["own_scale"]["w13_in"]
    assert modes["full_forced"]["k"] == 0


def test_a_change_in_one_layer_is_found_there(tmp_path, theirs):
    def change(model):
        with torch.no_grad():
            attention = model.model.layers[2].self_attn
            attention.o_proj.weight += 0.1 * attention.o_proj.weight.std() * torch.randn_like(
                attention.o_proj.weight)

    torch.manual_seed(3)
    changed = transformers_dump(tmp_path / "changed.safetensors", change=change)
    found = diff(tmp_path, theirs, changed)
    figures(found)
    assert found["first_different"] == "layers.2.w13_in"
    assert found["first_apart"] == "layers.2.w13_in"
    assert found["agrees"] and found["logp"]["mean"] > 0
    for place in found["places"][:8]:  # k and v of layers 0 to 2, w13_in of 0 and 1
        assert place["drift"] == 0 and place["flip_frac"] == 0
    # Keys of a contract reach the tensors that they name, and no others.
    w4a8 = diff(tmp_path, theirs, changed, "contract.activations=mxfp8")
    assert w4a8["contract"] == "lockstep contract.activations=mxfp8"
    for place, other in zip(found["places"], w4a8["places"]):
        same = place["flip_frac"] == other["flip_frac"]
        assert same != (place["place"].endswith("w13_in") and place["drift"] > 0)
    assert "takes contract.KEY=value" in lockstep("diff", theirs, changed, "seed=3", fails=True)
    again = diff(tmp_path, theirs, transformers_dump(tmp_path / "again.safetensors"))
    assert again["verdict"] == "equal" and again["agrees"]


def test_a_head_that_differs_is_not_blamed_on_a_layer(tmp_path, theirs):
    def change(model):
        model.model.norm.weight.data *= 1.3

    found = diff(tmp_path, theirs, transformers_dump(tmp_path / "head.safetensors", change=change))
    assert found["verdict"] == "equal"
    assert not found["agrees"]
    assert "behind the last place" in found["agreement"]


def test_the_capture_is_what_the_model_computes(tmp_path):
    """K and V against those of Transformers' own cache, the routes against its router's logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = next(problems())
    with hf.Capture(model) as capture:
        logp = capture.read(ids, scored=[0] * 5 + [1] * (len(ids) - 5))
        with torch.no_grad():
            model(torch.tensor([ids]))  # not read: leaves no rows
    capture.save(tmp_path / "dump.safetensors")
    dump = safetensors_torch.load_file(tmp_path / "dump.safetensors")
    with torch.no_grad():
        out = model(torch.tensor([ids[:-1]]), use_cache=True, output_router_logits=True)
    for layer in range(model.config.num_hidden_layers):
        cached = out.past_key_values.layers[layer]
        for name, value in (("k", cached.keys), ("v", cached.values)):
            expected = value[0].transpose(0, 1).flatten(1).to(torch.bfloat16)
            assert torch.equal(dump[f"layers.{layer}.{name}"], expected)
        chosen = out.router_logits[layer].topk(model.config.num_experts_per_tok, -1).indices
        assert torch.equal(dump[f"layers.{layer}.experts"].sort(-1).values.long(),
                           chosen.sort(-1).values)
    assert dump["tokens"].tolist() == ids[:-1]
    assert dump["logp"].isnan().sum() == 4 and torch.equal(dump["logp"].isnan(), logp.isnan())
    expected = out.logits[0].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(dump["logp"][4:], expected[4:], atol=1e-5)


def test_the_documents_twenty_lines_write_a_dump(tmp_path):
    text = (ROOT / "docs" / "formats" / "dump.md").read_text()
    scope = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S).group(1), scope)
    generator = torch.Generator().manual_seed(5)
    k, v, x = ([torch.randn(6, width, generator=generator) for _ in range(2)]
               for width in (32, 32, 64))
    scope["write_dump"](tmp_path / "a.safetensors", range(6), k, v, x, [[[0, 1]] * 6] * 2, [-1.0] * 6)
    x[1] = x[1] * 1.1
    scope["write_dump"](tmp_path / "b.safetensors", range(6), k, v, x, [[[1, 0]] * 6] * 2, [-1.1] * 6)
    found = diff(tmp_path, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found["first_apart"] == found["first_different"] == "layers.1.w13_in"
    assert abs(found["places"][5]["drift"] - 0.1) < 0.01
    assert found["routes"][0]["mismatch_frac"] == 0


def test_bad_dumps_are_refused_in_one_line(tmp_path, theirs):
    tensors = safetensors_torch.load_file(theirs)
    for change, says in (
            (lambda t: t.pop("layers.3.k"), "has no layers.3.k"),
            (lambda t: t["layers.1.v"].view(torch.int16)[4, 7].fill_(0x7FC0), "is NaN at token 4, element 7"),
            (lambda t: t["tokens"][3].add_(1), "token 3 is"),
            (lambda t: t.update({"layers.0.k": t["layers.0.k"].float()}), "layers.0.k is F32"),
            (lambda t: [t.update({n: v[:-1].clone()}) for n, v in list(t.items())], "tokens"),
            (lambda t: t.update({"layers.0.w13_in": t["layers.0.w13_in"][:, :64].clone()}), "wide")):
        bad = {name: value.clone() for name, value in tensors.items()}
        change(bad)
        safetensors_torch.save_file(bad, tmp_path / "bad.safetensors")
        line = lockstep("diff", theirs, tmp_path / "bad.safetensors", fails=True)
        assert says in line and "bad.safetensors" in line, line
    assert "compare under lockstep" in lockstep("diff", theirs, theirs, "--contract", "te", fails=True)
