"""Commands that send a worker one query (`status`, `match`) or one order (`evict`, `pin`)."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TypeVar

from cachetree.cli.show import show, show_fields, show_json
from cachetree.errors import ConfigError, OrderDenied, written
from cachetree.ids import PAGE_HASH_BYTES, PageHash
from cachetree.transport import Credentials, ask, credentials_of, verbs
from cachetree.tree import join_hashes, page_hashes

_Answer = TypeVar("_Answer", bound=verbs.ToPeer)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text, asked in (
        ("status", "show what a worker holds", _status),
        ("ping", "check that a worker answers", _status),
        ("match", "show which models have how much of a prompt, and where", _match),
        ("evict", "drop a prefix and everything behind it, a model, or everything", _evict),
        ("pin", "keep a prefix in memory", _pin),
        ("unpin", "end a pin made with the same model and prefix", _unpin),
    ):
        command = commands.add_parser(name, help=text)
        add_worker(command)
        command.set_defaults(asked=asked, run=_ping if name == "ping" else _run)
        if name not in ("status", "ping"):
            _add_prefix(command)
        if name in ("evict", "pin", "unpin"):
            command.add_argument("--model", default="", help="id of the model; default: all models")
        if name == "evict":
            command.add_argument("--all", action="store_true", help="drop everything")
        if name == "pin":
            command.add_argument(
                "--ttl",
                type=float,
                metavar="S",
                help="seconds that the pin lasts; default: until `unpin`",
            )


def positive(text: str) -> float:
    """Parse a command-line argument that must be a finite number above 0."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return number


def add_worker(command: argparse.ArgumentParser) -> None:
    """Add the worker's address, its key and a time limit as arguments of a command."""
    command.add_argument("address", help="address of the worker, tcp://HOST:PORT")
    command.add_argument("--json", action="store_true", help="print one line of JSON")
    command.add_argument("--timeout", type=positive, default=2.0, help="most seconds to wait")
    command.add_argument("--key-file", metavar="FILE", help="own secret key, if the worker has one")
    command.add_argument(
        "--server-key", metavar="KEY", help="public key of the worker, or the file with it"
    )


def credentials(args: argparse.Namespace) -> Credentials:
    """Read the key files that `--key-file` and `--server-key` name; raises ConfigError."""
    if (args.key_file is None) != (args.server_key is None):
        raise ConfigError("give --key-file and --server-key together, or neither")
    return credentials_of(args.key_file, args.server_key)


def answer_to(args: argparse.Namespace, question: verbs.ToWorker, kind: type[_Answer]) -> _Answer:
    return ask(args.address, question, kind, timeout_s=args.timeout, credentials=credentials(args))


def _run(args: argparse.Namespace) -> None:
    answer = answer_to(args, *args.asked(args))
    if isinstance(answer, verbs.Pinned) and not any(answer.pages_by_model.values()):
        whose = f"of model {args.model} " if args.model else ""
        raise OrderDenied(f"{args.address} has nothing {whose}of this prefix; nothing is pinned")
    (show_json if args.json else show_fields)(answer)


def _ping(args: argparse.Namespace) -> None:
    begun_at_s = time.monotonic()
    status = answer_to(args, *_status(args))
    answer_ms = (time.monotonic() - begun_at_s) * 1000
    if args.json:
        show_json({"address": args.address, "epoch": status.epoch, "answer_ms": answer_ms})
    else:
        show(f"{args.address} answered in {answer_ms:.1f} ms")


# Each command's question, and the type of its answer.


def _status(_: argparse.Namespace) -> tuple[verbs.StatusRequest, type[verbs.Status]]:
    return verbs.StatusRequest(), verbs.Status


def _match(args: argparse.Namespace) -> tuple[verbs.Find, type[verbs.Found]]:
    return verbs.Find(pages=_prefix_of(args)), verbs.Found


def _evict(args: argparse.Namespace) -> tuple[verbs.Evict, type[verbs.Evicted]]:
    is_given = args.pages is not None or args.tokens is not None
    if args.all and (args.model or is_given):
        raise ConfigError("give --all, or what to evict; not both")
    if not (args.all or args.model or is_given):
        raise ConfigError("say what to evict: a prefix, --model, or --all")
    pages = _prefix_of(args) if is_given else b""
    return verbs.Evict(model=args.model, pages=pages), verbs.Evicted


def _pin(args: argparse.Namespace) -> tuple[verbs.Pin, type[verbs.Pinned]]:
    return verbs.Pin(model=args.model, pages=_prefix_of(args), ttl_s=args.ttl), verbs.Pinned


def _unpin(args: argparse.Namespace) -> tuple[verbs.Unpin, type[verbs.Unpinned]]:
    return verbs.Unpin(model=args.model, pages=_prefix_of(args)), verbs.Unpinned


# An operator names a prefix by page hashes, or by tokens, from which we compute the hashes.


def _add_prefix(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--pages",
        nargs="+",
        metavar="HASH",
        help="page hashes of the prefix, from its first page on, hexadecimal",
    )
    command.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="file with the token ids of a prompt, separated by spaces",
    )
    command.add_argument("--page-size", type=int, metavar="N", help="tokens per page of --tokens")
    command.add_argument(
        "--salt",
        default="",
        metavar="HEX",
        help="the 32 bytes of the tenant that --tokens belong to, as SGLang's function "
        "`storage_namespace_seed(extra_key, cache_salt)` in `sglang.srt.mem_cache.utils` "
        "returns them",
    )


def _prefix_of(args: argparse.Namespace) -> bytes:
    """Return the page hashes of `--pages` or `--tokens`, joined into one byte string. Raises
    ConfigError if an argument is missing or invalid, or if the tokens fill no page."""
    if (args.pages is None) == (args.tokens is None):
        raise ConfigError("name a prefix, either by --pages, or by --tokens with --page-size")
    if args.pages is not None:
        return join_hashes([_page(text) for text in args.pages])
    if args.page_size is None or args.page_size <= 0:
        raise ConfigError("--tokens needs --page-size: give that of the family, for example 64")
    if len(args.salt) not in (0, 64):
        raise ConfigError(f"--salt has {len(args.salt)} digits; give a tenant's 32 bytes in 64")
    try:
        tokens = [int(word) for word in args.tokens.read_text().split()]
        pages = page_hashes(tokens, args.page_size, bytes.fromhex(args.salt))
    except OSError as exc:
        raise ConfigError(
            f"--tokens {written(args.tokens)} cannot be read: {exc.strerror}"
        ) from exc
    except (ValueError, OverflowError) as exc:
        raise ConfigError(
            f"--tokens {args.tokens}, or --salt: {exc}; give integers there, and hex here"
        ) from exc
    if not pages:
        raise ConfigError(
            f"--tokens {args.tokens} has {len(tokens)} tokens, which is less than a page"
        )
    return join_hashes(pages)


def _page(text: str) -> PageHash:
    try:
        page = bytes.fromhex(text)
    except ValueError:
        page = b""
    if len(page) != PAGE_HASH_BYTES:
        raise ConfigError(f"--pages has {text!r}; a page hash is {2 * PAGE_HASH_BYTES} hex digits")
    return PageHash(page)
