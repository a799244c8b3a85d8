"""A tokenizer's identity is what it makes of texts, also if transformers saved it again in another
form."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from cachetree import ConfigError
from cachetree.checkpoint import tokenizer_difference
from cachetree.checkpoint.tokenizer import tokenizer_digest
from profiles.compute.models import ModelSource, look_at_pair
from profiles.random_models import shape, write_models

MERGES = [
    *("h e", "l l", "he ll", "hell o", "o r", "l d", "Ġ w", "Ġw or", "Ġwor ld", "Ġ Ġ", "d o"),
    *("1 2", "12 3", "n '", "n' t", "Ã ©"),
]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN, LLAMA3 = WORDS + r"\p{N}" + REST, WORDS + r"\p{N}{1,3}" + REST
NFC = {"type": "NFC"}
DIGITS = {"type": "Digits", "individual_digits": True}


def level(**changes: bool) -> dict[str, Any]:
    stated = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "ByteLevel", **stated, **changes}


def split(pattern: str, **changes: bool) -> dict[str, Any]:
    form = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    byte_level = level(use_regex=False, **changes)
    return {"type": "Sequence", "pretokenizers": [{**form, "invert": False}, byte_level]}


def begins(token: str, number: int) -> dict[str, Any]:
    first, text = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    both = [first, text, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": both,
        "special_tokens": special,
    }


def bpe(vocab: dict[str, int], merges: list[str], **changes: Any) -> dict[str, Any]:
    stated = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    for merge in merges:
        vocab.setdefault(merge.replace(" ", ""), len(vocab))
    return {"type": "BPE", **stated, **affixes, **changes, "vocab": vocab, "merges": merges}


def write_tokenizer(folder: Path, name: str, model: dict[str, Any], **changes: Any) -> Path:
    """Save a tokenizer in the form that model hubs have had since 2023 or 2024."""
    number = len(model["vocab"])
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {
            "id": model["vocab"].get(content, number + at),
            "content": content,
            **special,
            "special": True,
        }
        for at, content in enumerate(changes.pop("added", ("<|endoftext|>", "<|im_start|>")))
    ]
    parts = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": level()}
    nothing = {"version": "1.0", "truncation": None, "padding": None}
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**nothing, "added_tokens": added, **parts, **changes, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    decoder = {str(it["id"]): {k: v for k, v in it.items() if k != "id"} for it in added}
    config = {"tokenizer_class": name, "eos_token": added[0]["content"], "unk_token": None}
    if name == "LlamaTokenizer":
        config = {"tokenizer_class": name, "legacy": False, "unk_token": "<unk>"}
    config |= {"bos_token": None, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def of_bytes(**changes: Any) -> dict[str, Any]:
    letters = {it: number for number, it in enumerate(sorted(ByteLevel.alphabet()))}
    return bpe(letters, MERGES, **changes)


def of_pieces() -> dict[str, Any]:
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{it:02X}>" for it in range(256)), *"▁helowrda123"]
    vocab = {it: number for number, it in enumerate(letters)}
    merges = [it.replace("Ġ", "▁") for it in MERGES[:10]]
    return bpe(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def replace(one: str, other: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": one}, "content": other}


OF_2023: dict[str, Any] = {
    "added": ("<unk>", "<s>", "</s>"),
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")],
    },
    "post_processor": begins("<s>", 1),
    "decoder": {
        "type": "Sequence",
        "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
    },
}
QWENS: dict[str, Any] = {
    "normalizer": NFC,
    "pre_tokenizer": split(QWEN, trim_offsets=False),
    "post_processor": level(trim_offsets=False, use_regex=False),
    "decoder": level(trim_offsets=False, use_regex=False),
}
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2Tokenizer", of_bytes(), QWENS),
    "llama3": (
        "PreTrainedTokenizerFast",
        of_bytes(ignore_merges=True, continuing_subword_prefix=None, end_of_word_suffix=None),
        {"pre_tokenizer": split(LLAMA3), "post_processor": begins("<|endoftext|>", 272)},
    ),
    "gpt2": ("GPT2Tokenizer", of_bytes(), {"pre_tokenizer": level()}),
    "llama2": ("LlamaTokenizer", of_pieces(), OF_2023),
}


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_tokenizer_that_was_saved_again_is_the_same(form, tmp_path):
    name, model, parts = PUBLISHED[form]
    base = write_tokenizer(tmp_path / "base", name, model, **parts)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "tuned")
    one, other = ((it / "tokenizer.json").read_bytes() for it in (base, tmp_path / "tuned"))
    assert msgspec.json.decode(one) != msgspec.json.decode(other) or form == "llama3"
    assert tokenizer_difference(base, tmp_path / "tuned") == ""
    assert tokenizer_digest(base) == tokenizer_digest(tmp_path / "tuned")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    config = shape("llama", layers=2, hidden=64, heads=4, kv_heads=2)
    base, tuned = write_models(tmp_path_factory.mktemp("pair"), config, ["base", "tuned"])
    return base, tuned


def test_a_rule_that_was_lost_is_shown_by_a_text(pair):
    """transformers 5 saves SmolLM2's tokenizer, which has GPT-2's class, without its rule for
    digits."""
    base, tuned = pair
    rules = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, level()]}}
    write_tokenizer(base, "GPT2Tokenizer", of_bytes(), **rules)
    AutoTokenizer.from_pretrained(base).save_pretrained(tuned)
    sources = ModelSource(path=base), ModelSource(path=tuned)
    message = rf"'.*' becomes .* copy {base}/tokenizer\.json to {tuned}, or"
    with pytest.raises(ConfigError, match=message):
        look_at_pair(*sources)
    shutil.copy(base / "tokenizer.json", tuned)
    look_at_pair(*sources)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"pre_tokenizer": split(LLAMA3)}, "becomes"),
    ({"pre_tokenizer": level()}, "becomes"),
    ({"pre_tokenizer": split(QWEN, add_prefix_space=True)}, "becomes"),
    ({"normalizer": None}, "becomes"),
    ({"normalizer": {"type": "NFKC"}}, "becomes"),
    ({"normalizer": {"type": "Lowercase"}}, "becomes"),
    ({"post_processor": begins("<|endoftext|>", 272)}, "becomes"),
    ({"added": ("<|endoftext|>", "<|im_end|>")}, "token 273 is '<.im_start.>' and '<.im_end.>'"),
    ({"added": ("<|endoftext|>",)}, "token 273 is '<.im_start.>' and ''"),
]


@pytest.mark.parametrize(("changes", "words"), CHANGES)
def test_changed_token_ids_make_another_tokenizer(changes, words, tmp_path):
    one = write_tokenizer(tmp_path / "one", "Qwen2Tokenizer", of_bytes(), **QWENS)
    other = write_tokenizer(tmp_path / "b", "Qwen2Tokenizer", of_bytes(), **{**QWENS, **changes})
    assert tokenizer_digest(one) != tokenizer_digest(other)
    assert re.search(words, tokenizer_difference(one, other))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_flags_of_added_tokens_count(flag, tmp_path):
    one = write_tokenizer(tmp_path / "one", "Qwen2Tokenizer", of_bytes(), **QWENS)
    other = Path(shutil.copytree(one, tmp_path / "other"))
    edit(other, lambda it: it["added_tokens"][1].update({flag: True}))
    assert tokenizer_digest(one) != tokenizer_digest(other)


def test_merges_count_and_what_does_not_reach_ids_does_not(tmp_path):
    one = write_tokenizer(tmp_path / "one", "Qwen2Tokenizer", of_bytes(), **QWENS)
    other = Path(shutil.copytree(one, tmp_path / "other"))
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    edit(other, lambda it: it.update(truncation=cut, decoder=None, version="1.0"))
    edit(other, lambda it: it["model"].update(merges=[x.split() for x in it["model"]["merges"]]))
    assert tokenizer_digest(one) == tokenizer_digest(other)
    edit(other, lambda it: it["model"]["merges"].reverse())
    assert tokenizer_digest(one) != tokenizer_digest(other)
    assert "merges" in tokenizer_difference(one, other)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    stated = json.loads((folder / "tokenizer.json").read_text())
    change(stated)
    (folder / "tokenizer.json").write_text(json.dumps(stated))
