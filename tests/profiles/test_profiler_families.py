"""The whole profiler on every supported family, in every dtype, at tiny sizes.

Reference answers are what plain transformers generates with the receiver in float32, so that a
profiler that computed the receiver wrongly would find it wrong. `DROIDSPEAK_TEST_SEED` chooses the
blocks that are compared with the oracle; it is printed.
"""

from __future__ import annotations

import functools
import io
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from test_mixtures import oracle_logits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.oracle import decode, partial_prefill, prefill
from cachetree.errors import ConfigError
from cachetree.ids import Span
from profiles.compute.models import load_tokenizer
from profiles.data.documents import Question
from profiles.data.metrics import Metric
from profiles.data.records import Record, write_records
from profiles.data.tasks import TaskOptions, score
from profiles.evidence import MeasuredBlock, MeasuredProfile, read_measured
from profiles.profiler import profile_pair
from profiles.random_models import VOCAB_SIZE, shape, write_models
from profiles.settings import DTYPES, Settings
from profiles.splits import load_splits
from profiles.stats.choice import grid

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral"]
ALIKE = ["arcee", "glm4", "glm4_moe", "qwen2_moe", "qwen3_moe"]
"""Families that are run layer by layer like those above. `test_oracle` and `test_models` check this
for each."""
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
NUM_LAYERS, MAX_NEW, PAGE = 4, 4, 16
EOS = 2
LETTERS = "bcdfghjklmnpqrst"
NUM_CONTEXTS, CONTEXT_TOKENS, INPUT_TOKENS = 3, 41, (3, 6)
ALL = Span(0, NUM_LAYERS)
OPTIONS = TaskOptions(template="{context} {input}", metric=Metric.F1, max_new=MAX_NEW)
STD = 0.3
"""Standard deviation of the random weights. It is large, so that the models clearly prefer some
tokens."""
TIE = 1e-3
"""Largest difference of log-probabilities of two tokens that may change places."""
HALF_TIES = 0.1
"""Largest share of tokens that differ in another batch in half precision, because their logits are
equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    sender: Path
    receiver: Path
    train: Path
    held_out: Path


def make_case(folder: Path, family: str) -> Case:
    config = shape(family, layers=NUM_LAYERS, hidden=64, heads=4, kv_heads=2)
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    if hasattr(config, "num_local_experts"):
        config.num_local_experts = 4
    sender, receiver = write_models(folder, config, ["sender", "receiver"], std=STD)
    for path in (sender, receiver):
        write_tokenizer(path)
    case = Case(
        sender=sender,
        receiver=receiver,
        train=folder / "train.jsonl",
        held_out=folder / "held_out.jsonl",
    )
    for path, first_seed in ((case.train, 0), (case.held_out, 100)):
        seeds = range(first_seed, first_seed + NUM_CONTEXTS)
        write_records([it for seed in seeds for it in make_records(receiver, seed)], path)
    return case


def make_records(receiver: Path, seed: int) -> list[Record]:
    """Return questions of different lengths about one random context."""
    random, tokenizer = Random(seed), AutoTokenizer.from_pretrained(receiver)
    context = words(random, CONTEXT_TOKENS)
    records = []
    for num_tokens in INPUT_TOKENS:
        question = words(random, num_tokens)
        ids = tokenizer(f"{context} {question}", return_tensors="pt").input_ids
        answer = tokenizer.decode(generated(receiver, ids), skip_special_tokens=True)
        records.append(Record(input=question, context=context, answers=(answer,)))
    return records


def generated(receiver: Path, ids: torch.Tensor) -> list[int]:
    output = loaded(receiver, "float32", "cpu").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW, do_sample=False
    )
    return output[0, ids.shape[1] :].tolist()


def words(random: Random, num_tokens: int) -> str:
    return " ".join("".join(random.choices(LETTERS, k=2)) for _ in range(num_tokens))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with tokens for words of two letters and for some of three.

    It works on bytes, because transformers takes every tokenizer of a qwen2 model for Qwen's own.
    """
    parts = [("\u0120", a) for a in LETTERS]
    parts += [(f"\u0120{a}", b) for a in LETTERS for b in LETTERS]
    parts += [(f"\u0120{a}{b}", c) for a in LETTERS for b in LETTERS for c in LETTERS]
    single = ["<pad>", "<bos>", "<eos>", "<unk>", "\u0120", *LETTERS]
    merges = parts[: VOCAB_SIZE - len(single)]
    vocabulary = [*single, *map("".join, merges)]
    tokenizer = Tokenizer(
        models.BPE({text: i for i, text in enumerate(vocabulary)}, merges, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
    ).save_pretrained(folder)


@functools.lru_cache(maxsize=2)
def loaded(path: Path, dtype: str, device: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()


def make_settings(case: Case, out: Path, dtype: str, device: str) -> Settings:
    return Settings(
        sender=case.sender,
        receiver=case.receiver,
        data=(str(case.train),),
        held_out=(str(case.held_out),),
        **asdict(OPTIONS),
        out=out,
        dtype=dtype,
        device=device,
        page_size=PAGE,
        pruned=False,
        timing_seconds=0.0,
    )


def make_profile(settings: Settings) -> MeasuredProfile:
    return profile_pair(settings, Console(file=io.StringIO()))


@pytest.fixture(
    scope="module", params=[*FAMILIES, *(pytest.param(it, marks=pytest.mark.slow) for it in ALIKE)]
)
def case(request, tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_profile(case, dtype, device, tmp_path):
    settings = make_settings(case, tmp_path / "pair.json", dtype, device)
    profile = make_profile(settings)
    left = [it for it in tmp_path.iterdir() if it.suffix != ".jsonl"]  # A journal, if undecided.
    assert left == [settings.out], "something is left over"
    assert read_measured(settings.out) == profile
    assert (profile.made.dtype, profile.made.device.partition(":")[0]) == (dtype, device)
    assert_every_block_is_measured(profile)
    assert profile.made.sweep_passes_per_context == NUM_LAYERS + 1
    assert_all_layers_are_full_prefill(profile)
    if dtype == "float32":
        assert profile.train.full_prefill.mean == profile.held_out.full_prefill.mean == 1.0
        seed = int(os.environ.get("DROIDSPEAK_TEST_SEED", Random().randrange(1 << 16)))
        print(f"DROIDSPEAK_TEST_SEED={seed}")
        blocks = [it for it in profile.measured if it.block != ALL]
        first, later = ([it for it in blocks if (it.start > 0) == is_later] for is_later in (0, 1))
        chosen = [Random(seed).choice(first), Random(seed).choice(later)]
        assert_equals_the_oracle(case, settings, chosen)


def assert_every_block_is_measured(profile: MeasuredProfile) -> None:
    assert [it.block for it in profile.measured] == sorted(grid(NUM_LAYERS, 1))
    assert [it.layer for it in profile.layers] == list(range(NUM_LAYERS))
    num_questions = NUM_CONTEXTS * len(INPUT_TOKENS)
    for split in (profile.train, profile.held_out):
        assert (split.num_contexts, split.num_questions) == (NUM_CONTEXTS, num_questions)
        assert split.max_prefix_tokens == CONTEXT_TOKENS // PAGE * PAGE
    for block in profile.measured:
        assert block.quality is not None
        if block.block != ALL:
            assert block.fidelity.kl > 0.01, "another model's KV changes nothing"


def assert_all_layers_are_full_prefill(profile: MeasuredProfile) -> None:
    (block,) = (it for it in profile.measured if it.block == ALL)
    assert block.fidelity.kl == pytest.approx(0.0, abs=1e-6)
    ties = 0.0 if profile.made.dtype == "float32" else HALF_TIES
    assert block.quality == pytest.approx(profile.train.full_prefill.mean, abs=ties)


def assert_equals_the_oracle(case: Case, settings: Settings, measured: list[MeasuredBlock]) -> None:
    sender, receiver = (
        loaded(path, "float32", settings.device) for path in (case.sender, case.receiver)
    )
    tokenizer = load_tokenizer(settings.pair[1])
    train, _ = load_splits(settings, tokenizer, receiver.config.max_position_embeddings)
    for plan in measured:
        kl, quality, margins = 0.0, 0.0, []
        for document in train.documents:
            ids = torch.tensor([document.prefix], device=receiver.device)
            prefix = partial_prefill(receiver, sender, ids, plan.block)
            for question in document.questions:
                kl += kl_of(receiver, prefill(receiver, ids).kv, prefix, question)
                answer = decode(receiver, prefix, suffix_of(question, receiver), MAX_NEW)
                margins += answer.margins
                text = tokenizer.decode(until_end(answer.ids), skip_special_tokens=True)
                quality += score(document.task, text, question.answers)
        num_questions = sum(len(document.questions) for document in train.documents)
        assert plan.fidelity.kl == pytest.approx(kl / num_questions, abs=5e-4), plan.block
        if min(margins) > TIE:
            assert plan.quality == pytest.approx(quality / num_questions, abs=1e-5), plan.block


def kl_of(receiver: PreTrainedModel, own, prefix, question: Question) -> float:
    """Return the mean KL divergence over the tokens of the receiver's own answer."""
    answer = until_end(decode(receiver, own, suffix_of(question, receiver), MAX_NEW).ids)
    expected = answer_logprobs(receiver, own, question, answer)
    got = answer_logprobs(receiver, prefix, question, answer)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def answer_logprobs(receiver, prefix, question, answer):
    """Return the log-probabilities `[answer tokens, vocabulary]` that predict each token of the
    answer."""
    ids = torch.tensor([[*question.suffix, *answer[:-1]]], device=receiver.device)
    return oracle_logits(receiver, prefix, ids)[-len(answer) :].log_softmax(-1)


def suffix_of(question: Question, receiver: PreTrainedModel) -> torch.Tensor:
    return torch.tensor([question.suffix], device=receiver.device)


def until_end(answer: list[int]) -> list[int]:
    return answer[: answer.index(EOS) + 1] if EOS in answer else answer


def test_a_sliding_window_is_refused(tmp_path):
    config = shape("mistral", layers=NUM_LAYERS, hidden=64, heads=4, kv_heads=2)
    config.sliding_window = 24
    sender, receiver = write_models(tmp_path, config, ["sender", "receiver"], std=STD)
    data = tmp_path / "data.jsonl"
    out = tmp_path / "out" / "pair.json"
    case = Case(sender=sender, receiver=receiver, train=data, held_out=data)
    with pytest.raises(ConfigError, match=r"sliding_window = 24 .* only full attention"):
        make_profile(make_settings(case, out, "float32", "cpu"))
    assert not out.exists()
