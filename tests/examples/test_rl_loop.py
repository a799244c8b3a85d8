"""The training loop, with servers that only give prepared answers."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from answering import answering

from cachetree.checkpoint import read_model_identity

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOOP = runpy.run_path(str(EXAMPLES / "rl_loop.py"))
OLD, NEW = (
    read_model_identity(EXAMPLES / "pairs/weights" / it).model_id for it in ("sender", "receiver")
)
REUSED = {"outcome": "reused", "exact": False, "sender": OLD, "receiver": NEW, "loaded_layers": 9}
OWN = {"outcome": "own", "exact": True, "sender": None, "receiver": None, "loaded_layers": 0}
BUSY = "Weights were updated, but the cache was not flushed because requests are still running"


class Fake:
    """Stands for SGLang. It first refuses to flush after each update, and answers with its
    version."""

    def __init__(self, labels: Mapping[str, Mapping[str, Any]], *, keeps: bool = False) -> None:
        self.labels = labels
        """Labels by version. Empty for SGLang alone."""
        self.keeps = keeps
        """Whether the server reads KV of the former model until a flush."""
        self.version = self.read = self.refused = "default"

    def answer(self, path: str, asked: Any) -> tuple[int, object]:
        if path == "/update_weights_from_disk":
            self.version = asked["weight_version"]
            if not self.keeps:
                self.read = self.version
            if self.refused != self.version:
                self.refused = self.version
                return 400, {"success": False, "message": BUSY}
            if asked["flush_cache"]:
                self.read = self.version
            return 200, {"success": True, "message": ""}
        meta: dict[str, Any] = {"weight_version": self.version}
        if self.labels:
            meta["droidspeak"] = [self.labels[self.version]]
        reply = {"output_ids": [int(self.read)], "meta_info": meta}
        return 200, f"data: {json.dumps(reply)}\n\n"


def run(monkeypatch, labels, *more):
    ours, alone = Fake(labels), Fake({}, keeps=True)
    with answering(ours.answer) as url, answering(alone.answer) as sglang:
        words = ["--server", url, "--sglang", sglang, "--every", "0", "--prompts", "3"]
        monkeypatch.setattr(sys, "argv", ["rl_loop.py", *words, *more])
        LOOP["main"]()


def test_stale_answers_disagree_and_right_labels_are_counted(monkeypatch, capsys, tmp_path):
    run(monkeypatch, {"0": OWN, "1": REUSED}, "--json", str(tmp_path / "loop.json"))
    head, flush, stale, ours, *rest = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["way", "answers"]
    assert [it.split()[0] for it in (flush, stale, ours)] == ["flush", "stale", "ours"]
    agree = [float(it.split()[-1].rstrip("%")) for it in (stale, ours)]
    assert agree[0] < agree[1]
    written = json.loads((tmp_path / "loop.json").read_bytes())
    _, of_stale, of_ours = written["rows"]
    assert (of_stale["agree"], of_ours["agree"]) == (0, 1)
    assert of_ours["outcomes"]["reused"] == of_ours["answers"] - of_ours["outcomes"]["own"]
    assert (of_stale["reused_p50_s"], written["wrong_labels"]) == (None, 0)
    assert of_ours["reused_p50_s"] > 0
    assert any(it.endswith(" reused") for it in rest) and rest[-1].endswith("labels are right")


def test_a_wrong_label_fails_the_loop(monkeypatch):
    with pytest.raises(SystemExit, match="labels are wrong, the first"):
        run(monkeypatch, {"0": OWN, "1": REUSED | {"exact": True}})


@pytest.mark.parametrize(
    ("label", "is_wrong"),
    [
        (OWN, False),
        (OWN | {"sender": NEW, "receiver": NEW}, False),
        (REUSED, False),
        (REUSED | {"exact": True, "loaded_layers": 0}, False),
        (OWN | {"outcome": "fallback: timeout", "sender": OLD}, False),
        (REUSED | {"exact": True}, True),
        (REUSED | {"receiver": OLD}, True),
        (REUSED | {"sender": "another"}, True),
    ],
)
def test_labels_are_judged_by_the_model_that_answered(label, is_wrong):
    times = {"prompt": 0, "is_first": True, "ttft_s": 1.0, "tokens": (1,)}
    answer = LOOP["Answer"](version=1, label=label, **times)
    assert bool(LOOP["wrong_labels"]([answer], [OLD, NEW, "another"])) is is_wrong
