"""Serve while a model is trained: each few seconds the next checkpoint, and the same documents.

It needs two servers of the first checkpoint; see docs/new-weights.md. Each way gets all checkpoints
in turn, while clients ask about the same documents again and again:

    flush   SGLang alone. An update flushes its KV, so each answer is exact
    stale   SGLang alone. The new model reads the old one's KV, and no answer says so
    ours    sglang-droidspeak. KV keeps the name of the model that computed it

An answer is first if its model has not been asked about the document before. Its TTFT is what an
update costs. An answer agrees if it has the tokens that the same model gave after a flush; answers
before the first update do not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import requests

from cachetree.checkpoint import read_model_identity
from profiles.compute.models import ModelSource, load_tokenizer
from profiles.data.documents import Encoder
from profiles.data.records import Record, read_records
from profiles.environment import read_environment
from sglang_droidspeak.fleet.client import Client

PAIRS = Path(__file__).parent / "pairs"
PACKAGES = ("sglang-droidspeak", "sglang", "torch")
HEAD = ("way", "answers", "TTFT first p50", "p95", "TTFT all p50", "p95", "tokens/s", "agree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    prompt: int
    version: int
    """Place of the checkpoint that answered."""
    is_first: bool
    ttft_s: float
    tokens: tuple[int, ...]
    label: Mapping[str, Any] | None
    """Origin of the KV; None from SGLang alone."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """One server in a training loop."""

    client: Client
    checkpoints: Sequence[Path]
    prompts: Sequence[tuple[str, str]]
    """Contexts with their whole prompts."""
    every_s: float
    max_new: int

    def run(self, pool: ThreadPoolExecutor, *, flush: bool) -> Iterator[Answer]:
        """Ask everything, and then again and again while each next checkpoint comes in."""
        seen: set[tuple[int, str]] = set()
        for version, folder in enumerate(self.checkpoints):
            begun_s, had_all = time.monotonic(), False
            body = {"model_path": str(folder.resolve()), "weight_version": str(version)}
            updating = pool.submit(self._update, **body, flush_cache=flush or not version)
            while not had_all or time.monotonic() - begun_s < self.every_s:
                # The first checkpoint is no update: the loop begins with it.
                had_all = updating.done() if version else updating.result() is None
                for prompt, (ttft_s, reply) in enumerate(pool.map(self._ask, self.prompts)):
                    meta, context = reply["meta_info"], self.prompts[prompt][0]
                    by = int(meta["weight_version"])
                    yield Answer(
                        prompt=prompt,
                        version=by,
                        is_first=by > 0 and (by, context) not in seen,
                        ttft_s=ttft_s,
                        tokens=tuple(reply["output_ids"]),
                        label=next(iter(meta.get("droidspeak", ())), None),
                    )
                    seen.add((by, context))
            updating.result()

    def _update(self, **body: Any) -> None:
        """Update until SGLang has flushed as well: for a moment it counts a request as running that
        was answered."""
        while True:
            try:
                self.client.post("/update_weights_from_disk", 600, **body)
                return
            except requests.HTTPError as exc:
                if "cache was not flushed" not in exc.response.text:
                    raise

    def _ask(self, prompt: tuple[str, str]) -> tuple[float, dict[str, Any]]:
        return self.client.stream(prompt[1], max_new_tokens=self.max_new, timeout_s=600)


def wrong_labels(answers: Iterable[Answer], models: Sequence[str]) -> list[Answer]:
    """Choose the answers whose label names another model than the one that answered, a model that
    has not been served yet, or KV of another model as exact.

    An answer is exact in spite of another sender if no layer was loaded: the receiver has then
    recomputed all layers, or has fallen back to a full prefill.
    """

    def is_wrong(version: int, label: Mapping[str, Any]) -> bool:
        own, sender = models[version], label["sender"] or models[version]
        is_known = sender in models[: version + 1] and (label["receiver"] or own) == own
        return not is_known or (label["exact"] and sender != own and label["loaded_layers"] > 0)

    return [it for it in answers if it.label is not None and is_wrong(it.version, it.label)]


def measured(
    way: str, answers: Sequence[Answer], exact: Sequence[Answer], took_s: float
) -> dict[str, Any]:
    """Make a row of the table: times in seconds. `exact` are the answers after flushes."""
    expected = {(it.version, it.prompt): it.tokens for it in exact}
    agree = [it.tokens == expected[it.version, it.prompt] for it in answers if it.version]
    first, every = (
        [it.ttft_s for it in answers if it.is_first or not only] for only in (True, False)
    )
    reused = [it.ttft_s for it in answers if it.label and it.label["outcome"] == "reused"]
    return {
        "way": way,
        "answers": len(answers),
        "first": len(first),
        **{f"first_p{q}_s": float(np.percentile(first, q)) for q in (50, 95)},
        **{f"all_p{q}_s": float(np.percentile(every, q)) for q in (50, 95)},
        "tokens_per_s": sum(len(it.tokens) for it in answers) / took_s,
        "agree": float(np.mean(agree)),
        "reused_p50_s": float(np.median(reused)) if reused else None,
        "outcomes": Counter(it.label["outcome"] for it in answers if it.label),
    }


def printed(row: Mapping[str, Any]) -> str:
    keys = ("first_p50_s", "first_p95_s", "all_p50_s", "all_p95_s")
    times = [f"{row[it]:.2f} s" for it in keys]
    cells = [row["way"], row["answers"], *times]
    cells += [f"{row['tokens_per_s']:.1f}", f"{row['agree']:.1%}"]
    return " ".join(f"{it:>14}" for it in cells)


def prompts(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Make prompts of the data's first records."""
    encode = Encoder(load_tokenizer(ModelSource(path=args.checkpoints[0])), args.chat)

    def text(record: Record) -> str:
        return args.template.format(context=record.context, input=record.input)

    for record in read_records(args.data)[: args.prompts]:
        yield record.context, encode.text(text(record))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    line = [PAIRS / "weights/sender", PAIRS / "weights/receiver"]
    made.add_argument("checkpoints", nargs="*", type=Path, default=line)
    made.add_argument("--server", default="http://127.0.0.1:30000", help="with the extension")
    made.add_argument("--sglang", default="http://127.0.0.1:30001", help="SGLang alone")
    made.add_argument("--data", type=Path, default=PAIRS / "data/held_out.jsonl")
    made.add_argument("--template", default="<bos> {context} {input}")
    made.add_argument("--chat", action="store_true", help="put prompts into the chat template")
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--max-new", type=int, default=8)
    made.add_argument("--clients", type=int, default=2)
    made.add_argument("--json", type=Path, metavar="FILE", help="where the table goes, too")
    made.add_argument("--every", type=float, default=3.0, help="least seconds between updates")
    return made


def main() -> None:
    args = parser().parse_args()
    environment = read_environment(PACKAGES)
    asked = [*prompts(args)]
    answers: dict[str, list[Answer]] = {}
    rows: list[dict[str, Any]] = []
    print(" ".join(f"{it:>14}" for it in HEAD))
    for way, url in (("flush", args.sglang), ("stale", args.sglang), ("ours", args.server)):
        loop = Loop(
            client=Client(url),
            checkpoints=args.checkpoints,
            prompts=asked,
            every_s=args.every,
            max_new=args.max_new,
        )
        # One thread more than clients: it waits for the update.
        with ThreadPoolExecutor(args.clients + 1) as pool:
            begun_s = time.monotonic()
            answers[way] = [*loop.run(pool, flush=way != "stale")]
            took_s = time.monotonic() - begun_s
        rows.append(measured(way, answers[way], answers["flush"], took_s))
        print(printed(rows[-1]), flush=True)
    for outcome, count in rows[-1]["outcomes"].items():
        print(f"ours: {count} answers {outcome}")
    models = [read_model_identity(it).model_id for it in args.checkpoints]
    wrong = wrong_labels(answers["ours"], models)
    if args.json:
        result = {
            "question": "rl_loop",
            "updates": len(models) - 1,
            "documents": len({context for context, _ in asked}),
            "max_new": args.max_new,
            "clients": args.clients,
            "wrong_labels": len(wrong),
            "rows": rows,
            "environment": environment,
        }
        args.json.write_bytes(msgspec.json.encode(result) + b"\n")
    if wrong:
        sys.exit(f"{len(wrong)} labels are wrong, the first: {wrong[0]}")
    print(f"ours: all {rows[-1]['outcomes'].total()} labels are right")


if __name__ == "__main__":
    try:
        main()
    except requests.ConnectionError as exc:
        sys.exit(f"a server is not reached ({exc}); start both first")
