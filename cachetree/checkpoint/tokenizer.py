"""A digest of how a tokenizer turns text into ids. It is the same for the different forms in which
releases of transformers save a tokenizer.

Caches are found by token ids, and a model's KV depends on nothing else. So equal ids must mean
equal text: vocabulary and merges are compared exactly. Other steps prepare the text: normalizer,
pre-tokenizer, post-processor, options, and flags of added tokens. They are compared by the ids of
fixed texts, and of the vocabulary written as text. If this misses a difference, a text gets other
ids: a lookup then finds nothing, and no answer is wrong.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer
from tokenizers import __version__ as release

from cachetree.checkpoint.digests import digest_of
from cachetree.checkpoint.safetensors_files import read_json
from cachetree.errors import ConfigError

_FILES: Final = """
    tokenizer.model tiktoken.model vocab.json merges.txt vocab.txt added_tokens.json
"""
_SETTINGS: Final = """
    add_bos_token add_eos_token add_prefix_space added_tokens_decoder do_lower_case legacy
"""
_TEXTS: Final = (
    *("", " ", "   ", "\n", " \n\n  \t\r\n x", "a", " a  b   c ", "\tif x:\n\t\treturn  1\n\n\n"),
    "Don't we'll I'VE they're HE'S It’s e-mail U.S.A. (a.b) [c]_d {e}: <f> 'h' $5.00 #1 @me?!…",
    "0 7 42 123 1234 20240131 3.14159 1,000,000 x1y22 v1.2.3 1st ½ ²³ ٣٤ ४५ 一二三",
    "camelCase HTTPServer snake_case ALL CAPS http://a.b/c?d=e&f=%20 a==b!=c;//--->>> \\n ```py```",
    "naïve Ünïcödé ﬁ ﬂ \u00c5 A\u030a \u212b e\u0301 ẞß İı Ÿœ — – “x” «y» № ™ ｆｕｌｌ ｗｉｄｔｈ",
    "spaces\u00a0a\u2003b\u200bc\u3000d\ufeffe\u2028f\u00adg \x00\x1b[0m \x7f\ufffd",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好,世界。こんにちは世界 カタカナ 안녕하세요 한국어 Xin chào thế giới",
    "👍 \U0001f469\u200d\U0001f469\u200d\U0001f467 🏳\ufe0f\u200d🌈 🇩🇪 ☕\ufe0f ♥ ∑∫√ ≤≥ ← → ░▒ 𝔘𝔫𝔦",
)
"""Texts to tokenise. All their characters have been in Unicode since 2016, so all releases of
`tokenizers` know them."""
_WRITTEN: Final = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})
_TOKENS_PER_TEXT: Final = 32
_SPACES_OF_2023: Final = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
_SPACES: Final = {
    "type": "Metaspace",
    "replacement": "▁",
    "prepend_scheme": "first",
    "split": False,
}
"""Pre-tokenizer that transformers 5 uses instead of `_SPACES_OF_2023`, the normalizer of Llama
tokenizers of 2023."""


def tokenizer_digest(path: Path) -> str:
    """Return a digest of how the tokenizer in folder `path` turns text into ids. Raises
    ConfigError."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return _digest_of_files(path)
    stated, tokenizer = _load(file)
    digest = hashlib.sha256(digest_of(_exact(stated, tokenizer)).encode())
    for text in _texts(stated, tokenizer):
        digest.update(array("I", [len(text), *tokenizer.encode(text).ids]).tobytes())
    return digest.hexdigest()


def tokenizer_difference(a: Path, b: Path) -> str:
    """Describe the first difference between two folders' tokenizers. Empty if there is none, or if
    a folder has no tokenizer.json. Raises ConfigError."""
    files = a / "tokenizer.json", b / "tokenizer.json"
    if not all(it.is_file() for it in files):
        return ""
    (stated, ours), (other, theirs) = map(_load, files)
    one, two = _exact(stated, ours), _exact(other, theirs)
    names = [{id_: token for token, id_ in it["vocab"].items()} for it in (one, two)]
    for id_ in sorted({*names[0], *names[1]}):
        ours_is, theirs_is = (it.get(id_, "") for it in names)
        if ours_is != theirs_is:
            return f"token {id_} is {ours_is!r} and {theirs_is!r}"
    for part in one:
        if one[part] != two[part]:
            return f"the model's {part} differ"
    for text in _texts(stated, ours):
        ids = [it.encode(text).ids for it in (ours, theirs)]
        if ids[0] != ids[1]:
            start = next((i for i, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), 0)
            near = [it[max(0, start - 2) : start + 4] for it in ids]
            return f"{text!r:.120} becomes … {near[0]} … and … {near[1]} …"
    return ""


def _load(file: Path) -> tuple[dict[str, Any], Tokenizer]:
    stated = read_json(file)
    if stated.get("normalizer") == _SPACES_OF_2023 and not stated.get("pre_tokenizer"):
        stated |= {"normalizer": None, "pre_tokenizer": _SPACES}
    stated |= {"truncation": None, "padding": None}
    try:
        return stated, Tokenizer.from_buffer(msgspec.json.encode(stated))
    except Exception as exc:  # tokenizers raises nothing narrower
        raise ConfigError(
            f"{file} cannot be read by tokenizers {release}: {exc}; save it again with the release "
            "that the server runs"
        ) from exc


def _exact(stated: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    model = stated["model"]
    merges = [it if isinstance(it, str) else " ".join(it) for it in model.get("merges") or []]
    return {
        "vocab": tokenizer.get_vocab(with_added_tokens=True),
        "type": model.get("type"),
        "merges": merges,
        "scores": model["vocab"] if isinstance(model.get("vocab"), list) else [],
    }


def _texts(stated: dict[str, Any], tokenizer: Tokenizer) -> Iterator[str]:
    yield from _TEXTS
    for token in stated.get("added_tokens") or []:
        yield f"a{token['content']}b {token['content']}  c\n{token['content']}\n"
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    tokens = sorted(vocab, key=vocab.__getitem__)
    for start in range(0, len(tokens), _TOKENS_PER_TEXT):
        yield "".join(tokens[start : start + _TOKENS_PER_TEXT]).translate(_WRITTEN)


def _digest_of_files(path: Path) -> str:
    files = [path / name for name in _FILES.split() if (path / name).is_file()]
    if not files:
        raise ConfigError(
            f"{path} has no tokenizer.json, tokenizer.model or vocabulary file; save the tokenizer "
            "beside the model"
        )
    contents = {it.name: hashlib.sha256(it.read_bytes()).hexdigest() for it in files}
    settings = path / "tokenizer_config.json"
    stated = read_json(settings) if settings.is_file() else {}
    return digest_of([contents, {k: stated[k] for k in _SETTINGS.split() if k in stated}])
