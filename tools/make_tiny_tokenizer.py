"""Writes the tokenizer of models/tiny-moe: every byte is a token, 16 special ones follow.

    python3 tools/make_tiny_tokenizer.py models/tiny-moe
"""

import json
import pathlib
import sys

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
SPECIAL += [f"<|reserved_{chr(ord('a') + i)}|>" for i in range(12)]


def byte_letters():
    """The letter that stands for each byte: printable ones for themselves, then 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(b if b in printable else next(rest)) for b in range(256)]


def added(number, content):
    return {"id": number, "content": content, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True}


def main(folder):
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                  "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(256 + i, text) for i, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {letter: b for b, letter in enumerate(byte_letters())},
                  "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0],
              "pad_token": SPECIAL[3], "add_bos_token": False, "model_max_length": 512,
              "clean_up_tokenization_spaces": False}
    folder = pathlib.Path(folder)
    text = json.dumps(tokenizer, indent=1, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
