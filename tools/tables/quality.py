"""Of quality: the drift guard, and corrected E."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tools.tables.cells import of_rows, told

KINDS: Final = ("bias", "rank 8", "rank 16", "rank 64", "full")
"""Of maps of E."""
SETS: Final = {"long": " long", "texts": " pages and code"}


def guard_drift(found: Any) -> str:
    """How far answers are from exact runs, and how soon the drift guard finds that."""
    columns = {
        "pair": "{pair}",
        "reads": "{reads}",
        "answers": "{answers}",
        "allowed": "{allowed:.3f}",
        "mean distance": "{mean:.3f}",
        "found within 200 requests (median; 2,000: not at all)": "{from the first on}",
        "after 1,000 healthy ones": "{after 1,000}",
        "healthy ones that are compared": "{healthy[compared]:.1%}",
        "runs of 30 days with an alarm, hard documents one after another": "{clusters}",
    }
    rows = []
    for it in found["measured"]:
        row = {**it, "answers": len(it["distances"])}
        for when in ("from the first on", "after 1,000"):
            of = it.get("found", {}).get(when)
            row[when] = "no alarm" if of is None else told("{within_200:.0%} ({median:,.0f})", of)
        clustered = it.get("clustered")
        row["clusters"] = "–" if clustered is None else told("{alarms} of {runs}", clustered)
        rows.append(row)
    return of_rows(rows, columns)


def gate_power(found: Any) -> str:
    """How often plans pass whose true loss is known."""
    columns = {
        "contexts": "{world}",
        "number × questions": "{contexts} × {questions}",
        "true loss": "{loss:.1%}",
        "passes": "{passed:.1%} ± {deviation:.1%}",
        "after contexts, median": "{contexts_taken:.0f}",
        "passed before": "{passed_before:.1%}",
    }
    return of_rows([*found["false_passes"], *found["power"]], columns)


# Corrected E: `docs/e-correction.md`.


def e_correction(found: Any) -> str:
    """Each block from the sender's E as it is, and from corrected E."""
    columns = {"pair, contexts": "{of}", "block": "{block}"}
    for name, of, digits in (("KL", "kl", 4), ("F1", "f1", 3)):
        number, signed = f".{digits}f}}", f":+.{digits}f}}"
        gain = f"{{corrected[{of}_gain]"
        columns |= {
            name: f"{{plain[{of}]:{number}",
            f"{name}, corrected": f"{{corrected[{of}]:{number}",
            f"{name}, difference": f"{gain}[0]{signed} [{gain}[1]{signed}, {gain}[2]{signed}]",
        }
    rows = []
    for of, plans in _measured(found):
        plain = [it for it in plans if f"{it} corrected" in plans]
        for name in plain:
            corrected = plans[f"{name} corrected"]
            as_far = [it for it in plain if plans[it]["kl"] >= corrected["kl"]]
            longest = max(as_far, key=_num_layers, default="–")
            both = {"plain": plans[name], "corrected": corrected}
            rows.append({"of": of, "block": name, **both, "longest": longest})
    return of_rows(rows, {**columns, "as close as": "{longest}"})


def _measured(found: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pair and set with its plans."""
    for it in found["measured"]:
        yield _of_set(it), {plan["plan"]: plan for plan in it["plans"]}


def _of_set(it: Any) -> str:
    return f"{it['pair'].replace('_', ' ')}, {it['contexts']}{SETS.get(it['on'], '')}"


def _num_layers(block: str) -> int:
    start, stop = map(int, block[1:-1].split(", "))
    return stop - start


def e_beside(found: Any) -> str:
    """What no block has to do with."""
    columns = {
        "pair, contexts": "{of}",
        "questions": "{questions}",
        "tokens": "{mean_tokens:,}",
        "KL of reuse": "{reuse[kl]:.4f}",
        "KL of KV maps": "{KV maps[kl]:.4f}",
        "TV of reuse": "{reuse[tv]:.4f}",
        "TV of KV maps": "{KV maps[tv]:.4f}",
        "F1 of full prefill": "{full_prefill:.3f}",
        "F1 of reuse": "{reuse[f1]:.3f}",
        "F1 of KV maps": "{KV maps[f1]:.3f}",
    }
    rows = (
        {**it, **plans, "of": of}
        for it, (of, plans) in zip(found["measured"], _measured(found), strict=True)
    )
    return of_rows(rows, columns)


def e_kinds(found: Any) -> str:
    """KL from E that each kind of map corrects."""
    columns = {"pair, contexts": "{of}", "block": "{block}"}
    columns |= {kind: f"{{{kind}:.4f}}" for kind in ("as it is", *KINDS)}
    rows = (
        {
            "of": of,
            "block": name,
            "as it is": plan["kl"],
            **{kind: plans[f"{name} {kind}"]["kl"] for kind in KINDS},
        }
        for of, plans in _measured(found)
        for name, plan in plans.items()
        if f"{name} bias" in plans
    )
    return of_rows(rows, columns)


def e_maps(found: Any) -> str:
    """What maps explain of the distance between two models' E, layer by layer."""
    columns = {"pair": "{pair}", "layer": "{layer}", "distance": "{distance:.4f}"}
    columns |= {kind: f"{{explained[{kind}]:.0%}}" for kind in KINDS}
    columns |= {"in 16 directions": "{energy_of_16:.0%}", "symmetric": "{symmetric:.0%}"}
    rows = (
        {**of_layer, "pair": it["pair"].replace("_", " "), "layer": layer}
        for it in found["fitted"]
        for layer, of_layer in it["layers"].items()
    )
    return of_rows(rows, columns)


def e_cost(found: Any) -> str:
    """Time to first token on servers."""
    at = "[{{{0}[block][0]}}, {{{0}[block][1]}}): {{{0}[ttft_p50_ms]!k:.2f}} s"
    columns = {
        "pair, documents": "{name}, {documents} of {tokens:,} tokens",
        "full prefill": "{full prefill[ttft_p50_ms]!k:.2f} s",
        "E as it is": at.format("plain"),
        "corrected": at.format("corrected"),
        "corrected − as it is": "{ttft_added[0]:+.1%} [{ttft_added[1]:+.1%}, {ttft_added[2]:+.1%}]",
        "map, of the block": "{processor_time_added[of block]:.1%}",
        "of full prefill": "{processor_time_added[of full prefill]:.1%}",
    }
    rows = ({**it, "name": it["pair"].replace("_", " ")} for it in found["rows"])
    return of_rows(rows, columns)


PARTS: Final = {
    "guard_drift": ("guard_drift", guard_drift),
    "gate_power": ("gate_power", gate_power),
    "e_correction": ("e_correction", e_correction),
    "e_beside": ("e_correction", e_beside),
    "e_kinds": ("e_correction", e_kinds),
    "e_maps": ("e_correction", e_maps),
    "e_cost": ("e_correction_cost", e_cost),
}
