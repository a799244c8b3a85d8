"""Ask a running server: `droidspeak peers`, `explain` and `guard`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import requests

from cachetree import CacheTreeError, ConfigError, printable, with_names
from cachetree.cli import show
from sglang_droidspeak.cli.terminal import tell
from sglang_droidspeak.fleet.client import ask_server
from sglang_droidspeak.guard.plans import ALL, GuardState, strength
from sglang_droidspeak.request.meta_info import KEY

_PATIENCE_S: Final = 10


class NoAnswer(CacheTreeError):
    """A server gives no usable answer: it does not respond, is not SGLang, runs without this
    extension, or does not know what was asked."""


def add_parsers(commands: Any) -> None:
    peers = commands.add_parser(
        "peers",
        help="show the peers of a running server, and what reuse has saved",
        description="Ask a running SGLang server which workers it reads from, in which state they "
        "are, and how many seconds of prefill reuse has saved for each pair. Exit status 1 if a "
        "peer is not ready.",
    )
    peers.add_argument(
        "url", type=server_url, metavar="URL", help="SGLang server, such as http://127.0.0.1:30000"
    )
    add_key(peers)
    peers.set_defaults(run=_peers)
    explain = commands.add_parser(
        "explain",
        help="say why a request was or was not reused",
        description="Ask a running server why a request was or was not served from another model's "
        "cache: which models had how much of the prompt, which plans were possible, their "
        "predicted and measured times, and what to do. The server remembers the last 1,000 "
        "requests that it has answered. With --text, the server says what it would do with "
        "a prompt if it came now.",
    )
    explain.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST_ID",
        help="the `id` in the `meta_info` of the request's answer",
    )
    explain.add_argument(
        "--text", type=Path, metavar="FILE", help="file with a prompt that was not sent"
    )
    explain.add_argument(
        "--url",
        "--model",
        type=server_url,
        required=True,
        metavar="URL",
        help="SGLang server that answers, such as http://127.0.0.1:30000",
    )
    explain.add_argument("--adapter", metavar="NAME", help="LoRA adapter that --text would ask")
    explain.add_argument("--cache-salt", metavar="SALT", help="salt of the tenant, for --text")
    explain.add_argument("--extra-key", metavar="KEY", help="extra key of the tenant, for --text")
    add_key(explain)
    explain.add_argument("--json", action="store_true", help="print one line of JSON")
    explain.set_defaults(run=_explain)
    guard = commands.add_parser(
        "guard",
        help="show which plans the drift guard has stopped, or put them back into service",
        description="Ask a running server about each plan: how far its answers were from exact "
        "runs, and whether it is in service. Exit status 1 if the drift guard has taken a plan "
        "out of service. With --reset, put all plans of one sender's pairs, or of all pairs, back "
        "into service, and drop the evidence against them.",
    )
    guard.add_argument(
        "url", type=server_url, metavar="URL", help="SGLang server, such as http://127.0.0.1:30000"
    )
    guard.add_argument(
        "--reset", metavar="SENDER", help=f"name or model id of the sender, or `{ALL}`"
    )
    add_key(guard)
    guard.add_argument("--json", action="store_true", help="print one line of JSON")
    guard.set_defaults(run=_guard)


def server_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} has no http://; write http://{text}")
    return text


def add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help="API key, if the server asks for one")


def state_of(url: str, key: str | None) -> tuple[dict[str, Any], float]:
    """Return the first rank's state from `/server_info`, and the least number of seconds by which
    the server's clock is ahead of this machine's. Negative: behind. Raises NoAnswer."""
    before_s = time.time()
    reply, info = _ask("GET", url, "/server_info", key)
    after_s = time.time()
    try:
        state = info["internal_states"][0]
        is_ours = KEY in state
    except (LookupError, TypeError) as exc:
        raise _is_another(url, exc) from exc
    if not is_ours:
        raise NoAnswer(f"{url} runs without droidspeak")
    if "error" in state[KEY]:
        raise NoAnswer(f"{url}: {state[KEY]['error']}")
    if "Date" not in reply.headers:
        return state, 0.0
    server_s = parsedate_to_datetime(reply.headers["Date"]).timestamp()
    # The server's time is in whole seconds, and may be one second old.
    return state, max(0.0, server_s - after_s) + min(0.0, server_s + 2 - before_s)


def post(args: argparse.Namespace, path: str, question: dict[str, Any]) -> dict[str, Any]:
    """Send `question` to a path of the server and return its JSON answer. Raises NoAnswer, with the
    server's own message."""
    reply, answer = _ask("POST", args.url, path, args.api_key, question)
    if reply.status_code == 404:
        raise NoAnswer(f"{args.url}: {answer.get('error', 'it runs without droidspeak')}")
    return answer


def _ask(
    method: str, url: str, path: str, key: str | None, body: Any = None
) -> tuple[requests.Response, Any]:
    """Send a request. Return the reply, and its JSON as decoded. Raises NoAnswer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = ask_server(
            method, f"{url.rstrip('/')}{path}", headers=headers, json=body, timeout=_PATIENCE_S
        )
        if reply.status_code in (401, 403):
            raise NoAnswer(
                f"{url} refuses {path} without its key; give --api-key, for /droidspeak pages the "
                "admin key where it has one"
            )
        if reply.status_code != 404:
            reply.raise_for_status()
        return reply, reply.json()
    except requests.RequestException as exc:
        raise _is_another(url, exc) from exc


def _is_another(url: str, exc: Exception) -> NoAnswer:
    return NoAnswer(f"{url} does not answer as an SGLang server does: {exc}")


def _peers(args: argparse.Namespace) -> int:
    state, _ = state_of(args.url, args.api_key)
    peers = state[KEY]["peers"]
    if not peers:
        show(f"{args.url} reads from no peer; its setting `peers` names them")
    for peer in peers:
        beside = " ".join(filter(None, (peer["model"], peer["reason"])))
        line = f"{peer['address']:30} {peer['state']:12} {beside}".rstrip()
        show(printable(with_names(line, state[KEY]["names"])))
    for saving in state[KEY]["savings"]:
        pair = f"{saving['sender']} for {saving['receiver']}"
        times = f"saved {saving['saved_s']:,.1f} s of prefill and lost {saving['lost_s']:,.1f} s"
        show(printable(with_names(f"{times} since the start: {pair}", state[KEY]["names"])))
    return int(any(peer["state"] != "ready" for peer in peers))


def _explain(args: argparse.Namespace) -> int:
    answer = post(args, "/droidspeak/explain", _question(args))
    tell(args, answer, (with_names(it, answer["names"]) for it in explanation_lines(answer)))
    return 0


def _question(args: argparse.Namespace) -> dict[str, Any]:
    if (args.request is None) == (args.text is None):
        raise ConfigError("give a REQUEST_ID, or a prompt with --text FILE")
    beside = {"adapter": args.adapter, "cache_salt": args.cache_salt, "extra_key": args.extra_key}
    beside = {name: value for name, value in beside.items() if value is not None}
    if args.text is None:
        if beside:
            raise ConfigError(f"{', '.join(beside)} needs --text; a request has its own")
        return {"request_id": args.request}
    try:
        text = args.text.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"text {args.text} cannot be read: {exc}") from exc
    tokens = post(args, "/tokenize", {"prompt": text})["tokens"]
    return {"input_ids": tokens, **beside}


def explanation_lines(answer: dict[str, Any]) -> Iterator[str]:
    """Return an explanation as lines of text for a person."""
    detail = f": {answer['detail']}" if answer["detail"] else ""
    yield f"outcome  {answer['outcome']}{detail}"
    yield f"cause    {answer['cause']}"
    yield f"remedy   {answer['remedy']}"
    num_tokens, page, num_held = (
        answer["prompt_tokens"],
        answer["page_tokens"],
        answer["device_pages"],
    )
    held = "" if num_held is None else f", {num_held:,} of them on the device"
    yield f"prompt   {num_tokens:,} tokens, {num_tokens // page:,} whole pages of {page}{held}"
    if answer["model"]:
        yield f"model    {answer['model']}"
        full_s = answer["full_prefill_s"]
        predicted = "not predicted yet" if full_s is None else f"{full_s:.3f} s predicted"
        yield f"         full prefill of the rest {predicted}"
    for holding in answer["holdings"]:
        yield f"has it   {holding['model']} at {holding['location']}: {_held(holding)}"
    for model, num_pages in answer["approximate"].items():
        yield f"has it   {model} only approximately: {num_pages:,} pages, for its own use"
    for sender, state in answer["heirs"].items():
        yield f"heir     of {sender}: {state}"
    for way in answer["ways"]:
        yield f"way      {_way(way)}"
    if answer["profile_command"]:
        yield f"missing  {answer['profile_command']}"
    if answer["measured"]:
        yield f"measured {_measured(answer['measured'])}"


def _held(holding: dict[str, Any]) -> str:
    num_pages, e_pages = holding["num_pages"], holding["e_pages"].items()
    whole = ", ".join(layer for layer, num in e_pages if num >= num_pages)
    parts = [f"of the first {num:,} at layer {layer}" for layer, num in e_pages if num < num_pages]
    if whole:
        parts = [f"of all at layers {whole}", *parts]
    return f"{num_pages:,} pages, E {', '.join(parts) or 'at no layer'}"


def _way(way: dict[str, Any]) -> str:
    why = way["reason"] + (f": {way['detail']}" if way.get("detail") else "")
    who = f"{way['sender']} at {way['location']}"
    if "pages" not in way or way["pages"][0] >= way["pages"][1]:
        return f"{who}: {why}"
    anew = f"layers [{way['block'][0]}, {way['block'][1]}) anew" if "block" in way else "all loaded"
    anew += ", E corrected" if way.get("e_corrected") else ""
    quality = "exact" if way.get("exact") else f"quality {way['quality']:.3f}"
    pages = f"pages [{way['pages'][0]}, {way['pages'][1]})"
    times = (
        f"{way['ttft_s']:.3f} s predicted, saves {way['saving_s']:.3f} s, "
        if "ttft_s" in way
        else ""
    )
    return f"{who}, {pages}, {anew}: {times}{quality}: {why}"


def _measured(measured: dict[str, Any]) -> str:
    steps = ("match", "queued", "fetch", "load", "recompute", "forward")
    times = ", ".join(
        f"{step} {measured[f'{step}_ms']:.1f} ms" for step in steps if measured[f"{step}_ms"]
    )
    exact = "exact" if measured["exact"] else "approximate"
    return f"{measured['reused_tokens']:,} tokens reused, {exact}" + (f": {times}" if times else "")


def _guard(args: argparse.Namespace) -> int:
    answer = post(args, "/droidspeak/guard", {} if args.reset is None else {"reset": args.reset})
    state = msgspec.convert(answer, GuardState)
    tell(args, answer, (with_names(it, state.names) for it in guard_lines(state)))
    return int(bool(state.off) or any(it.is_demoted for it in state.pairs))


def guard_lines(state: GuardState) -> Iterator[str]:
    """Return the drift guard's state as lines of text for a person."""
    if state.off:
        yield f"off: {state.off}"
        return
    rate = state.shadow_rate
    yield f"compares {rate:.1%} of reused requests" if rate else "compares nothing"
    for pair in state.pairs:
        yield f"{pair.sender} to {pair.receiver}"
        for i, plan in enumerate(pair.plans):
            in_service = "on probation" if plan.probation is not None else "in service"
            block = plan.layers + (", E corrected" if plan.e_corrected else "")
            yield (
                f"    {in_service if i < pair.num_left else 'OUT OF SERVICE':15} {block} anew: "
                f"distance {plan.mean_tv:.4f} in {plan.num_shadows:,} shadows, {plan.allowed:.4f} "
                f"allowed, evidence {strength(plan.evidence):,.0f}"
            )
