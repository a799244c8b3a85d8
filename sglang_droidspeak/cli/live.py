"""Asking a running server: what its scheduler says, and `droidspeak peers`."""

from __future__ import annotations

import argparse
import time
from email.utils import parsedate_to_datetime
from typing import Any, Final

import requests

from cachetree import CacheTreeError
from sglang_droidspeak.cli.terminal import show
from sglang_droidspeak.request.meta_info import KEY

_PATIENCE_S: Final = 10


class NoAnswer(CacheTreeError):
    """A server is not there, is none of SGLang's, or runs without this extension."""


def add_parser(commands: Any) -> None:
    peers = commands.add_parser(
        "peers",
        help="show how the peers of a running server are doing",
        description="Ask a running SGLang server which workers it reads from and how they are "
        "doing. Exit status 1 where one of them is not ready.",
    )
    peers.add_argument("url", metavar="URL", help="of SGLang, such as http://127.0.0.1:30000")
    add_key(peers)
    peers.set_defaults(run=_peers)


def add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help="where the server asks for one")


def state_of(url: str, key: str | None) -> tuple[dict[str, Any], float]:
    """What the first rank's scheduler says in `/server_info`, and how far the server's clock, told
    in whole seconds, is ahead of this one at least; raises NoAnswer."""
    before_s = time.time()
    reply = _ask("GET", url, "/server_info", key)
    after_s = time.time()
    try:
        state = reply.json()["internal_states"][0]
        is_ours = KEY in state
    except (LookupError, TypeError, ValueError) as exc:
        raise _is_another(url, exc) from exc
    if not is_ours:
        raise NoAnswer(f"{url} runs without droidspeak")
    if "Date" not in reply.headers:
        return state, 0.0
    told_s = parsedate_to_datetime(reply.headers["Date"]).timestamp()
    return state, max(0.0, told_s - after_s) + min(0.0, told_s + 1 - before_s)


def post(args: argparse.Namespace, path: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of one of the server's pages; raises NoAnswer, with the server's own words."""
    reply = _ask("POST", args.url, path, args.api_key, question)
    try:
        told = reply.json()
    except ValueError as exc:
        raise _is_another(args.url, exc) from exc
    if reply.status_code == 404:
        raise NoAnswer(f"{args.url}: {told.get('error', 'it runs without droidspeak')}")
    return told


def _ask(method: str, url: str, path: str, key: str | None, body: Any = None) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = requests.request(
            method, f"{url.rstrip('/')}{path}", headers=headers, json=body, timeout=_PATIENCE_S
        )
        if reply.status_code != 404:
            reply.raise_for_status()
    except requests.RequestException as exc:
        raise _is_another(url, exc) from exc
    return reply


def _is_another(url: str, exc: Exception) -> NoAnswer:
    return NoAnswer(f"{url} does not answer as an SGLang server does: {exc}")


def _peers(args: argparse.Namespace) -> int:
    state, _ = state_of(args.url, args.api_key)
    peers = state[KEY]["peers"]
    for peer in peers:
        show(f"{peer['address']:30} {peer['state']:12} {peer['reason']}".rstrip())
    return int(any(peer["state"] != "ready" for peer in peers))
