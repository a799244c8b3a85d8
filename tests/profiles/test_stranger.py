"""The stranger: the same function in other coordinates, and a pair that must fail the gate."""

import filecmp
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch
from measuring_parts import bench_of, sweep
from safetensors.torch import load_file
from shipped import prompt_of
from stranger import SCALE, SEED, in_other_coordinates, write_stranger
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks.oracle import decode, prefill
from cachetree.checkpoint.identity import first_difference, read_model_identity
from profiles.compute.models import ModelSource, load_pair
from profiles.data.records import read_records
from profiles.stats.choice import choose, grid
from tools.pairs.questions import read_documents

PAIRS = Path(__file__).parents[2] / "examples" / "pairs"
SENDER, RECEIVER = PAIRS / "weights" / "sender", PAIRS / "weights" / "receiver"
TRAIN = PAIRS / "data" / "train.jsonl"
FAMILY = (
    "architecture",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "rope",
    "tokenizer",
)


@dataclass(frozen=True)
class Both:
    """The origin and the stranger, and what each of them computes for one prompt."""

    paths: tuple[Path, Path]
    prompt: torch.Tensor

    def models(self):
        return [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in self.paths]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    stranger = tmp_path_factory.mktemp("stranger")
    write_stranger(SENDER, stranger, SEED)
    text = prompt_of(read_records(TRAIN)[0])
    ids = AutoTokenizer.from_pretrained(stranger)(text).input_ids
    return Both((SENDER, stranger), torch.tensor([ids]))


def test_it_is_another_model_of_the_same_family(both):
    origin, stranger = (read_model_identity(path) for path in both.paths)
    assert [getattr(origin, name) for name in FAMILY] == [getattr(stranger, n) for n in FAMILY]
    assert origin.weights != stranger.weights
    assert first_difference(*both.paths) == 0


def test_it_computes_what_its_origin_computes(both):
    with torch.no_grad():
        logits = [model(both.prompt).logits for model in both.models()]
    assert torch.allclose(*logits, atol=1e-2)
    assert torch.equal(*(it.argmax(-1) for it in logits))
    answers = [
        decode(model, prefill(model, both.prompt[:, :96]).kv, both.prompt[:, 96:], 8).ids
        for model in both.models()
    ]
    assert answers[0] == answers[1]


def test_its_cache_is_another_at_every_layer(both):
    origin, stranger = (prefill(model, both.prompt) for model in both.models())
    for ours, theirs in zip(origin.kv, stranger.kv, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float(other.norm()) == pytest.approx(SCALE * float(one.norm()), rel=1e-3)
            assert torch.cosine_similarity(one.flatten(), other.flatten(), 0).abs() < 0.5
    for one, other in zip(origin.e, stranger.e, strict=True):
        assert float(other.norm()) == pytest.approx(float(one.norm()), rel=1e-3)
        assert torch.cosine_similarity(one.flatten(), other.flatten(), 0).abs() < 0.5


def test_no_number_is_rounded(both):
    """All magnitudes are the same, in other places, up to powers of two."""
    ours, theirs = (load_file(path / "model.safetensors") for path in both.paths)
    assert ours.keys() == theirs.keys()
    scales = {"q_proj": 1 / SCALE, "k_proj": SCALE, "v_proj": SCALE, "o_proj": 1 / SCALE}
    for name, tensor in ours.items():
        scale = scales.get(name.split(".")[-2], 1.0)
        assert theirs[name].dtype == tensor.dtype and theirs[name].shape == tensor.shape
        one, other = ((it.float().abs().flatten().sort().values) for it in (tensor, theirs[name]))
        assert torch.equal(one * scale, other), name


def test_the_command_is_deterministic_and_minds_its_seed(both, tmp_path):
    out = tmp_path / "stranger"
    command = [sys.executable, "-m", "tests.profiles.stranger", "--out", str(out)]
    done = subprocess.run(
        command, cwd=PAIRS.parents[1], check=True, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == f"wrote {out}\n"
    names = sorted(file.name for file in SENDER.iterdir())
    assert sorted(file.name for file in out.iterdir()) == names
    assert filecmp.cmpfiles(out, both.paths[1], names, shallow=False)[0] == names
    write_stranger(SENDER, out, SEED + 1)
    weights = "model.safetensors"
    assert not filecmp.cmp(out / weights, both.paths[1] / weights, shallow=False)


def test_a_tensor_that_is_not_understood_is_named():
    weights = load_file(SENDER / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    with pytest.raises(KeyError, match=r"q_proj\.bias"):
        in_other_coordinates(weights, LlamaConfig.from_pretrained(SENDER), SEED)


def test_the_pair_has_no_block_worth_recomputing(both, tmp_path):
    """A twelfth of the questions is used. `test_profile_command` profiles the pair as a user
    would."""
    pair = load_pair(ModelSource(path=both.paths[1]), ModelSource(path=RECEIVER))
    documents = read_documents(TRAIN, pair.tokenizer)[:2]
    with bench_of(pair, documents) as bench:
        swept = sweep(bench, documents, grid(pair.num_layers, 1), pruned=False)
    own = swept.full_prefill
    full = fmean(value for context in own for value in context)
    smaller = {it: of for it, of in swept.candidates.items() if 0 < len(it) < pair.num_layers}
    assert choose(smaller, own, [range(len(own))], 0.05).expected is None
    assert full > 0.9
    for block, scores in swept.blocks.items():
        quality = fmean(score.quality for context in scores for score in context)
        assert (quality >= 0.7 * full) == (len(block) == pair.num_layers), block
