"""What `benchmarks/e_correction.py` found, as tables: a head and rows each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from profiles.report import words

_FOLDER: Final = Path(__file__).resolve().parent.parent / "benchmarks/results"
RESULTS: Final = _FOLDER / "e_correction.json"
COST: Final = _FOLDER / "e_correction_cost.json"
KINDS: Final = ("bias", "rank 8", "rank 16", "rank 64", "full")
SETS: Final = {"long": "long", "texts": "pages and code"}

Table = tuple[list[str], list[list[str]]]


def blocks() -> Table:
    """Each block from the sender's E as it is, and from corrected E."""
    rows = []
    for found in _read()["measured"]:
        plans = {it["plan"]: it for it in found["plans"]}
        plain = [it for it in plans if f"{it} corrected" in plans]
        for name in plain:
            corrected = plans[f"{name} corrected"]
            as_far = [it for it in plain if plans[it]["kl"] >= corrected["kl"]]
            longest = max(as_far, key=_num_layers, default="–")
            rows.append([_of_set(found), name, *_both(plans[name], corrected), longest])
    head = ["pair, contexts", "block", "KL", "corrected", "difference"]
    return [*head, "F1", "corrected", "difference", "as close as"], rows


def _num_layers(block: str) -> int:
    start, stop = map(int, block[1:-1].split(", "))
    return stop - start


def _both(plain: dict[str, Any], corrected: dict[str, Any]) -> list[str]:
    told = []
    for of, digits in (("kl", 4), ("f1", 3)):
        if of not in plain:
            told += ["–"] * 3
            continue
        mean, low, high = (f"{it:+.{digits}f}" for it in corrected[f"{of}_gain"])
        told += [f"{it[of]:.{digits}f}" for it in (plain, corrected)]
        told.append(f"{mean} [{low}, {high}]")
    return told


def beside() -> Table:
    """What no block has to do with."""
    rows = []
    for found in _read()["measured"]:
        plans = {it["plan"]: it for it in found["plans"]}
        others = plans["reuse"], plans["KV maps"]
        rows.append(
            [
                *(_of_set(found), str(found["questions"]), f"{found['mean_tokens']:,}"),
                *(f"{it['kl']:.4f}" for it in others),
                *(f"{it['tv']:.4f}" for it in others),
                f"{found['full_prefill']:.3f}" if "full_prefill" in found else "–",
                *(f"{it['f1']:.3f}" if "f1" in it else "–" for it in others),
            ]
        )
    head = ["pair, contexts", "questions", "tokens", "KL of reuse", "of KV maps"]
    head += ["TV of reuse", "of KV maps", "F1 of full prefill", "of reuse", "of KV maps"]
    return head, rows


def kinds() -> Table:
    """KL from E that each kind of map corrects."""
    rows = []
    for found in _read()["measured"]:
        plans = {it["plan"]: it for it in found["plans"]}
        for name in plans:
            if f"{name} bias" in plans:
                these = (name, *(f"{name} {it}" for it in KINDS))
                rows.append([_of_set(found), name, *(f"{plans[it]['kl']:.4f}" for it in these)])
    return ["pair, contexts", "block", "as it is", *KINDS], rows


def _of_set(found: dict[str, Any]) -> str:
    on = SETS.get(found["on"])
    pair = found["pair"].replace("_", " ")
    return f"{pair}, {found['contexts']}{f' {on}' if on else ''}"


def cost() -> Table:
    """Time to first token on servers."""
    rows = []
    for it in msgspec.json.decode(COST.read_bytes()):
        corrected, plain = it["corrected"], it["plain"]
        mean, low, high = (f"{100 * value:+.1f}" for value in it["ttft_added"])
        rows.append(
            [
                f"{it['pair'].replace('_', ' ')}, {it['documents']} of {it['tokens']:,} tokens",
                f"{it['full prefill']['ttft_p50_ms'] / 1e3:.2f} s",
                *(f"{_block(at)}: {at['ttft_p50_ms'] / 1e3:.2f} s" for at in (plain, corrected)),
                f"{mean} % [{low}, {high}]",
                *(f"{100 * share:.1f} %" for share in it["processor_time_added"].values()),
            ]
        )
    head = ["pair, documents", "full prefill", "E as it is", "corrected", "corrected − as it is"]
    return [*head, "map, of the block", "of full prefill"], rows


def _block(it: dict[str, Any]) -> str:
    start, stop = it["block"]
    return f"[{start}, {stop})"


def maps() -> Table:
    """What maps explain of the distance between two models' E, layer by layer."""
    rows = [
        [
            it["pair"].replace("_", " "),
            layer,
            f"{found['distance']:.4f}",
            *(words.percent(found["explained"][kind]) for kind in KINDS),
            words.percent(found["energy_of_16"]),
            words.percent(found["symmetric"]),
        ]
        for it in _read()["fitted"]
        for layer, found in it["layers"].items()
    ]
    head = ["pair", "layer", "distance", *KINDS, "in 16 directions", "symmetric"]
    return head, rows


def _read() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(RESULTS.read_bytes())
    return found
