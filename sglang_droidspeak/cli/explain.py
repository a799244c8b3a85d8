"""`droidspeak explain`: why a request was, or a prompt would be, served from another's cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachetree import ConfigError
from sglang_droidspeak.cli import live
from sglang_droidspeak.cli.terminal import tell


def add_parser(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="say why a request was or was not reused",
        description="Ask a running server why a request was or was not served from another model's "
        "cache: who had how much of the prompt, which ways there were, what each was predicted to "
        "take, what was measured, and what to do. The server knows the last 1,000 requests that it "
        "answered. With --text, what would become of a prompt if it came now.",
    )
    explain.add_argument(
        "request", nargs="?", metavar="REQUEST_ID", help="`id` of its answer's `meta_info`"
    )
    explain.add_argument("--text", type=Path, metavar="FILE", help="a prompt that was not sent")
    explain.add_argument(
        "--url",
        "--model",
        required=True,
        metavar="URL",
        help="of the SGLang server that answers with the model, such as http://127.0.0.1:30000",
    )
    explain.add_argument("--adapter", metavar="NAME", help="LoRA adapter for --text")
    explain.add_argument("--cache-salt", metavar="SALT", help="of the tenant, for --text")
    explain.add_argument("--extra-key", metavar="KEY", help="of the tenant, for --text")
    live.add_key(explain)
    explain.add_argument("--json", action="store_true", help="one line of JSON")
    explain.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    told = live.post(args, "/droidspeak/explain", _question(args))
    tell(args, told, lines(told))
    return 0


def _question(args: argparse.Namespace) -> dict[str, Any]:
    if (args.request is None) == (args.text is None):
        raise ConfigError("give a REQUEST_ID, or a prompt with --text FILE")
    beside = {"adapter": args.adapter, "cache_salt": args.cache_salt, "extra_key": args.extra_key}
    beside = {name: value for name, value in beside.items() if value is not None}
    if args.text is None:
        if beside:
            raise ConfigError(f"{', '.join(beside)} is known of a request; give it with --text")
        return {"request_id": args.request}
    try:
        text = args.text.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"text {args.text} cannot be read: {exc}") from exc
    tokens = live.post(args, "/tokenize", {"prompt": text})["tokens"]
    return {"input_ids": tokens, **beside}


def lines(told: dict[str, Any]) -> Iterator[str]:
    """For a person."""
    detail = f": {told['detail']}" if told["detail"] else ""
    yield f"outcome  {told['outcome']}{detail}"
    yield f"cause    {told['cause']}"
    yield f"remedy   {told['remedy']}"
    num_tokens, page = told["prompt_tokens"], told["page_tokens"]
    yield (
        f"prompt   {num_tokens:,} tokens, {num_tokens // page:,} whole pages of {page}, "
        f"{told['device_pages']:,} of them on the device"
    )
    if told["model"]:
        yield f"model    {told['model']}"
        full_s = told["full_prefill_s"]
        predicted = "not predicted yet" if full_s is None else f"{full_s:.3f} s predicted"
        yield f"         full prefill of the rest {predicted}"
    for it in told["holdings"]:
        yield f"has it   {it['model']} at {it['location']}: {_held(it)}"
    for it in told["ways"]:
        yield f"way      {_way(it)}"
    if told["measured"]:
        yield f"measured {_measured(told['measured'])}"


def _held(it: dict[str, Any]) -> str:
    num_pages, e_pages = it["num_pages"], it["e_pages"].items()
    whole = ", ".join(layer for layer, num in e_pages if num >= num_pages)
    parts = [f"of the first {num:,} at layer {layer}" for layer, num in e_pages if num < num_pages]
    if whole:
        parts = [f"of all at layers {whole}", *parts]
    return f"{num_pages:,} pages, E {', '.join(parts) or 'at no layer'}"


def _way(it: dict[str, Any]) -> str:
    why = it["reason"] + (f": {it['detail']}" if it.get("detail") else "")
    who = f"{it['sender']} at {it['location']}"
    if "pages" not in it:
        return f"{who}: {why}"
    anew = f"layers [{it['block'][0]}, {it['block'][1]}) anew" if "block" in it else "all loaded"
    anew += ", E corrected" if it.get("e_corrected") else ""
    quality = "exact" if it.get("exact") else f"quality {it['quality']:.3f}"
    pages = f"pages [{it['pages'][0]}, {it['pages'][1]})"
    times = (
        f"{it['ttft_s']:.3f} s predicted, saves {it['saving_s']:.3f} s, " if "ttft_s" in it else ""
    )
    return f"{who}, {pages}, {anew}: {times}{quality}: {why}"


def _measured(it: dict[str, Any]) -> str:
    steps = ("match", "queued", "fetch", "load", "recompute", "forward")
    times = ", ".join(f"{step} {it[f'{step}_ms']:.1f} ms" for step in steps if it[f"{step}_ms"])
    exact = "exact" if it["exact"] else "approximate"
    return f"{it['reused_tokens']:,} tokens reused, {exact}" + (f": {times}" if times else "")
