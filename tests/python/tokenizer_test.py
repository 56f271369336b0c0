"""Our tokenizer against tokenizers and tiktoken, on the Qwen vocabulary that dashscope carries."""
import base64
import json
import pathlib
import random
import time
import unicodedata

import pytest

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")
dashscope = pytest.importorskip("dashscope")

from data_tool import ask, ask_one  # noqa: E402

VOCABULARY = pathlib.Path(dashscope.__file__).parent / "resources" / "qwen.tiktoken"
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_letters():
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(b if b in printable else next(rest)) for b in range(256)]


def merge_of(token, ranks):
    """The pair that `token` is made of: merge all but the last pair of what has lower rank."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, 1 << 60) for a, b in zip(parts, parts[1:])]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= ranks[token]:
            break
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    assert len(parts) == 2, token
    return parts


@pytest.fixture(scope="module")
def ranks():
    lines = VOCABULARY.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (l.split() for l in lines if l)}


def tokenizer_json(ranks, nfc, string_merges):
    letters = byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    ordered = sorted(ranks, key=ranks.get)
    merges = [[spell(part) for part in merge_of(t, ranks)] for t in ordered if len(t) > 1]
    if string_merges:
        merges = [" ".join(pair) for pair in merges]
    added = [{"id": len(ranks) + i, "content": text, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": True}
             for i, text in enumerate(SPECIAL)]
    added.append({**added[0], "id": len(ranks) + 3, "content": "<think>", "special": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                  "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated",
             "invert": False}, byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "byte_fallback": False, "ignore_merges": False,
                  "vocab": {spell(t): r for t, r in ranks.items()}, "merges": merges}}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json(ranks, True, False)))
    return path


ALPHABETS = [
    "abcdefghij ABC'sStTlLdDvVeErRmM", "0123456789.,+-*/=() ", " \t\n\r\u00a0\u2003\u3000\u180e\u200b\x0b\x0c\x1c\x85\u2028",
    "\u00e9\u0301e\u0323n\u0303\u1e9b\u0323\uac00\u1100\u1161\u11a8\u017f\u0130\u212a\u1e9e", "漢字仮名交じり文。「」，！", "العربيةहिन्दीไทย",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f\U0001f1e9\U0001f1ea", "<|im_start|>endoftext<|im_end|><think>",
    "def f(x):\n    return x**2  # ok\n\n\n", "\ufffd\u0000\u007f\u0080\ue000\U0010ffff\u0378",
]
FIXED = [
    "", " ", "\n", "Hello, world!", "It's the DOGS' DON'T I'LL", "1234567 + 89 = 1234656", "a" * 3000, " " * 500 + "x",
    "\r\n\r\n  \r\n x", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|", "<think></think>",
    "e\u0301 \u1e9b\u0323 \u2126 \u212b", "x\u0301" * 50, "'\u017f 'S 's \u017f", "\u01c5\u01c4 \u2167 \u00bd \u0661\u0662",
]


def random_texts(count, seed):
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        pick = rng.sample(ALPHABETS, rng.randint(1, 3))
        text = "".join(rng.choice(rng.choice(pick)) for _ in range(rng.randint(1, 80)))
        if rng.random() < 0.2:
            text += rng.choice(SPECIAL + ["<think>"]) + text[:3]
        texts.append(text)
    for _ in range(count // 4):  # any character that is assigned, as of Unicode 14
        points = [rng.randrange(0x20, 0x3134F) for _ in range(rng.randint(1, 30))]
        import unicodedata
        texts.append("".join(chr(p) for p in points
                             if unicodedata.category(chr(p)) not in ("Cn", "Cs")))
    return texts


def test_encodes_as_tokenizers_does(folder):
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = FIXED + random_texts(3000, 1)
    ours = ask([{"op": "tokenizer", "folder": str(folder)}]
               + [{"op": "encode", "text": text} for text in texts])[1:]
    for text, tokens in zip(texts, ours):
        assert tokens == theirs.encode(text, add_special_tokens=False).ids, repr(text)


def variant(ranks, name):
    json_ = tokenizer_json(ranks, True, True)
    if name == "gpt2":
        json_["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False,
                                  "trim_offsets": True, "use_regex": True}
    if name == "whole words":
        json_["model"]["ignore_merges"] = True
        json_["model"]["merges"] = json_["model"]["merges"][:2000]
    if name == "literal":
        json_["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"String": " "}
    if name == "normalized":
        for i, content in enumerate(["e\u0301X", "im_", "<|im"]):
            json_["added_tokens"].append({**json_["added_tokens"][0], "id": len(ranks) + 4 + i,
                                          "content": content, "normalized": True,
                                          "special": i == 1})
    return json_


@pytest.mark.parametrize("name", ["gpt2", "whole words", "literal", "normalized"])
def test_variants_encode_as_tokenizers_does(name, ranks, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(variant(ranks, name)))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = FIXED + random_texts(800, 6) + ["\u00e9Xe\u0301X<|im_start|>im_<|im"]
    ours = ask([{"op": "tokenizer", "folder": str(tmp_path)}]
               + [{"op": "encode", "text": text} for text in texts])[1:]
    for text, tokens in zip(texts, ours):
        assert tokens == theirs.encode(text, add_special_tokens=False).ids, repr(text)


def test_decodes_as_tokenizers_does_at_any_cut(folder, ranks):
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(2)
    lists = [[rng.randrange(len(ranks) + 4) for _ in range(rng.randint(1, 12))]
             for _ in range(2000)]
    for text in random_texts(300, 3):
        tokens = theirs.encode(text, add_special_tokens=False).ids
        first = rng.randint(0, len(tokens))
        lists.append(tokens[first:rng.randint(first, len(tokens))])
    ours = ask([{"op": "tokenizer", "folder": str(folder)}]
               + [{"op": "decode", "tokens": tokens} for tokens in lists])[1:]
    for tokens, text in zip(lists, ours):
        assert text == theirs.decode(tokens, skip_special_tokens=False), tokens


def test_agrees_with_tiktoken(ranks, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(ranks, False, True)))
    theirs = tiktoken.Encoding(
        "qwen", pat_str=PATTERN, mergeable_ranks=ranks,
        special_tokens={text: len(ranks) + i for i, text in enumerate(SPECIAL + ["<think>"])})
    # tiktoken's \s has what Unicode calls white space too, and it merges by rank alone.
    texts = FIXED + random_texts(3000, 4)
    ours = ask([{"op": "tokenizer", "folder": str(tmp_path)}]
               + [{"op": "encode", "text": text} for text in texts]
               + [{"op": "bytes", "tokens": theirs.encode(text, allowed_special="all")}
                  for text in texts])[1:]
    for text, tokens, back in zip(texts, ours, ours[len(texts):]):
        assert tokens == theirs.encode(text, allowed_special="all"), repr(text)
        assert bytes.fromhex(back) == text.encode()


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match="/no/such/folder"):
        ask_one({"op": "tokenizer", "folder": "/no/such/folder"})


def test_encodes_a_long_text(folder):
    """How fast is told, not judged."""
    text = " ".join(random_texts(400, 5)) * 40
    load = {"op": "tokenizer", "folder": str(folder)}
    start = time.time()
    ask([load])
    loaded = time.time()
    tokens = ask([load, {"op": "encode", "text": text}])[1]
    seconds = max(1e-3, (time.time() - loaded) - (loaded - start))
    print(f"load {loaded - start:.2f} s, {len(text.encode()) / seconds / 1e6:.2f} MB/s")
    back = ask([load, {"op": "bytes", "tokens": tokens}])[1]
    assert bytes.fromhex(back) == unicodedata.normalize("NFC", text).encode()
