"""The sweep measures what the oracle generates, chooses on one set and judges on the other."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cachetree.identity import read_model_identity
from cachetree.ids import EMPTY_SPAN, Span
from cachetree.profile import read_profile
from profiles.metrics import token_f1
from profiles.oracle import decode, generate, prefill
from profiles.records import prompt_of, read_records, write_records
from profiles.sweep import (
    Scores,
    Settings,
    all_blocks,
    load_pair,
    measure,
    recommend,
    verdict,
)

PAIRS = Path(__file__).parents[2] / "profiles" / "pairs"
SENDER, RECEIVER = PAIRS / "weights" / "sender", PAIRS / "weights" / "receiver"
HELD_OUT = PAIRS / "data" / "held_out.jsonl"


def make_scores(blocks: dict[tuple[int, int], float], full_prefill: float = 1.0) -> Scores:
    all_scores = dict.fromkeys((EMPTY_SPAN, *all_blocks(6)), 0.1)
    all_scores[Span(0, 6)] = full_prefill
    all_scores.update({Span(*block): quality for block, quality in blocks.items()})
    return Scores(sender=0.2, full_prefill=full_prefill, blocks=all_scores, num_questions=10)


def test_every_block_once():
    blocks = all_blocks(12)
    assert len(blocks) == len(set(blocks)) == 12 * 13 // 2
    assert all(len(block) for block in blocks)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({(1, 3): 0.96, (0, 4): 1.0}, (1, 3)),  # fewest layers, though another is better
        ({(1, 3): 0.96, (3, 5): 0.97}, (3, 5)),  # the better of equal size
        ({(3, 5): 0.96, (1, 3): 0.96}, (1, 3)),  # the first of equals
        ({(1, 3): 0.949}, (0, 6)),  # below the floor
        ({(0, 0): 1.0, (1, 3): 0.96}, (1, 3)),  # full reuse is not a block
    ],
)
def test_recommended_is_the_smallest_good_block(blocks, expected):
    assert recommend(make_scores(blocks), 0.05) == Span(*expected)


def test_the_gate_is_relative_to_full_prefill_on_held_out_questions():
    good = verdict(Span(1, 3), make_scores({(1, 3): 0.77}, full_prefill=0.8), 0.05)
    assert good[0] and "0.770" in good[1] and "at least 0.760" in good[1]
    bad = verdict(Span(1, 3), make_scores({(1, 3): 0.75}, full_prefill=0.8), 0.05)
    assert not bad[0] and "below 0.760" in bad[1]


def test_all_layers_never_pass():
    passed, reason = verdict(Span(0, 6), make_scores({}), 0.05)
    assert not passed
    assert "no block smaller" in reason


@pytest.mark.parametrize("page_size", [16, 50])
def test_measured_answers_are_the_oracles(page_size):
    """One batch over a bank of KV gives the F1 that single generations give, block by block."""
    pair = load_pair(SENDER, RECEIVER, torch.float32)
    records = read_records(HELD_OUT)[:2]
    scores = measure(pair, records, Settings(page_size=page_size, max_new=4), "test")
    expected: dict[Span, list[float]] = {}
    full_prefill = []
    for record in records:
        context = pair.tokenizer(f"<bos> {record.context}").input_ids
        num_reused = len(context) // page_size * page_size
        ids = torch.tensor([pair.tokenizer(prompt_of(record)).input_ids])
        prefix, suffix = ids[:, :num_reused], ids[:, num_reused:]
        for block in (EMPTY_SPAN, Span(2, 5), Span(3, 5), Span(4, 5), Span(0, 5), Span(0, 12)):
            made = generate(pair.receiver, pair.sender, prefix, suffix, block, 4).ids
            quality = token_f1(answer_text(pair, made), record.answers)
            expected.setdefault(block, []).append(quality)
        own = decode(pair.receiver, prefill(pair.receiver, prefix).kv, suffix, 4).ids
        full_prefill.append(token_f1(answer_text(pair, own), record.answers))
    for block, qualities in expected.items():
        assert scores.blocks[block] == pytest.approx(sum(qualities) / 2), block
    assert scores.full_prefill == pytest.approx(sum(full_prefill) / 2)
    assert scores.full_reuse < scores.full_prefill


def answer_text(pair, ids: list[int]) -> str:
    end = pair.tokenizer.eos_token_id
    return pair.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)


def run_sweep(tmp_path: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "profiles.sweep", "--sender", str(SENDER)]
    command += ["--receiver", str(RECEIVER), "--cache-dir", str(tmp_path / "identity"), *extra]
    return subprocess.run(
        command, cwd=PAIRS.parents[1], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_command_writes_a_profile_of_the_pair(tmp_path):
    data, held_out, out = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "pair.json"))
    records = read_records(HELD_OUT)
    write_records(records[:12], data)
    write_records(records[12:24], held_out)
    files = ("--data", str(data), "--held-out", str(held_out), "--out", str(out))
    result = run_sweep(tmp_path, *files)
    assert result.returncode == 0, result.stderr
    assert "passed: layers" in result.stdout
    profile = read_profile(out)
    assert profile.sender == read_model_identity(SENDER, tmp_path / "identity")
    assert profile.receiver == read_model_identity(RECEIVER, tmp_path / "identity")
    assert profile.num_questions == 12
    assert profile.passed
    assert len(profile.blocks) == 78
    content = data.read_bytes() + held_out.read_bytes()
    assert profile.data_sha256 == hashlib.sha256(content).hexdigest()


def test_a_missing_data_file_is_one_clear_line(tmp_path):
    none = str(tmp_path / "none.jsonl")
    result = run_sweep(tmp_path, "--data", none, "--held-out", none, "--out", none)
    assert result.returncode == 1
    assert result.stdout.startswith("sweep: data file")
    assert "Traceback" not in result.stderr
