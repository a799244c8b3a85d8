"""Of `make bench`: one result a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tools.tables.cells import counted, of_rows, table, told

Part = Callable[[Any], str]


def partial_prefill(found: Any) -> str:
    parts = ("match", "fetch", "load", "recompute", "forward")
    columns = {
        "condition": "{condition}",
        "TTFT, ms": "{ttft_p50_ms:,.0f}",
        "sooner": "{speedup:.2f} ×",
        **{f"{part}, ms": f"{{{part}_ms:.1f}}" for part in parts},
    }
    return of_rows(found["rows"], columns) + told(
        "\n{tokens:,} shared and {new_tokens} new tokens, {dtype}, codec {codec}; medians of "
        "{documents} documents. The least that the block could take, by its multiplications, is "
        "{ideal_ms:.0f} ms; it takes {over_ideal:.2f} of that.\n",
        found,
    )


def paced(found: Any) -> str:
    columns = {
        "link, MB/s": "{mb_per_s:.0f}",
        "everything first, ms": "{everything_first_ms:,.0f}",
        "reused first, ms": "{reused_first_ms:,.0f}",
        "pipelined, ms": "{pipelined_ms:,.0f}",
        "predicted, ms": "{predicted_ms:,.0f}",
        "sooner than everything first": "{speedup:.2f} ×",
        "of the smaller part hidden": "{hidden:.0%}",
    }
    return of_rows(found["links"], columns)


def link_sweep(found: Any) -> str:
    columns = {
        "link, MB/s": "{mb_per_s:,}",
        "TTFT of full prefill, ms": "{off_ttft_p50_ms:,.0f}",
        "of `auto`": "{auto_ttft_p50_ms:,.0f}",
        "ratio": "{ratio:.3f}",
        "median of pairs": "{paired_ratio:.3f}",
        "outcomes of `auto`": "{said}",
    }
    rows = ({**it, "said": counted(it["outcomes"])} for it in found["rates"])
    return of_rows(rows, columns)


def never_slower(found: Any) -> str:
    columns = {
        "device": "{device}",
        "requests": "{num_cells:,}",
        "reused": "{num_reused:,}",
        "slowest, of full prefill": "{of_full:.3f}",
        "of the best fixed plan: worst": "{of_best:.2f}",
        "more than a tenth slower": "{num_of_best}",
    }
    rows = (
        {"device": name, **it}
        for name, it in found.items()
        if isinstance(it, dict) and "num_cells" in it
    )
    return of_rows(rows, columns)


def serving(found: Any) -> str:
    columns = {
        "read": "{path}",
        "MB/s": "{moved_mb_s:,.0f}",
        "time between tokens, of that without": "{ratio:.3f} ({p25:.3f} to {p75:.3f})",
        "seconds": "{windows}",
    }
    return of_rows(found["rows"], columns)


def overhead(found: Any) -> str:
    spread = "{{{0}[median]:.3f}} ({{{0}[p25]:.3f}} to {{{0}[p75]:.3f}})"
    columns = {
        "case": "{case}",
        "server": "{server}",
        "TTFT, 512 tokens": spread.format("ttft"),
        "throughput, 8 requests × 32 tokens": spread.format("throughput"),
        "of all rounds together": "{throughput[total]:.3f}",
    }
    return of_rows(found["rows"], columns) + told(
        "\nMedians of {rounds} rounds (quartiles) by the time of the first server.\n", found
    )


def lora(found: Any) -> str:
    columns = {
        "adapters": "{adapters}",
        "2nd to last: TTFT, ms, SGLang": "{SGLang[later_ttft_ms]:,.0f}",
        "extension": "{extension[later_ttft_ms]:,.0f}",
        "sooner": "{later_gain:.2f} ×",
        "all at once: until the last answer, ms, SGLang": "{SGLang[burst_ms]:,.0f}",
        "extension ": "{extension[burst_ms]:,.0f}",
        "sooner ": "{burst_gain:.2f} ×",
    }
    return of_rows(found["counts"], columns) + told(
        "\n{tokens:,} shared tokens, {rounds} round after a warm-up. Each adapter's copy of them "
        "takes {kv_bytes_per_adapter!M:.0f} MB of KV either way, and {e_bytes_per_adapter!M:.1f} "
        "MB of E with the extension.\n",
        found,
    )


def lora_activated(found: Any) -> str:
    columns = {
        "adapters": "{adapters}",
        "2nd to last: TTFT, ms": "{later_ttft_ms:,.0f}",
        "all at once: latest TTFT, ms": "{last_ttft_ms:,.0f}",
        "until the last answer, ms": "{burst_ms:,.0f}",
    }
    return of_rows(found["rows"], columns) + told(
        "\n{count} adapters, {tokens:,} shared tokens, {rounds} rounds after a warm-up.\n", found
    )


def transport(found: Any) -> str:
    speed = "{{{0}[gb_per_s]:.2f}} ({{{0}[cpu_s_per_gb]:.2f}})"
    columns = {
        "frames, MiB": "{frame_mib}",
        **{it: speed.format(it) for it in ("memcpy", "raw TCP", "transport")},
        "of raw TCP": "{of_raw_tcp:.2f}",
        "in place": speed.format("in place"),
        "of memcpy": "{of_memcpy:.2f}",
        "with keys": speed.format("transport, keys"),
        "of without": "{keys_of_plain:.2f}",
    }
    return of_rows(found["rows"], columns) + told(
        "\nGB/s (CPU seconds per GB of both sides together), medians of {repetitions} fetches of "
        "{payload_mib:,} MiB; shares are medians over turns.\n",
        found,
    )


def tree(found: Any) -> str:
    both = "{{times[{0}][p50_us]:.0f}} / {{times[{0}][p99_us]:.0f}}"
    columns = {
        "pages, models": "{pages:,}, {models}",
        "index": "{name}",
        "whole prompt found": both.format("match full"),
        "part of it": both.format("match partial"),
        "insert": both.format("insert"),
        "evict, a call": both.format("evict"),
        "bytes a page and model": "{bytes_per_page_and_model:.0f}",
    }
    return of_rows(found["rows"], columns)


def disk(found: Any) -> str:
    columns = {
        "": "{what}",
        "plain file, GB/s": "{plain[gb_per_s]:.2f}",
        "store, GB/s": "{store[gb_per_s]:.2f}",
        "of a plain file": "{of_plain:.2f}",
        "CPU s/GB, plain": "{plain[cpu_s_per_gb]:.2f}",
        "store": "{store[cpu_s_per_gb]:.2f}",
    }
    return of_rows(found["rows"], columns) + told(
        "\nMedians of {repetitions}, of an entry of {mib} MiB. A start on {small_entries:,} small "
        "entries takes {restart_us_per_entry:.0f} µs for each.\n",
        found,
    )


def compression(found: Any) -> str:
    columns = {
        "codec": "{codec}",
        "bytes": "{ratio:.2f}",
        **{f"{it}, block: F1 (KL)": f"{{{it}[f1]:.3f}} ({{{it}[kl]:.4f}})" for it in PAIRS},
        "encode, GB/s": "{encode:.2f}",
        "decode, GB/s": "{decode:.2f}",
    }
    rows = {it["codec"]: dict(it) for it in found["quality"] if it["what"] == "block"}
    for it in found["quality"]:
        if it["what"] == "block":
            rows[it["codec"]][it["pair"]] = it
    for it in found["speed"]:
        if it["codec"] in rows:
            rows[it["codec"]][it["what"]] = it["gb_per_s"]
    return of_rows(rows.values(), columns)


PAIRS: Final = ("fine-tunes", "adapters")


def fleet_size(found: Any) -> str:
    """One engine in fleets of several sizes, and how each figure grows with the workers."""
    asked = {"one has it": "one", "all": "all", "nobody": "nobody"}
    columns = {
        "workers": "{workers}",
        "pages": "{pages:,}",
        "memory, MB": "{memory_bytes!M:.1f}",
        "messages/s": "{messages_per_s:.0f}",
        "kB/s": "{bytes_per_s!k:.0f}",
        "of a core": "{cpu_share:.1%}",
        **{f"lookup p99, µs: {of}": f"{{{it}_p99_us:.0f}}" for of, it in asked.items()},
    }
    grows = ", ".join(
        f"{name} {{{key}:.2f}}"
        for name, key in (
            ("memory", "memory_bytes"),
            ("messages", "messages_per_s"),
            ("the median lookup that one answers", "one_p50_us"),
            ("that all answer", "all_p50_us"),
            ("that nobody answers", "nobody_p50_us"),
        )
    )
    text = told(f"\nGrows as the number of workers to the power of: {grows}.\n", found["exponents"])
    return of_rows(found["rows"], columns) + text


def shared_tier(found: Any) -> str:
    """Where a receiver finds the same documents, and how soon it answers."""
    columns = {
        "read from": "`{where}`",
        "MB": "{fetched_mb:.0f}",
        "GB/s": "{gb_per_s:.2f}",
        "TTFT, ms": "{ttft_p50_ms:,.0f}",
        "full prefill, ms": "{off_ttft_p50_ms:,.0f}",
        "TTFT of full prefill's": "{paired_ratio:.2f}",
        "on": "{environment[processor]}, {environment[commit]!c}",
    }
    return of_rows(found["rows"], columns)


def gpu(found: Any) -> str:
    """What each part found, and on which device."""
    not_found = {"part", "environment"}
    rows = [
        {**row, "what": what, "found": round(value, 3) if isinstance(value, float) else value}
        for row in found["rows"]
        for what, value in row.items()
        if what not in not_found
    ]
    columns = {
        "part": "{part}",
        "what": "{what}",
        "found": "{found}",
        "on": "{environment[accelerator]}, torch {environment[versions][torch]}",
    }
    return of_rows(rows, columns)


def soaks(found: Any) -> str:
    """The latest of each kind in the log."""
    latest = {it["question"]: it for it in found}
    rows = []
    for question, text in SOAKS.items():
        it = latest[question]
        row = {**it, "num_harms": sum(it.get("harms", {}).values())}
        row["num_broken"] = len(it.get("broken", ()))
        rows.append([question, told(text, row), told("{commit!c}", it)])
    return table(["question", "the latest run", "commit"], rows)


SOAKS: Final = {
    "differences between the tree and its oracle": (
        "{operations:,} random operations, {evictions:,} evictions: {differences} differences"
    ),
    "fuzz": "{runs:,} inputs: {num_broken} decoders broken",
    "requests that failed under faults": (
        "{minutes:.0f} minutes, {requests:,} requests, {num_harms} harms: {failed} failed; the "
        "latest answer {added_s[max]:.2f} s after a full prefill's"
    ),
    "memory of a worker and its client over time": (
        "{minutes:.0f} minutes, growth an hour of all that is resident: own memory of the worker "
        "{growth_per_hour[worker][own]:.2%}, of the client {growth_per_hour[client][own]:.2%}; "
        "what the client maps {growth_per_hour[client][mapped]:.1%}"
    ),
}


_NAMED: Final = (
    *(link_sweep, never_slower, lora, lora_activated, overhead, serving, transport, shared_tier),
    *(tree, fleet_size, disk, compression, gpu),
)


PARTS: Final[dict[str, tuple[str, Part]]] = {
    **{it.__name__: (it.__name__, it) for it in _NAMED},
    "partial_prefill": ("partial_prefill", partial_prefill),
    "paced": ("partial_prefill", paced),
    "soaks": ("endurance", soaks),
}
