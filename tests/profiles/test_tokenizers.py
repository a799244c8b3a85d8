"""The profiler makes the same tokens of a text as a server."""

import json
from collections.abc import Iterable

import pytest
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from profiles.compute.models import ModelSource, load_tokenizer
from profiles.random_models import shape

SAID = "<|user|>\nRead this: the cat , sat .<|end|>\n<|assistant|>\n"


def bpe(letters: Iterable[str]) -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *sorted(letters)]
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"])
    return tokenizer


def of_bytes(*, begins: bool) -> Tokenizer:
    """Return a tokenizer of the kind of Llama 3. Its post-processor puts BOS first if it
    `begins`."""
    tokenizer = bpe(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begins:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def of_pieces() -> Tokenizer:
    """Return a tokenizer of the kind of Llama 2 and Phi-3."""
    tokenizer = bpe({*SAID.replace(" ", "▁")})
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    return tokenizer


@pytest.mark.parametrize(
    ("family", "tokenizer", "name", "begins"),
    [
        ("llama", of_bytes(begins=True), "LlamaTokenizerFast", {"add_bos_token": True}),
        ("llama", of_bytes(begins=False), "LlamaTokenizerFast", {}),
        ("llama", of_bytes(begins=True), "LlamaTokenizer", {"add_bos_token": False}),
        ("llama", of_bytes(begins=True), "PreTrainedTokenizerFast", {"add_bos_token": False}),
        ("llama", of_pieces(), "LlamaTokenizer", {"add_bos_token": None}),
        ("phi3", of_pieces(), "LlamaTokenizer", {"add_bos_token": False}),
        ("glm4", of_pieces(), "PreTrainedTokenizer", {"add_bos_token": True}),
        ("qwen3", of_bytes(begins=False), "Qwen2Tokenizer", {"add_bos_token": True}),
        ("qwen3", of_bytes(begins=True), None, {}),
    ],
)
def test_a_folder_has_the_tokenizer_of_a_server(family, tokenizer, name, begins, tmp_path):
    shape(family, layers=1, hidden=64, heads=4, kv_heads=2).save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stated = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **begins}
    config = json.dumps(stated | {"tokenizer_class": name})
    (tmp_path / "tokenizer_config.json").write_text(config)
    ours, servers = load_tokenizer(ModelSource(path=tmp_path)), get_tokenizer(str(tmp_path))
    ids = servers(SAID).input_ids
    assert ours(SAID).input_ids == ids
    assert ours.decode(ids) == servers.decode(ids)
    assert len(ids) > 20


def test_a_folder_needs_no_tokenizer_json(tmp_path):
    shape("qwen3", layers=1, hidden=64, heads=4, kv_heads=2).save_pretrained(tmp_path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {it: token for token, it in enumerate(["<|endoftext|>", *letters])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, servers = load_tokenizer(ModelSource(path=tmp_path)), get_tokenizer(str(tmp_path))
    assert ours(SAID).input_ids == servers(SAID).input_ids
    assert len(ours(SAID).input_ids) > 20
