"""`droidspeak verify`: check whether two running servers share as they should."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from cachetree import CacheTreeError, ConfigError, printable
from cachetree.cli import show, show_json
from profiles.cli import settings_of
from profiles.settings import Settings, add_flags
from sglang_droidspeak.cli import doctor
from sglang_droidspeak.cli.ask import add_key, server_url, state_of
from sglang_droidspeak.fleet.client import Client
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.verify.answer import new_salt
from sglang_droidspeak.verify.check import Check, line
from sglang_droidspeak.verify.checks import Run, all_checks
from sglang_droidspeak.verify.prompts import Prompt, made, of_data

_NUM: Final = 6
_TOKENS: Final = 2000
_SPARE: Final = 128
"""Number of tokens that a document leaves free for a question and its answer."""


def add_parser(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="send requests to check that two running servers share as they should",
        description="Have one running server read documents, and another answer questions about "
        "them. Check the results: hits, answers, labels, tenants, distance from full prefill, and "
        "time to the first token. The command changes no setting, and every request has a salt of "
        "its own. With small models, or on a GPU, it takes a minute or two. Each check prints a "
        "line. If something is wrong, the line has the expected result, and the exit status is 1.",
        allow_abbrev=False,
    )
    verify.add_argument(
        "sender", type=server_url, metavar="SENDER_URL", help="server that reads first"
    )
    verify.add_argument(
        "receiver",
        type=server_url,
        nargs="?",
        metavar="RECEIVER_URL",
        help="server that answers; default: the sender's, to check two adapters of one server",
    )
    verify.add_argument(
        "--sender-adapter", metavar="NAME", help="LoRA adapter that reads first; default: the base"
    )
    verify.add_argument(
        "--receiver-adapter", metavar="NAME", help="LoRA adapter that answers; default: the base"
    )
    verify.add_argument(
        "--num", type=int, default=_NUM, metavar="N", help=f"number of documents; default: {_NUM}"
    )
    verify.add_argument(
        "--tokens",
        type=int,
        default=_TOKENS,
        metavar="N",
        help=f"tokens of a document; default: {_TOKENS}, or as many as the profile covers",
    )
    verify.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="tokenizer for --data; default: the receiver's",
    )
    verify.add_argument(
        "--flush",
        action="store_true",
        help="also read from host memory, after emptying the radix caches of both servers; other "
        "users need these caches, too",
    )
    add_key(verify)
    verify.add_argument("--json", action="store_true", help="print one line of JSON")
    add_flags(verify, "data")
    verify.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    if args.num < 2:
        raise ConfigError(f"--num is {args.num}; it has to be at least 2, to compare documents")
    begun_s, done = time.monotonic(), list[Check]()
    for check in checks(args):
        done.append(check)
        if not args.json:
            show(printable(line(check)))
    num, seconds = sum(check.ok for check in done), time.monotonic() - begun_s
    if args.json:
        show_json({"passed": num == len(done), "seconds": round(seconds, 1), "checks": done})
    else:
        show(f"{num} of {len(done)} checks hold; {seconds:.0f} s")
    return int(num < len(done))


def checks(args: argparse.Namespace) -> Iterator[Check]:
    """Yield checks of what the servers report about themselves, then checks by requests."""
    sender = Client(args.sender, args.api_key, args.sender_adapter)
    receiver = Client(args.receiver or args.sender, args.api_key, args.receiver_adapter)
    by_url = dict[str, Mapping[str, Any] | None]()
    for url in dict.fromkeys((sender.url, receiver.url)):
        by_url[url] = yield from doctor.running(url, args.api_key)
    states = [it for it in (by_url[sender.url], by_url[receiver.url]) if it is not None]
    if len(states) < 2:
        return  # A line above says why.
    yield from settings(states)
    run = Run(
        sender=sender,
        receiver=receiver,
        prompts=_prompts(args, states[1], receiver),
        page=states[1]["page_size"],
        is_own_data=bool(args.data),
        flushes=args.flush,
        block=_block(states[1]),
    )
    yield from all_checks(run)
    for url in by_url:
        yield _afterwards(url, args.api_key)


def _afterwards(url: str, key: str | None) -> Check:
    """Check memory and disk after the requests, because a server learns that its disk is full only
    when it writes."""
    name = f"{url}: memory, disk"
    try:
        state, _ = state_of(url, key)
    except CacheTreeError as exc:
        return Check(name=name, ok=False, found=str(exc), remedy="look into the server's log")
    return msgspec.structs.replace(doctor.room(state[KEY]), name=name)


def settings(states: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check that both servers have the same page size, and that the receiver has its gate on."""
    pages = [it["page_size"] for it in states]
    yield Check(
        name="page size",
        ok=len({*pages}) == 1,
        found=" and ".join(map(str, dict.fromkeys(pages))),
        remedy="give both servers the same --page-size",
    )
    linker = states[1].get("unified_cache_external_linker_config") or {}
    is_on = (linker.get("linker_extra_config") or {}).get("gate") != "none"
    yield Check(
        name="gate",
        ok=is_on,
        found="on" if is_on else "off: any block that a request names is served, proven or not",
        remedy="leave `gate` out of the receiver's settings; `none` is for measurements",
    )


def _block(state: Mapping[str, Any]) -> str | None:
    """Return the recommended block, as `start:stop`, if all usable pairs have the same. None if
    their blocks differ, or there is no usable pair."""
    blocks = {tuple(it["block"]) for it in state[KEY]["pairs"] if it["usable"] and it["block"]}
    return "{}:{}".format(*blocks.pop()) if len(blocks) == 1 else None


def _prompts(
    args: argparse.Namespace, state: Mapping[str, Any], receiver: Client
) -> Sequence[Prompt]:
    page = int(state["page_size"])
    if args.data:
        settings = settings_of(args, {"page_size": page}, Settings)
        tokenizer = str(args.tokenizer or state["tokenizer_path"])
        return of_data(settings, tokenizer, args.num, args.max_prompt_tokens)
    covered = [it["measured_tokens"] for it in state[KEY]["pairs"] if it["usable"]]
    longest = receiver.post("/tokenize", prompt="")["max_model_len"] - _SPARE
    length = min(args.tokens, longest, *(it for it in covered if it is not None))
    return [*made(receiver, args.num, length, page, new_salt())]
